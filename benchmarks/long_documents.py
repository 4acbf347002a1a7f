"""Training on one long document a step, on one GPU or several that share its tokens: tokens a second, and the peak.

One JSON line a length; random weights, LoRA r16:

    python benchmarks/long_documents.py --shape qwen3-8b --tokens 131072
    python benchmarks/long_documents.py --shape qwen3-8b --tokens 262144 --gpus 2        # context.parallel=2
    python benchmarks/long_documents.py --shape tiny --tokens 512                        # on a CPU

Each length is taken in fresh processes through the real plan, set-up and loop. The rate leaves out the first step if
there are others.
More settings follow as overrides: base.storage=fp8, recompute=offload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
from bench.shapes import SHAPES, shape_config
from whole_steps import gib, make_parser, on_each_rank, prepare, spread_over, take_steps

from flatout.bench.inputs import LABEL_SHARE, MAX_ID, MIN_ID, Samples
from flatout.parallel.rank import Rank


def long_samples(num_tokens: int, num_steps: int) -> Samples:
    """One document of random tokens for each step; the last 60 % of its tokens carry loss."""
    ids = np.random.default_rng(0).integers(MIN_ID, MAX_ID, num_tokens * num_steps).astype(np.int32)
    mask = np.arange(num_tokens) >= int(num_tokens * (1 - LABEL_SHARE))
    return ids, np.tile(mask, num_steps), np.full(num_steps, num_tokens)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """This process's part of the run; the figures on the first rank."""
    found: dict[str, Any] = {}
    overrides = ["model.init=random", f"context.parallel={args.gpus}", *args.overrides]

    def after(run: Any, _: Any) -> None:
        found["peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))

    taken = take_steps(args.out, overrides, args.steps, 1, after=after)
    if not Rank.from_env().is_first:
        return None
    steps = taken.records
    return {
        "shape": args.shape,
        "tokens": args.tokens[0],
        "overrides": args.overrides,
        **taken.facts,
        **found,
        "step_s": [round(step.step_s, 2) for step in steps],
        "tokens_per_s": round(args.tokens[0] / statistics.fmean(step.step_s for step in steps[1:] or steps)),
        "mfu": round(steps[-1].mfu or 0.0, 3),
    }


def main() -> None:
    parser = make_parser(__doc__, gpus=1, steps=3)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072], help="tokens of the document")
    args = parser.parse_intermixed_args()
    if len(args.tokens) > 1:
        for num_tokens in args.tokens:
            subprocess.run([sys.executable, *sys.argv, "--tokens", str(num_tokens)], check=False)
        return
    if not args.part:
        config = {**shape_config(args.shape), "max_position_embeddings": args.tokens[0]}
        prepare(args.out, config, args.steps, 1, long_samples(args.tokens[0], args.steps))
        spread_over(args.gpus)
    if (found := measure(args)) is not None:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
