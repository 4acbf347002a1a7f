"""Steps of a model with random weights, on one GPU or several: tokens a second, memory a GPU, losses; nothing is saved.

    python benchmarks/throughput.py --shape qwen3-8b --budget 24000 --steps 12 base.storage=fp8
    python benchmarks/throughput.py --gpus 4 --shape llama-70b --layers 40 --steps 6 base.storage=nf4 strategy=fsdp
    python benchmarks/throughput.py --gpus 2 --tokens 262144 --steps 3 context.parallel=2   # a long document a step
    python benchmarks/throughput.py --shape tiny device=cpu                                 # on a CPU

Named settings, one JSON line each, in fresh processes; the last line compares the others with the first:

    python benchmarks/throughput.py --shape qwen3-1.7b --rows full                          # every form of a method
    python benchmarks/throughput.py --shape qwen3-8b --rows full-bf16-8bit --budget 16384 recompute=full
    python benchmarks/throughput.py --gpus 2 --shape qwen3-1.7b --rows strategies method=full optim.lr=1e-5
    python benchmarks/throughput.py --shape qwen3.5-4b --rows packed,rows                 # needs flash-linear-attention
    python benchmarks/throughput.py --shape qwen3-8b --rows cross_entropy,weighted_tokens --budget 24000
    python benchmarks/throughput.py --shape qwen3-1.7b --rows full-fp32,full-fp8_rowwise --lengths chain --steps 200 \\
        optim.lr=3e-4 schedule.warmup_steps=20                                              # 200 losses of both
    python benchmarks/throughput.py --rows memory --steps 3                                 # planned beside measured
    for share in off on; do python benchmarks/throughput.py --shape qwen3-8b --budget 24000 --system-prompt 200 \\
        base.storage=fp8 batch.share_prefix=$share; done

Samples have chat-like lengths, 32 a step, or reasoning lengths, 8 a step; 60 % are label tokens. The tokens of `chain`
depend on the one before, so that weights can learn something. The first 3 steps are left out of the rate, or all but
the last of fewer. `held_gib` is what a GPU holds between steps, `peak_gib` the most at any time, `load_peak_gib` the
most up to the first step; several GPUs each have a value. `--profile N` shows where the time of N steps of the first
rank goes, as `flatout train --profile` does; then the rate includes the profiler's overhead. `--save` saves the state
once beside training, and tells how long training waited. Full fine-tuning is compared with its bound, what 790 TFLOP/s
a GPU (an H200's measured bf16 matrix product) would give if a token cost only

    6 N + 6 V H f + 3.5 A,   A = 2 layers heads head_dim S

with N weights of the layers' linears, V H of the head, f the share of label tokens, S = sum(length^2) / sum(length).
`worst_difference` of losses is that of means over 10 steps, relative to the first row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.figures import WARMUP_STEPS
from bench.rows import LENGTHS
from bench.samples import CHAT, LABEL_SHARE, MAX_ID, MIN_ID, Samples, random_samples
from bench.shapes import SHAPES, shape_config
from bench.steps import planned_memory
from whole_steps import gib, on_each_rank, prepare, spread_over, take_steps

from flatout.data.add_column import add_column
from flatout.track.callback import MemoryCallback
from flatout.track.record import StepRecord
from flatout.trainer.state import TrainingRun

TFLOPS = 790
FULL = ["method=full", "optim.lr=1e-5"]
BF16 = [*FULL, "full.weights=bf16", "model.precision=bf16"]
EIGHT_BIT = [*BF16, "optim.name=adamw8bit"]
# words of this command by name
ROWS = {
    "full-fp32": FULL,
    "full-bf16": BF16,
    "full-bf16-8bit": EIGHT_BIT,
    "full-bf16-8bit-backward": [*EIGHT_BIT, "full.update=backward", "optim.max_grad_norm=null"],
    "full-fp8": [*FULL, "full.compute=fp8"],
    "full-fp8_rowwise": [*FULL, "full.compute=fp8_rowwise"],
    "full-fp8-bf16": [*BF16, "full.compute=fp8"],
    "full-fp8-bf16-8bit": [*EIGHT_BIT, "full.compute=fp8"],
    **{name: [f"strategy={name}"] for name in ("ddp", "zero1", "zero2", "zero3")},
    **{
        f"deepspeed-{stage}": [
            "strategy=deepspeed",
            "deepspeed=" + json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}}),
        ]
        for stage in (1, 2, 3)
    },
    **{name: [f"batch.layout={name}"] for name in ("packed", "rows")},
    **{name: [f"objective={name}"] for name in ("cross_entropy", "weighted_tokens")},
    # planned beside measured memory
    "0.6b-bf16-none": ["--shape=qwen3-0.6b", "--budget=24000", "recompute=none"],
    "0.6b-bf16-none-eager": ["--shape=qwen3-0.6b", "--budget=24000", "recompute=none", "compile=off"],
    "0.6b-full-none": ["--shape=qwen3-0.6b", "--budget=24000", "recompute=none", *FULL],
    "1.7b-bf16-none": ["--shape=qwen3-1.7b", "--budget=24000", "recompute=none"],
    "1.7b-nf4-none": ["--shape=qwen3-1.7b", "--budget=8192", "recompute=none", "base.storage=nf4"],
    "1.7b-full-none": ["--shape=qwen3-1.7b", "--budget=8192", "recompute=none", *FULL],
    "1.7b-bf16-8bit-full": ["--shape=qwen3-1.7b", "--budget=16384", "recompute=full", *EIGHT_BIT],
    "8b-bf16-none": ["--shape=qwen3-8b", "--budget=16384", "recompute=none"],
    "8b-bf16-budget": ["--shape=qwen3-8b", "--budget=16384", "recompute=budget"],
    "8b-bf16-full": ["--shape=qwen3-8b", "--budget=16384", "recompute=full"],
    "8b-bf16-offload": ["--shape=qwen3-8b", "--budget=24000", "recompute=offload"],
    "8b-fp8-none": ["--shape=qwen3-8b", "--budget=16384", "recompute=none", "base.storage=fp8"],
    "8b-fp8-full": ["--shape=qwen3-8b", "--budget=16384", "recompute=full", "base.storage=fp8"],
    "8b-nf4-full": ["--shape=qwen3-8b", "--budget=2048", "recompute=full", "base.storage=nf4"],
    "8b-nf4-fp8-none": [
        "--shape=qwen3-8b", "--budget=8192", "recompute=none", "base.storage=nf4", "base.compute=fp8",
    ],
}  # fmt: skip
GROUPS = {
    "full": [name for name in ROWS if name.startswith("full-")],
    # masters, gradients and moments of 8B parameters in fp32 are 131 GB before the first activation
    "full-one-gpu": ["full-bf16", "full-bf16-8bit", "full-bf16-8bit-backward", "full-fp8-bf16-8bit"],
    "strategies": ["ddp", "zero1", "zero2", "zero3", "deepspeed-1", "deepspeed-2", "deepspeed-3"],
    "memory": [name for name in ROWS if name.startswith(("0.6b-", "1.7b-", "8b-"))],
}
# of a chain: its tokens, and the tokens that may follow each, with chances of 1, 1/2, 1/3, ...
NUM_TOKENS, NUM_FOLLOWERS = 64, 4
MEAN_OVER = 10


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """The model's config.json."""
    shape = shape_config(args.shape)
    layers, longest = shape["num_hidden_layers"], shape["max_position_embeddings"]
    return {
        **shape,
        "num_hidden_layers": args.layers or layers,
        "max_position_embeddings": max(longest, args.tokens or 0),
    }


