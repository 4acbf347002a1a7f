"""Kills random ranks of a launched run at random moments; the run must recover each time by itself.

    python benchmarks/kill_ranks.py --kills 20 --ranks 2

At the end the weights are compared with those of an undisturbed run. `--hang` stops a rank (SIGSTOP) instead.
`--device cuda` takes one GPU a rank. Detection is the time from the signal to the first survivor's PeerLostError,
recovery to the next finished step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from flatout.demo.write import write_demo
from flatout.launch.attempt import RankReport

DEADLINE_S = 180


def write_config(root: Path, name: str, args: argparse.Namespace) -> Path:
    values: dict[str, Any] = {
        "run_dir": str(root / name),
        "device": args.device,
        "gpus": list(range(args.ranks)),
        "method": "full",
        "compile": "off",
        "deterministic": True,
        "model": {"name": str(root / "demo" / "model"), "init": "random", "precision": "fp32"},
        "data": {
            "name": "demo",
            "root": str(root / "data"),
            "sources": [{"path": str(root / "demo" / "train.jsonl")}],
            "num_procs": 1,
        },
        "batch": {"samples_per_step": 2 * args.ranks, "max_steps": args.steps_per_kill * (args.kills + 1)},
        "checkpoint": {"every_steps": 5, "keep": 2},
        "faults": {"max_restarts": args.kills, "hang_s": args.hang_s},
    }
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flatout", "train", str(config)]
    with config.with_suffix(".out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def restarts_of(config: Path) -> list[str]:
    """The lines in which a run told why it starts again."""
    lines = config.with_suffix(".out").read_text(errors="replace").splitlines()
    return [line for line in lines if "; restart " in line]


def num_steps_told(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def wait_until(ready: Any, run: subprocess.Popen[bytes], what: str) -> float:
    """Seconds since 1970 when `ready()` first was true."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with code {run.returncode} before {what}")
        if time.monotonic() > deadline:
            run.kill()
            raise RuntimeError(f"no {what} within {DEADLINE_S} s")
        time.sleep(0.01)
    return time.time()


def strike(run_dir: Path, args: argparse.Namespace, draw: random.Random) -> tuple[Path, int]:
    """Send the signal; the attempt's folder and the rank that was struck."""
    folder = (run_dir / "logs" / "latest").resolve()
    report = draw.choice(RankReport.read_all(folder))
    os.kill(report.pid, signal.SIGSTOP if args.hang else signal.SIGKILL)
    return folder, report.rank


def told_at(folder: Path) -> float | None:
    ends = [r.ended_at for r in RankReport.read_all(folder) if r.exit_code == 7 and r.ended_at is not None]
    return min(ends, default=None)


def disturb(config: Path, run_dir: Path, args: argparse.Namespace) -> Iterator[tuple[float | None, float]]:
    """Detection and recovery of each strike, in seconds."""
    draw = random.Random(args.seed)
    run = start(config)
    for number in range(args.kills):
        before = num_steps_told(run_dir)
        wait_until(lambda: num_steps_told(run_dir) >= before + 3, run, "3 more steps")  # noqa: B023
        time.sleep(draw.random() * 0.5)
        struck_at = time.time()
        folder, rank = strike(run_dir, args, draw)
        num_told = num_steps_told(run_dir)
        wait_until(lambda: (run_dir / "logs" / "latest").resolve() != folder, run, "restart")  # noqa: B023
        time.sleep(0.1)
        num_told = num_steps_told(run_dir)
        recovered_at = wait_until(lambda: num_steps_told(run_dir) > num_told, run, "step after the restart")  # noqa: B023
        found_at = told_at(folder)
        seen = None if found_at is None else found_at - struck_at
        recovery_s = recovered_at - struck_at
        print(f"{number}: rank {rank}, told after {seen} s, next step after {recovery_s:.1f} s", flush=True)
        yield seen, recovery_s
    if run.wait():
        raise RuntimeError(f"the disturbed run ended with code {run.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hang", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--hang-s", type=float, default=10.0)
    parser.add_argument("--steps-per-kill", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_demo(root / "demo", 42, num_train=400, num_held_out=10)
        disturbed, whole = (write_config(root, name, args) for name in ("disturbed", "whole"))
        try:
            times = list(disturb(disturbed, root / "disturbed", args))
        except RuntimeError as error:
            tail = disturbed.with_suffix(".out").read_text(errors="replace")[-2000:]
            sys.exit("\n".join([tail, *restarts_of(disturbed), str(error)]))
        if len(restarts := restarts_of(disturbed)) > args.kills:
            print(f"{len(restarts)} restarts for {args.kills} kills:", *restarts, sep="\n")
        if code := start(whole).wait():
            sys.exit(f"the undisturbed run ended with code {code}")
        num_steps = json.loads((root / "whole" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        for stem in ("model", "optimizer"):
            a, b = (
                load_file(root / name / "checkpoints" / f"step-{num_steps}" / f"{stem}.safetensors")
                for name in ("disturbed", "whole")
            )
            worst = max(float((a[key].double() - b[key].double()).abs().max()) for key in b)
            same = all(torch.equal(a[key], b[key]) for key in b)
            print(f"{stem}: {'equal to the bit' if same else f'largest difference {worst:.3g}'}")
    for what, values in (("detection", [a for a, _ in times if a is not None]), ("recovery", [b for _, b in times])):
        if values:
            print(f"{what}: median {statistics.median(values):.2f} s, worst {max(values):.2f} s over {len(values)}")
    print(f"{len(times)} of {args.kills} recovered by themselves on {args.ranks} {args.device} ranks")


if __name__ == "__main__":
    main()
