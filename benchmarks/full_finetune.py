"""Tokens a second of full fine-tuning beside the bound of bf16 arithmetic, on one GPU or several.

One JSON line a mode:

    python benchmarks/full_finetune.py --shape qwen3-1.7b                    # every mode of the shape
    python benchmarks/full_finetune.py --shape qwen3-8b --mode bf16-8bit --budget 16384 recompute=full
    python benchmarks/full_finetune.py --shape qwen3-8b --mode fp32 --gpus 4 strategy=fsdp

Samples have chat-like lengths, 60 % label tokens, 32 a step; the first 3 steps are left out.
Each mode runs in fresh processes through the real plan, set-up and loop; nothing is saved. The bound is what 790
TFLOP/s a GPU (an H200's measured bf16 matrix product) would give if a token cost only

    6 N + 6 V H f + 3.5 A,   A = 2 layers heads head_dim S

with N weights of the layers' linears, V H of the head, f the share of label tokens, S = sum(length^2) / sum(length).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.machine import gpu_memory
from bench.rows import SAMPLES_PER_STEP
from bench.shapes import SHAPES, shape_config
from whole_steps import make_parser, prepare, spread_over, take_steps

from flatout.bench.figures import WARMUP_STEPS, recorded_figures
from flatout.bench.inputs import CHAT, LABEL_SHARE
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback
from flatout.track.record import StepRecord
from flatout.trainer.state import Run

TFLOPS = 790
BF16 = ["full.weights=bf16", "model.precision=bf16"]
IN_BACKWARD = ["full.update=backward", "optim.max_grad_norm=null"]
MODES = {
    "fp32": [],
    "bf16": BF16,
    "bf16-8bit": [*BF16, "optim.name=adamw8bit"],
    "bf16-8bit-backward": [*BF16, "optim.name=adamw8bit", *IN_BACKWARD],
    "fp8": ["full.compute=fp8"],
    "fp8-bf16": [*BF16, "full.compute=fp8"],
    "fp8-bf16-8bit": [*BF16, "full.compute=fp8", "optim.name=adamw8bit"],
}
# masters, gradients and moments of 8B parameters in fp32 are 131 GB before the first activation
WITHIN_ONE_GPU = ("bf16", "bf16-8bit", "bf16-8bit-backward", "fp8-bf16-8bit")


def bound_tokens_per_s(shape: dict[str, Any], lengths: list[int]) -> float:
    """Tokens a second at TFLOPS by the formula above."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    query = shape["num_attention_heads"] * shape["head_dim"]
    key = shape["num_key_value_heads"] * shape["head_dim"]
    linears = layers * hidden * (2 * query + 2 * key + 3 * shape["intermediate_size"])
    attention = 2 * layers * query * sum(n * n for n in lengths) / sum(lengths)
    head = shape["vocab_size"] * hidden
    return TFLOPS * 1e12 / (6 * linears + 6 * head * LABEL_SHARE + 3.5 * attention)


def lateness(steps: list[StepRecord], after: int) -> float:
    """Seconds by which the step after a save took longer than its tokens do."""
    usual = statistics.median(step.step_s / step.num_tokens for step in steps[WARMUP_STEPS:])
    return round(steps[after].step_s - usual * steps[after].num_tokens, 3)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """This process's part of the run; the figures on the first rank."""
    launched_s, shape, rank = time.time(), shape_config(args.shape), Rank.from_env()
    budget = [f"batch.micro_batch_tokens={args.budget}"] if args.budget else []
    overrides = ["method=full", "optim.lr=1e-5", "model.init=random", *budget, *MODES[args.mode], *args.overrides]
    saved_step = args.steps // 2 + 1
    if args.save:
        overrides += ["checkpoint.asynchronous=true", f"checkpoint.every_steps={saved_step}"]
    out, found = args.out / args.mode, {}

    def before(run: Run) -> None:
        # the few steps here save seconds after the start
        if run.saver.staging is not None:
            run.saver.staging.wait_reserved()

    def after(run: Run, recorder: MemoryCallback) -> None:
        if args.save and rank.is_first:
            found["next_step_late_s"] = lateness(recorder.steps, saved_step)
            print(json.dumps(found), flush=True)  # writing the files takes minutes
        run.saver.wait()

    taken = take_steps(out, overrides, args.steps, args.samples, before=before, after=after)
    if not rank.is_first:
        return None
    steps, rates = taken.records, recorded_figures(taken.recorder, launched_s)
    per_step = args.samples // SAMPLES_PER_STEP
    timed = [n for index in range(WARMUP_STEPS * per_step, args.steps * per_step) for n in CHAT.group(index)]
    bound = bound_tokens_per_s(shape, timed) * rank.world
    if args.save:
        events = map(json.loads, (out / "run" / "events.jsonl").read_text().splitlines())
        saved = next(event for event in events if event["kind"] == "saved")
        found.update({key: saved[key] for key in ("staged_s", "copied_s", "save_s")})
        found["save_made_wait_s"] = round(found["staged_s"] + found["next_step_late_s"], 3)
    peak_gib = gpu_memory().get("peak_allocated_gib", max(step.peak_memory_bytes for step in steps) / 2**30)
    return {
        "shape": args.shape,
        "mode": args.mode,
        "gpus": rank.world,
        "samples_per_step": args.samples,
        "overrides": overrides,
        "tokens_per_s": round(rates["tokens_per_s"]),
        "bound_tokens_per_s": round(bound),
        "bound": f"(6N + 6VHf + 3.5A) at {TFLOPS} TFLOP/s bf16 a GPU",
        "share_of_bound": round(rates["tokens_per_s"] / bound, 3),
        "step_p50_s": round(rates["step_p50_s"], 4),
        "micro_batches": [step.num_micro_batches for step in steps[WARMUP_STEPS:]],
        "peak_gib": round(peak_gib, 2),
        **found,
        "losses": [round(step.loss, 4) for step in steps],
    }


def main() -> None:
    parser = make_parser(__doc__, gpus=1, steps=12)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name == "tiny" or "qwen3-" in name])
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--samples", type=int, default=SAMPLES_PER_STEP, help="samples a step, over all GPUs")
    parser.add_argument(
        "--save", action="store_true", help="save the state once beside training, and tell what it waited"
    )
    args = parser.parse_intermixed_args()
    if args.mode and not args.part:
        prepare(args.out / args.mode, shape_config(args.shape), args.steps, args.samples)
        spread_over(args.gpus)
    if args.mode:
        if (found := measure(args)) is not None:
            print(json.dumps(found), flush=True)
        return
    for mode in WITHIN_ONE_GPU if args.shape == "qwen3-8b" else MODES:
        # a fresh process each: neither memory nor graphs are shared, and one that fails does not stop the others
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--mode", mode], check=False)


if __name__ == "__main__":
    main()
