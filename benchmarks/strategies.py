"""The same steps of one model under every strategy, over several GPUs: tokens a second and memory a GPU, side by side.

One JSON line a strategy, each in fresh processes:

    python benchmarks/strategies.py --gpus 2 --shape qwen3-1.7b                            # full fine-tuning
    python benchmarks/strategies.py --gpus 2 --shape qwen3-8b --strategies zero2,fsdp
    python benchmarks/strategies.py --gpus 2 --shape qwen3-8b method=lora                  # frozen weights in bf16
    python benchmarks/strategies.py --gpus 2 --shape qwen3-30b-a3b --strategies ddp method=lora \\
        'lora.targets=[all-linear,experts]' experts.parallel=2                             # experts on two GPUs

Samples have chat-like lengths, 32 samples a step or `--samples`; the first 3 steps are left out.
deepspeed-1 to -3 need DeepSpeed. `held_gib` is what a GPU holds between steps once the optimizer has its state,
`peak_gib` the most within a step, on each rank; a strategy that does not fit says so and the next one follows.
`--profile N` shows where the first rank's time goes; then the rates include the profiler's overhead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from bench.rows import SAMPLES_PER_STEP
from bench.shapes import SHAPES, shape_config
from whole_steps import gib, make_parser, on_each_rank, prepare, spread_over, take_steps

from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback
from flatout.trainer.state import Run

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def settings(strategy: str) -> list[str]:
    """Overrides for one strategy; DeepSpeed's stage is in its name."""
    name, _, stage = strategy.partition("-")
    if not stage:
        return [f"strategy={name}"]
    given = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": int(stage)}}
    return [f"strategy={name}", f"deepspeed={json.dumps(given)}"]


def measure(args: argparse.Namespace, strategy: str) -> dict[str, Any] | None:
    """This process's part of one strategy's steps; the figures on the first rank."""
    launched_s, rank = time.time(), Rank.from_env()
    overrides = ["method=full", "optim.lr=1e-5", "model.init=random", *settings(strategy), *args.overrides]
    found: dict[str, Any] = {}

    def after(run: Run, recorder: MemoryCallback) -> None:
        found["peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))
        run.optimizer.zero_grad(set_to_none=True)
        found["held_gib"] = on_each_rank(run, gib("memory_allocated"))

    taken = take_steps(
        args.out / strategy, overrides, args.steps, args.samples, after=after, profile_steps=args.profile
    )
    if not rank.is_first:
        return None
    facts = {"strategy": strategy, "shape": args.shape, "overrides": args.overrides, "profiled_steps": args.profile}
    return {**facts, **found, **taken.summary(launched_s)}


def main() -> None:
    parser = make_parser(__doc__, gpus=2, steps=8)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=list(STRATEGIES))
    parser.add_argument("--samples", type=int, default=SAMPLES_PER_STEP, help="samples a step, over all GPUs")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="profile N steps of the first rank")
    args = parser.parse_intermixed_args()
    if len(args.strategies) > 1:
        for strategy in args.strategies:
            subprocess.run([sys.executable, *sys.argv, "--strategies", strategy], check=False)
        return
    [strategy] = args.strategies
    if not args.part:
        prepare(args.out / strategy, shape_config(args.shape), args.steps, args.samples)
        spread_over(args.gpus)
    if (found := measure(args, strategy)) is not None:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
