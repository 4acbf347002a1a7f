"""LoRA over a quantised base too large for one GPU, cut over several: tokens a second, memory a GPU, seconds of load.

One JSON line; weights are random, drawn and quantised layer by layer:

    python benchmarks/large_lora.py --gpus 4                                 # 70B in NF4, 35 GiB over 4 GPUs
    python benchmarks/large_lora.py --gpus 2 --layers 20                     # a quarter of its layers, in two minutes
    python benchmarks/large_lora.py --gpus 2 --shape tiny                    # on a CPU

The tokens are those of `flatout bench`: chat lengths, 32 samples a step; the first 3 steps are left out. A GPU's memory
is told at three times: while the model is loaded, made and cut (compiling two layers included), once it is, and in a
step. More settings follow as overrides: recompute=layers, base.storage=fp8, batch.micro_batch_tokens=8192.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flatout.bench.inputs import write_store, write_tokenizer
from flatout.bench.measure import WARMUP_STEPS, figures
from flatout.bench.ours import base_values, stage_lines, step_ends, step_records
from flatout.bench.rows import SAMPLES_PER_STEP
from flatout.bench.shapes import SHAPES, shape_config
from flatout.config.read import make_config
from flatout.models.quantised_load import num_stored_weights
from flatout.parallel.rank import Rank
from flatout.track.console import ConsoleTracker
from flatout.track.jsonl import RunFolderTracker
from flatout.track.record import Trackers
from flatout.train.checkpoint import Checkpoints
from flatout.train.loop import run_steps
from flatout.train.memory import gpu_of
from flatout.train.planning import plan_run
from flatout.train.setup import set_up
from flatout.train.state import Run


def prepare(args: argparse.Namespace) -> None:
    """The shape's folder without weights, with as many layers as asked, and the tokens."""
    shutil.rmtree(args.out, ignore_errors=True)
    (args.out / "model").mkdir(parents=True)
    shape = shape_config(args.shape)
    shape["num_hidden_layers"] = args.layers or shape["num_hidden_layers"]
    (args.out / "model" / "config.json").write_text(json.dumps(shape))
    write_tokenizer(args.out / "model")
    write_store(args.out / "data", args.out / "model", args.steps, None)


def on_each_rank(run: Run, value: float) -> list[float]:
    """Every rank's value, two places."""
    values = torch.zeros(run.rank.world, dtype=torch.float64, device=run.device)
    values[run.rank.index] = value
    return [round(found, 2) for found in run.strategy.sum_values(values).tolist()]


def gib(name: str) -> float:
    """A figure of torch.cuda in GiB; 0 without a GPU."""
    return float(getattr(torch.cuda, name)()) / 2**30 if torch.cuda.is_available() else 0.0


def load_s(stages: list[tuple[float, str]]) -> float:
    """Seconds up to the lines that tell of weights: drawing and quantising them, and taking each rank's part."""
    pairs = pairwise(stages)
    return sum(end - begin for (begin, _), (end, text) in pairs if text.startswith("model "))


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """This process's part of the run; the figures on the first rank."""
    launched_s, rank = time.time(), Rank.from_env()
    job = {
        "run_dir": str(args.out / "run"),
        "model_dir": str(args.out / "model"),
        "data_root": str(args.out / "data"),
        "num_steps": args.steps,
        "samples_per_step": SAMPLES_PER_STEP,
    }
    strategy = "fsdp" if args.gpus > 1 else "auto"
    overrides = ["base.storage=nf4", "model.init=random", f"strategy={strategy}", *args.overrides]
    config = make_config(base_values(job), overrides)
    tracker = Trackers(*((ConsoleTracker(), RunFolderTracker(config.folder)) if rank.is_first else ()))
    planned = plan_run(config, tracker, rank, lambda: gpu_of(config, rank))
    checkpoints = Checkpoints(config.folder, keep=1, on_event=tracker.event)
    run = set_up(config, planned, checkpoints, None, tracker, rank)
    found: dict[str, Any] = {
        "load_peak_gib": on_each_rank(run, gib("max_memory_allocated")),
        "held_gib": on_each_rank(run, gib("memory_allocated")),
    }
    num_quantised = num_stored_weights(run.model)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with run.stop:
        run_steps(run)
    found["peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))
    tracker.close()
    run.strategy.close()
    if not rank.is_first:
        return None
    steps = step_records(config.folder)
    num_tokens, num_labels = ([step[name] for step in steps] for name in ("num_tokens", "num_label_tokens"))
    rates = figures(step_ends(config.folder), launched_s, num_tokens, num_labels)
    return {
        "shape": args.shape,
        "layers": planned.shape.num_layers,
        "gpus": rank.world,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "overrides": overrides,
        "quantised_weights": num_quantised,
        "useful_tok_s": round(rates["useful_tok_s"]),
        "step_p50_s": round(rates["step_p50_s"], 4),
        **found,
        "load_s": round(load_s(stage_lines(config.folder / "train.log")), 1),
        "launch_to_first_step_s": round(rates["launch_to_first_step_s"], 1),
        "recompute": planned.memory.recompute,
        "micro_batches": [step["num_micro_batches"] for step in steps[WARMUP_STEPS:]],
        "losses": [round(step["loss"], 4) for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-70b")
    parser.add_argument("--layers", type=int, help="decoder layers, the shape's own if not given")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("/tmp/large_lora"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    if not args.part:
        prepare(args)
        if args.gpus > 1:
            spread = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}")
            sys.exit(subprocess.run([sys.executable, *spread, *sys.argv, "--part"], check=False).returncode)
    if (found := measure(args)) is not None:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