def samples_of(args: argparse.Namespace, vocab_size: int) -> Samples:
    """The samples of all steps."""
    lengths = LENGTHS.get(args.lengths, CHAT)
    num_groups = -(-args.steps * args.samples // (1 if args.tokens else lengths.samples_per_group))
    if args.tokens:
        num_tokens = args.tokens * num_groups
        ids = np.random.default_rng(0).integers(MIN_ID, MAX_ID, num_tokens).astype(np.int32)
        mask = np.arange(args.tokens) >= int(args.tokens * (1 - LABEL_SHARE))
        samples: Samples = ids, np.tile(mask, num_groups), np.full(num_groups, args.tokens)
    else:
        samples = random_samples(num_groups, vocab_size, lengths)
    if args.lengths == "chain":
        samples = chained(samples)
    return with_system_prompt(samples, args.system_prompt) if args.system_prompt else samples


def chained(samples: Samples) -> Samples:
    """The same lengths with the tokens of a random first-order Markov chain."""
    ids, loss_mask, lengths = samples
    random = np.random.default_rng(0)
    followers = random.integers(NUM_TOKENS, size=(NUM_TOKENS, NUM_FOLLOWERS))
    chances = 1 / np.arange(1, NUM_FOLLOWERS + 1)
    drawn = random.choice(NUM_FOLLOWERS, size=len(ids), p=chances / chances.sum())
    chain, token = np.empty(len(ids), np.int32), 0
    for at, which in enumerate(drawn.tolist()):
        token = followers[token, which]
        chain[at] = token
    return chain + MIN_ID, loss_mask, lengths


def with_system_prompt(samples: Samples, num_tokens: int) -> Samples:
    """The same chats after one prompt of random tokens without loss."""
    token_ids, loss_mask, lengths = samples
    prompt = np.random.default_rng(1).integers(MIN_ID, MAX_ID, num_tokens).astype(np.int32)
    chats = zip(*(np.split(values, np.cumsum(lengths)[:-1]) for values in (token_ids, loss_mask)), strict=True)
    told = [(np.append(prompt, ids), np.append(np.zeros(num_tokens, bool), mask)) for ids, mask in chats]
    ids, masks = (np.concatenate(parts) for parts in zip(*told, strict=True))
    return ids, masks, lengths + num_tokens


def bound_tokens_per_s(shape: dict[str, Any], lengths: Sequence[int]) -> float:
    """Tokens a second of one GPU at TFLOPS by the formula above."""
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


def load_s(recorder: MemoryCallback) -> float:
    """Seconds up to the lines that tell of weights: drawing and quantizing them, and taking each rank's part."""
    return sum(end - begin for (begin, *_), (end, name, _) in pairwise(recorder.stages) if name == "model")


def measure(args: argparse.Namespace, launched_s: float) -> dict[str, Any] | None:
    """This process's part of one row's steps; the figures on the first rank."""
    [row], saved_step, found = args.rows, args.steps // 2 + 1, dict[str, Any]()
    budget = [f"batch.micro_batch_tokens={args.budget}"] if args.budget else []
    save = ["checkpoint.asynchronous=true", f"checkpoint.every_steps={saved_step}"] if args.save else []
    overrides = ["model.init=random", *budget, *args.overrides, *save]

    def before(run: TrainingRun) -> None:
        found["load_peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))
        # the few steps here save seconds after the start
        if run.saver.staging is not None:
            run.saver.staging.wait_reserved()

    def after(run: TrainingRun, recorder: MemoryCallback) -> None:
        if args.save and run.rank.is_first:
            found["next_step_late_s"] = lateness(recorder.steps, saved_step)
            print(json.dumps(found), flush=True)  # writing the files takes minutes
        run.saver.wait()
        found["peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))
        run.optimizer.zero_grad(set_to_none=True)
        found["held_gib"] = on_each_rank(run, gib("memory_allocated"))

    run, recorder = take_steps(
        args.out, overrides, args.steps, args.samples, before=before, after=after, profile_steps=args.profile,
        writes_records=args.save,
    )  # fmt: skip
    if not run.rank.is_first:
        return None
    steps = recorder.steps
    timed = steps[WARMUP_STEPS:] or steps[-1:]
    seconds = sum(step.step_s for step in timed)
    rate = sum(step.num_tokens for step in timed) / seconds
    shape, lengths = shape_of(args), run.loader.store.lengths[len(steps[: -len(timed)]) * args.samples :].tolist()
    if run.config.method == "full" and "num_experts" not in shape:
        bound = bound_tokens_per_s(shape, lengths) * run.rank.world
        found |= {"bound_tokens_per_s": round(bound), "share_of_bound": round(rate / bound, 3)}
    if args.save:
        events = map(json.loads, (args.out / "run" / "events.jsonl").read_text().splitlines())
        saved = next(event for event in events if event["kind"] == "saved")
        found |= {key: saved[key] for key in ("staged_s", "copied_s", "save_s")}
        found["save_made_wait_s"] = round(found["staged_s"] + found["next_step_late_s"], 3)
    losses = [round(step.loss, 4) for step in steps]
    return {
        "shape": args.shape,
        "row": row,
        "overrides": overrides[1:],
        "gpus": run.rank.world,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "layers": run.model.config.num_hidden_layers,
        "tokens_per_s": round(rate),
        "step_s": round(statistics.median(step.step_s for step in timed), 4),
        "first_step_s": round(steps[0].step_s, 1),
        "launch_to_first_step_s": round(recorder.step_times_s[0] - launched_s, 1),
        "load_s": round(load_s(recorder), 1),
        "data_wait_share": round(sum(step.data_wait_s for step in timed) / seconds, 4),
        "shared_share": round(statistics.fmean(step.shared_share for step in timed), 4),
        "mfu": round(timed[-1].mfu or 0.0, 3),
        "micro_batches": statistics.fmean(step.num_micro_batches for step in timed),
        "recompute": run.memory.recompute,
        "layout": run.plan.batch_layout.name,
        **found,
        **planned_memory(run),
        "loss": [losses[0], losses[-1]],
        "losses": losses,
    }


def compare(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed and losses of each row beside the first."""

    def means(losses: list[float]) -> list[float]:
        return [statistics.fmean(losses[at : at + MEAN_OVER]) for at in range(0, len(losses), MEAN_OVER)]

    first, *others = measured
    true = means(first["losses"])
    differences = [
        [abs(mine - loss) / loss for mine, loss in zip(means(other["losses"]), true, strict=True)] for other in others
    ]
    return {
        other["row"]: {
            "speed": round(other["tokens_per_s"] / first["tokens_per_s"], 3),
            "worst_difference": round(max(different), 5),
        }
        for other, different in zip(others, differences, strict=True)
    }


def parse(words: Sequence[str], *, named: bool = False) -> argparse.Namespace:
    """The command's arguments; groups are spelled out, and the words of a single row come before the given ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=[""], help=f"{', '.join([*GROUPS, *ROWS])}"
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="decoder layers, the shape's own if not given")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, help="samples a step, over all GPUs (32, 8 of reasoning, 1 of --tokens)")
    parser.add_argument("--lengths", choices=[*LENGTHS, "chain"], default="chat", help="sample lengths (chat)")
    parser.add_argument("--tokens", type=int, help="of every sample, instead of --lengths")
    parser.add_argument("--system-prompt", type=int, default=0, metavar="TOKENS", help="before each chat, the same")
    parser.add_argument("--budget", type=int, help="batch.micro_batch_tokens")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="profile N steps of the first rank")
    parser.add_argument("--save", action="store_true", help="save once beside training, and tell what it waited")
    parser.add_argument("--out", type=Path, default=Path("/tmp/throughput"))
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(words)
    args.rows = [name for given in args.rows for name in GROUPS.get(given, [given])]
    if len(args.rows) == 1 and (own := ROWS.get(args.rows[0])) and not named:
        return parse([*own, *words], named=True)
    if unknown := set(args.rows) - {"", *ROWS}:
        parser.error(
            f"--rows: there is no {', '.join(sorted(unknown))}; expected some of {', '.join([*GROUPS, *ROWS])}"
        )
    args.samples = args.samples or (1 if args.tokens else LENGTHS.get(args.lengths, CHAT).samples_per_group)
    return args


def main() -> None:
    args, launched_s = parse(sys.argv[1:]), time.time()
    if len(args.rows) > 1:
        found = []
        for row in args.rows:
            # neither memory nor graphs are shared by processes, and one that fails does not stop the others
            out = args.out / row
            (out / "figures.json").unlink(missing_ok=True)
            subprocess.run([sys.executable, *sys.argv, "--rows", row, "--out", str(out)], check=False)
            if (figures := out / "figures.json").exists():
                found.append(json.loads(figures.read_text()))
        print(json.dumps(compare(found) if found else {}), flush=True)
        return
    if not args.part:
        shape = shape_of(args)
        store = prepare(args.out, shape, args.steps, samples=samples_of(args, int(shape["vocab_size"])))
        weights = np.random.default_rng(0).uniform(0.5, 1.5, store.offsets[-1]).astype(np.float32)
        add_column(store.folder, "weight", weights, per="token", meaning="read by objective=weighted_tokens")
        spread_over(args.gpus)  # with the allocator's settings
    if (figures := measure(args, launched_s)) is not None:
        (args.out / "figures.json").write_text(json.dumps(figures))
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
