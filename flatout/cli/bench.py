"""`flatout bench`: tokens per second and memory of one configuration on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    target = "a YAML file, a .py file (which runs as code), or a hub id or folder with config.json: random weights"
    parser.add_argument("target", metavar="CONFIG|MODEL", help=target)
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="e.g. base.storage=fp8")
    parser.add_argument("--steps", type=int, default=13, metavar="N", help="steps; the first 3 are warm-up (13)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Measure in a temporary folder and print the figures. Returns 0; raises FlatoutError."""
    launched_s = time.time()
    from flatout.bench.figures import WARMUP_STEPS
    from flatout.cli.screen import import_transformers, rows
    from flatout.config.read import load_config, make_config
    from flatout.environment import environment, prepare_torch
    from flatout.errors import UsageError
    from flatout.launch.launch_mode import RunHere, choose_launch_mode

    if args.steps <= WARMUP_STEPS:
        raise UsageError(f"--steps is {args.steps}; the first {WARMUP_STEPS} are warm-up and not timed, so use more")
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as place:
        if Path(args.target).suffix in (".yaml", ".yml", ".py"):
            config = load_config(Path(args.target), args.overrides)
        else:
            model, data = {"name": args.target, "init": "random"}, {"name": "bench", "root": place}
            config = make_config({"model": model, "data": data}, args.overrides)
        mode = choose_launch_mode(environment(), gpus=config.gpus, on_cpu=config.device == "cpu", nodes=None)
        if not isinstance(mode, RunHere):
            raise UsageError(
                f"gpus: {config.gpus}: this command benchmarks one GPU; for several run "
                f"`torchrun --nproc-per-node={mode.num_procs} -m flatout bench ...` without gpus"
            )
        prepare_torch(mode.environment)
        # import torch only after the configuration is checked
        import_transformers()
        from flatout.bench.run import measure, measured_config

        measured, data_name = measured_config(config, Path(place), args.steps)
        # the run prints to stderr, so that stdout has only the figures
        with redirect_stdout(sys.stderr):
            measured_run = measure(measured, launched_s)
    if measured_run is None:
        return 0
    facts = {"model": config.model.name, "weights": config.model.init, "data": data_name} | measured_run
    facts["num_timed_steps"] = args.steps - WARMUP_STEPS
    if args.json:
        print(json.dumps(facts))
        return 0
    weights = "random weights" if facts["weights"] == "random" else "pretrained weights"
    lines = {
        "model": f"{facts['model']}, {weights}",
        "data": data_name,
        "measured": f"{facts['num_timed_steps']} steps on {facts['num_ranks']} x {facts['device']}",
        "tokens/s": f"{facts['tokens_per_s']:,.0f}",
        "label tokens/s": f"{facts['label_tokens_per_s']:,.0f}",
        "step time": f"p50 {facts['step_p50_s']:.3f} s, p95 {facts['step_p95_s']:.3f} s",
        "peak memory": f"{facts['peak_memory_bytes'] / 2**30:.2f} GiB",
        "MFU": "unknown for this device" if facts["mfu"] is None else f"{facts['mfu']:.1%}",
        "first step": f"{facts['launch_to_first_step_s']:.1f} s after the launch",
    }
    print(rows(lines.items()))
    return 0
