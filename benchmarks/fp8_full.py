"""Full fine-tuning in fp8 beside bf16: tokens a second, and the loss of the same steps, on one GPU or several.

One JSON line a mode, then one that compares them:

    python benchmarks/fp8_full.py --shape qwen3-1.7b
    python benchmarks/fp8_full.py --shape qwen3-8b --gpus 4 strategy=fsdp
    python benchmarks/fp8_full.py --shape tiny --steps 8 --modes bf16       # on a CPU

Samples have chat-like lengths, 32 a step. Each token depends on the one before it, so that weights can learn something.
Weights are fp32 masters. Each mode runs in fresh processes through the real plan, set-up and loop; the first 3 steps
are left out of the rate. `worst_difference` is that of means over 10 steps, relative to bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from bench.rows import SAMPLES_PER_STEP
from bench.shapes import SHAPES, shape_config
from whole_steps import gib, make_parser, on_each_rank, prepare, spread_over, take_steps

from flatout.bench.inputs import MIN_ID, Samples, random_samples
from flatout.parallel.rank import Rank

MODES = {"bf16": [], "fp8": ["full.compute=fp8"], "fp8_rowwise": ["full.compute=fp8_rowwise"]}
# tokens, and the tokens that may follow each, with chances of 1, 1/2, 1/3, ...
NUM_TOKENS, NUM_FOLLOWERS = 64 + MIN_ID, 4
MEAN_OVER = 10


def bigrams(num_steps: int, samples_per_step: int) -> Samples:
    """Samples of chat-like lengths from a random first-order Markov chain."""
    ids, loss_mask, lengths = random_samples(num_steps * samples_per_step // SAMPLES_PER_STEP, NUM_TOKENS)
    random = np.random.default_rng(0)
    followers = random.integers(NUM_TOKENS - MIN_ID, size=(NUM_TOKENS - MIN_ID, NUM_FOLLOWERS))
    chances = 1 / np.arange(1, NUM_FOLLOWERS + 1)
    drawn = random.choice(NUM_FOLLOWERS, size=len(ids), p=chances / chances.sum())
    chain, token = np.empty(len(ids), np.int32), 0
    for at, which in enumerate(drawn.tolist()):
        token = followers[token, which]
        chain[at] = token
    return chain + MIN_ID, loss_mask, lengths


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """This process's part of the run; the figures on the first rank."""
    launched_s, found = time.time(), {}
    overrides = ["method=full", "model.init=random", "optim.lr=3e-4", f"schedule.warmup_steps={args.steps // 10}"]

    def after(run: Any, _: Any) -> None:
        found["peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))

    overrides += [*MODES[args.mode], *args.overrides]
    taken = take_steps(args.out / args.mode, overrides, args.steps, args.samples, after=after)
    if not Rank.from_env().is_first:
        return None
    return {"shape": args.shape, "mode": args.mode, "overrides": overrides, **found, **taken.summary(launched_s)}


def compare(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed and losses of each mode beside the first."""
    first, *others = measured

    def means(losses: list[float]) -> list[float]:
        return [statistics.fmean(losses[at : at + MEAN_OVER]) for at in range(0, len(losses), MEAN_OVER)]

    true = means(first["losses"])
    return {
        other["mode"]: {
            "speed": round(other["tokens_per_s"] / first["tokens_per_s"], 3),
            "worst_difference": round(
                max(abs(mine - loss) / loss for mine, loss in zip(means(other["losses"]), true, strict=True)), 5
            ),
            "last_losses": [round(true[-1], 4), round(means(other["losses"])[-1], 4)],
        }
        for other in others
    }


def main() -> None:
    parser = make_parser(__doc__, gpus=1, steps=200)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name == "tiny" or "qwen3-" in name])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--samples", type=int, default=SAMPLES_PER_STEP, help="samples a step, over all GPUs")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.part:
        if (found := measure(args)) is not None:
            (args.out / f"{args.mode}.json").write_text(json.dumps(found))
            print(json.dumps(found), flush=True)
        return
    if args.mode:
        samples = bigrams(args.steps, args.samples)
        prepare(args.out / args.mode, shape_config(args.shape), args.steps, args.samples, samples)
        spread_over(args.gpus)
    for mode in args.modes:
        # a fresh process each, so that neither memory nor compiled code is shared
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--mode", mode], check=True)
    print(json.dumps(compare([json.loads((args.out / f"{mode}.json").read_text()) for mode in args.modes])))


if __name__ == "__main__":
    main()
