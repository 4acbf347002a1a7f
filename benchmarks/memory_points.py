"""Predicted beside measured peak memory of our own training loop: real shapes, random weights, chat-like lengths.

    python benchmarks/memory_points.py --out /tmp/points [--points 8b-bf16-none 8b-nf4-full] [--shape tiny]

Each point trains 3 steps of 32 samples in a fresh process and compares the most bytes that torch allocated with the
plan's estimate for the largest micro-batch of those steps. `--shape tiny` runs every point on a tiny model, on the CPU
where there is no GPU: the figures then say nothing (the process's resident size), only that it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.ours import base_values
from bench.rows import SAMPLES_PER_STEP
from bench.shapes import SHAPES, shape_config
from whole_steps import prepare

from flatout.config.read import make_config
from flatout.parallel.rank import Rank
from flatout.planner.devices import DEVICES, GIB
from flatout.planner.memory.budget import memory_model
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.track.callback import Reporter
from flatout.trainer.planning import gpu_of, plan_run
from flatout.trainer.run import train

NUM_STEPS = 3
BF16_8BIT = ("method=full", "full.weights=bf16", "optim.name=adamw8bit")
# name -> shape, most tokens of a micro-batch, settings
POINTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "0.6b-bf16-none": ("qwen3-0.6b", 24000, ("recompute=none",)),
    "0.6b-bf16-none-eager": ("qwen3-0.6b", 24000, ("recompute=none", "compile=off")),
    "0.6b-full-none": ("qwen3-0.6b", 24000, ("recompute=none", "method=full")),
    "1.7b-bf16-none": ("qwen3-1.7b", 24000, ("recompute=none",)),
    "1.7b-nf4-none": ("qwen3-1.7b", 8192, ("recompute=none", "base.storage=nf4")),
    "1.7b-full-none": ("qwen3-1.7b", 8192, ("recompute=none", "method=full")),
    "1.7b-bf16-8bit-full": ("qwen3-1.7b", 16384, ("recompute=full", *BF16_8BIT)),
    "8b-bf16-none": ("qwen3-8b", 16384, ("recompute=none",)),
    "8b-bf16-budget": ("qwen3-8b", 16384, ("recompute=budget",)),
    "8b-bf16-full": ("qwen3-8b", 16384, ("recompute=full",)),
    "8b-bf16-offload": ("qwen3-8b", 24000, ("recompute=offload",)),
    "8b-fp8-none": ("qwen3-8b", 16384, ("recompute=none", "base.storage=fp8")),
    "8b-fp8-full": ("qwen3-8b", 16384, ("recompute=full", "base.storage=fp8")),
    "8b-nf4-full": ("qwen3-8b", 2048, ("recompute=full", "base.storage=nf4")),
    "8b-nf4-fp8-none": ("qwen3-8b", 8192, ("recompute=none", "base.storage=nf4", "base.compute=fp8")),
}


def measure(name: str, shape: str, out: Path) -> dict[str, Any]:
    """Train one point in this process; a row of the table."""
    _, budget, settings = POINTS[name]
    prepare(out, shape_config(shape), NUM_STEPS)
    paths = {"run_dir": str(out / "run"), "model_dir": str(out / "model"), "data_root": str(out / "data")}
    job = {**paths, "num_steps": NUM_STEPS, "samples_per_step": SAMPLES_PER_STEP}
    config = make_config(
        base_values(job, settings), ["model.init=random", f"batch.micro_batch_tokens={budget}", *settings]
    )
    rank = Rank()
    planned = plan_run(config, Reporter(), rank, lambda: gpu_of(config, rank))
    batches = [batch for step in planned.plan.steps() for batch in step.ranks[0]]
    largest = max(batches, key=lambda batch: batch.num_tokens)
    size = MicroBatchSize(largest.num_tokens, largest.num_label_tokens, len(largest.sample_ids))
    model = planned.memory.model or memory_model(config, planned.shape, DEVICES["h200"])
    predicted = model.estimate(size, planned.memory.recompute, accumulates=planned.memory.accumulates)
    train(config)
    lines = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
    measured_bytes = max(line["peak_memory_bytes"] for line in lines if line["kind"] == "step")
    return {
        "point": name,
        "shape": shape,
        "settings": settings,
        "num_tokens": size.num_tokens,
        "predicted_gib": round(predicted.total_bytes / GIB, 2),
        "measured_gib": round(measured_bytes / GIB, 2),
        "error": round(predicted.total_bytes / measured_bytes - 1, 4),
        "parts_gib": {
            part: round(getattr(predicted, f"{part}_bytes") / GIB, 2)
            for part in ("weights", "adapter", "gradients", "optimizer", "activations", "working")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS), metavar="NAME")
    parser.add_argument("--shape", choices=SHAPES, help="this shape instead of each point's own")
    parser.add_argument("--here", action="store_true", help="one point, in this process")
    args = parser.parse_args()
    if args.here:
        (name,) = args.points
        row = measure(name, args.shape or POINTS[name][0], args.out / name)
        (args.out / f"{name}.json").write_text(json.dumps(row))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"{'point':<22} {'tokens':>7} {'predicted':>10} {'measured':>10} {'error':>7}")
    for name in args.points:
        command = [sys.executable, __file__, "--here", "--out", str(args.out), "--points", name]
        with (args.out / f"{name}.log").open("w") as log:
            code = subprocess.run(
                command + (["--shape", args.shape] if args.shape else []), stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if code:
            print(f"{name:<22} failed with {code}; see {args.out / name}.log", flush=True)
            continue
        row = json.loads((args.out / f"{name}.json").read_text())
        rows.append(row)
        gib = f"{row['predicted_gib']:>6.2f} GiB {row['measured_gib']:>6.2f} GiB"
        print(f"{name:<22} {row['num_tokens']:>7,} {gib} {row['error']:>+7.1%}", flush=True)
    (args.out / "points.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
