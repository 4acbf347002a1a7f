"""Kills a training run of a tiny model with SIGKILL at random moments until it has finished, then compares every bit.

    python benchmarks/kill_run.py --kills 50

Every step saves a checkpoint, so about half of the kills land inside a save. Each life is a forked
child, so that it starts at once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.demo.write import write_demo
from flatout.errors import FlatoutError
from flatout.trainer.run import train


def config_of(root: Path, name: str, num_steps: int) -> Config:
    return make_config(
        {
            "run_dir": str(root / name),
            "device": "cpu",
            "method": "full",
            "model": {"name": str(root / "demo" / "model"), "init": "random", "precision": "fp32"},
            "data": {
                "name": "demo",
                "root": str(root / "data"),
                "sources": [{"path": str(root / "demo" / "train.jsonl")}],
                "num_procs": 1,
            },
            "batch": {"samples_per_step": 2, "max_steps": num_steps},
            "checkpoint": {"every_steps": 1, "keep": 2},
        }
    )


def live(config: Config) -> int:
    """One life of the run in a forked child; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (the child keeps it until it dies)
    try:
        train(config)
    except FlatoutError:
        os._exit(1)
    os._exit(0)


def last_step(run_dir: Path) -> int:
    folder = run_dir / "checkpoints"
    return max((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()), default=0)


def survive(config: Config, num_kills: int, draw: random.Random) -> int:
    """Kill `num_kills` lives, each after it resumed and took a step; returns how many died inside a save."""
    num_mid_save = 0
    for life in range(num_kills):
        before = last_step(config.folder)
        pid = live(config)
        while last_step(config.folder) <= before:
            if os.waitpid(pid, os.WNOHANG)[0]:
                sys.exit(f"life {life} ended by itself, resuming from step {before}")
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        num_mid_save += any(".tmp-" in path.name for path in (config.folder / "checkpoints").iterdir())
    if os.waitpid(live(config), 0)[1]:
        sys.exit("the last life did not finish")
    return num_mid_save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_demo(root / "demo", 42, num_train=200, num_held_out=10)
        num_steps = 10 * args.kills
        killed, whole = config_of(root, "killed", num_steps), config_of(root, "whole", num_steps)
        num_mid_save = survive(killed, args.kills, random.Random(args.seed))
        if os.waitpid(live(whole), 0)[1]:
            sys.exit("the undisturbed run failed")
        for stem in ("model", "optimizer", "rng-0"):
            a, b = (
                load_file(c.folder / "checkpoints" / f"step-{num_steps}" / f"{stem}.safetensors")
                for c in (killed, whole)
            )
            if not all(torch.equal(a[name], b[name]) for name in b):
                sys.exit(f"{stem} differs from the undisturbed run")
    print(
        f"{args.kills} of {args.kills} kills resumed ({num_mid_save} struck inside a save); after {num_steps} steps "
        "weights, optimizer and random state equal the undisturbed run's to the bit"
    )


if __name__ == "__main__":
    main()
