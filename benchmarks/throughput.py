"""Tokens a second of one configuration, without writing a model first: random weights made in place, one GPU.

    python benchmarks/throughput.py --shape qwen3-8b --budget 24000 --steps 12 base.storage=fp8

Samples have chat-like lengths, 32 a step, or reasoning lengths, 8 a step; 60 % are label tokens. The first 3 steps are
left out. `--profile N` shows where the time of N steps goes, as `flatout train --profile` does; then the rate includes
the profiler's overhead. With a system prompt of 200 tokens before each chat, computed for each of them and once for
each micro-batch:

    for share in off on; do python benchmarks/throughput.py --shape qwen3-8b --budget 24000 --system-prompt 200 \\
        base.storage=fp8 batch.share_prefix=$share; done
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from bench.ours import measure
from bench.rows import LENGTHS
from bench.shapes import SHAPES, shape_config
from whole_steps import prepare, spread_over

from flatout.bench.figures import WARMUP_STEPS
from flatout.bench.inputs import MAX_ID, MIN_ID, Samples, random_samples


def with_system_prompt(samples: Samples, num_tokens: int) -> Samples:
    """The same chats after one prompt of random tokens without loss."""
    token_ids, loss_mask, lengths = samples
    prompt = np.random.default_rng(1).integers(MIN_ID, MAX_ID, num_tokens).astype(np.int32)
    chats = zip(*(np.split(values, np.cumsum(lengths)[:-1]) for values in (token_ids, loss_mask)), strict=True)
    told = [(np.append(prompt, ids), np.append(np.zeros(num_tokens, bool), mask)) for ids, mask in chats]
    ids, masks = (np.concatenate(parts) for parts in zip(*told, strict=True))
    return ids, masks, lengths + num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--lengths", choices=LENGTHS, default="chat", help="sample lengths (chat)")
    parser.add_argument("--system-prompt", type=int, default=0, metavar="TOKENS", help="before each chat, the same")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("/tmp/throughput"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    launched_s = time.time()
    lengths = LENGTHS[args.lengths]
    if not args.part:
        shape = shape_config(args.shape)
        samples = random_samples(args.steps, int(shape["vocab_size"]), lengths)
        prepare(args.out, shape, args.steps, samples=with_system_prompt(samples, args.system_prompt))
        spread_over(1)  # with the allocator's settings
    budget = [f"batch.micro_batch_tokens={args.budget}"] if args.budget else []
    job = {
        "run_dir": str(args.out / "run"),
        "model_dir": str(args.out / "model"),
        "data_root": str(args.out / "data"),
        "num_steps": args.steps,
        "samples_per_step": lengths.samples_per_group,
        "overrides": ["model.init=random", *budget, *args.overrides],
        "launched_s": launched_s,
        "profile_steps": args.profile,
    }
    found = measure(job)
    print(
        json.dumps(
            {
                "shape": args.shape,
                "overrides": args.overrides,
                "budget": args.budget,
                "tokens_per_s": round(found["tokens_per_s"]),
                "step_s": round(found["step_p50_s"], 3),
                "first_step_s": round(found["first_step_s"], 1),
                "data_wait_share": round(found["data_wait_share"], 4),
                "shared_share": round(found["shared_share"], 4),
                "micro_batches": statistics.mean(found["num_micro_batches"][WARMUP_STEPS:]),
                "peak_gib": round(found["peak_allocated_gib"], 1),
                "loss": [round(found["losses"][0], 4), round(found["losses"][-1], 4)],
            }
        )
    )


if __name__ == "__main__":
    main()
