"""Steps of a policy on answers that are there: tokens a second of GRPO with LoRA of rank 16 on one GPU.

    python benchmarks/policy_steps.py [--rows long groups ...] [--shapes qwen3-0.6b qwen3-4b] [--steps 6]
    python benchmarks/policy_steps.py --rows groups --shapes tiny --steps 2 device=cpu compile=off   # on a CPU

Weights, tokens, log-probabilities and advantages are random (`format: rollouts`). Each row is one JSON line of a fresh
process: tokens a second of all steps behind the first WARMUP, and the peak of allocated memory. Rows:

    long        two answers of 16,384 tokens with their prompt a step, each a micro-batch, all layers recomputed: the
                shape of prime-rl's published runs
    groups      eight groups of eight answers a step, of lognormal lengths; a prompt is computed once for its answers
    apart       the same, with each answer's prompt computed again
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bench.samples import MIN_ID, write_tokenizer
from bench.shapes import shape_config

import flatout
from flatout.config.read import make_config

WARMUP = 3
LONG = 16_384
# rows of rollouts may have ids of the tokenizer only, which has some more
NUM_IDS = 900
ROWS = {
    "long": {"batch": {"samples_per_step": 2, "micro_batch_tokens": LONG}, "recompute": "full"},
    "groups": {"batch": {"samples_per_step": 8}},
    "apart": {"batch": {"samples_per_step": 8, "share_prefix": "off"}},
}


def write_groups(file: Path, row: str, num_steps: int, longest: int) -> None:
    """Write the groups of so many steps, of at most `longest` tokens each answer with its prompt."""
    rng = np.random.default_rng(0)

    def answer(length: int) -> dict[str, object]:
        ids, logprobs = rng.integers(MIN_ID, NUM_IDS, length), -rng.exponential(2.0, length)
        return {"token_ids": ids.tolist(), "logprobs": logprobs.round(4).tolist(), "advantage": float(rng.normal())}

    with file.open("w") as out:
        for _ in range(num_steps * ROWS[row]["batch"]["samples_per_step"]):
            if row == "long":
                prompt, lengths = 128, [longest - 128]
            else:
                prompt = int(np.clip(rng.lognormal(np.log(300), 0.7), 16, longest // 2))
                lengths = rng.lognormal(np.log(400), 0.7, 8).clip(8, longest // 2).astype(int).tolist()
            ids = rng.integers(MIN_ID, NUM_IDS, prompt).tolist()
            out.write(json.dumps({"prompt_ids": ids, "answers": [answer(length) for length in lengths]}) + "\n")


def measure(shape: str, row: str, num_steps: int, overrides: list[str]) -> dict[str, object]:
    """Train one row in this process."""
    with tempfile.TemporaryDirectory() as folder:
        root, config = Path(folder), shape_config(shape)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(config))
        write_tokenizer(root / "model")
        write_groups(
            root / "rollouts.jsonl", row, WARMUP + num_steps, min(LONG, int(config["max_position_embeddings"]))
        )
        values = {
            "run_dir": str(root / "run"), "model": {"name": str(root / "model"), "init": "random"}, "method": "lora",
            "lora": {"rank": 16}, "objective": "grpo", "seed": 0,
            "data": {
                "sources": [{"path": str(root / "rollouts.jsonl"), "format": "rollouts"}], "root": str(root / "data"),
                "max_tokens": LONG,
            },
            **ROWS[row],
        }  # fmt: skip
        steps = flatout.train(make_config(values, overrides)).log.steps
    timed = steps[WARMUP:]
    rate = sum(step.num_tokens for step in timed) / sum(step.step_s for step in timed)
    return {
        "shape": shape, "row": row, "tokens_per_s": round(rate),
        "step_s": statistics.median(step.step_s for step in timed), "mfu": timed[-1].mfu,
        "micro_batches": timed[-1].num_micro_batches, "shared_share": timed[-1].shared_share,
        "peak_gib": round(max(step.peak_memory_bytes for step in steps) / 2**30, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-4b"])
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--part", action="store_true", help="measure the first shape and row in this process")
    args, overrides = parser.parse_known_args()
    if args.part:
        print(json.dumps(measure(args.shapes[0], args.rows[0], args.steps, overrides)), flush=True)
        return
    for shape in args.shapes:
        for row in args.rows:
            words = ["--part", "--shapes", shape, "--rows", row, "--steps", str(args.steps), *overrides]
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
            ended = (
                done.stdout.splitlines()[-1:] if not done.returncode else (done.stdout + done.stderr).splitlines()[-8:]
            )
            print("\n".join(ended), flush=True)


if __name__ == "__main__":
    main()
