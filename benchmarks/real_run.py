"""Trains a Qwen3-0.6B-shaped model from random weights on real rows, kills it, resumes it, compares every bit.

    python benchmarks/real_run.py --rows alpaca.json --tokenizer QWEN3_TOKENIZER_DIR --method lora full

For each method: one undisturbed run, one run killed with SIGKILL at a random step and started again, both with
`deterministic: true`; then one more undisturbed run without it, to show what the switch costs and what it buys.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from bench.shapes import SHAPES
from safetensors import safe_open


def write_config(args: argparse.Namespace, method: str, name: str, *, deterministic: bool) -> Path:
    config = {
        "name": name,
        "run_dir": str(args.out / name),
        "method": method,
        "deterministic": deterministic,
        "model": {"name": str(args.out / "model"), "init": "random", "precision": args.precision},
        "data": {"name": "rows", "root": str(args.out / "data"), "sources": [{"path": str(args.rows)}]},
        "lora": {"rank": 16, "dropout": 0.05},
        "batch": {"samples_per_step": 32, "micro_batch_tokens": 8192, "max_steps": args.steps},
        "optim": {"lr": 1e-3 if method == "lora" else 3e-4},
        "checkpoint": {"every_steps": args.save_every, "keep": 1},
    }
    path = args.out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else iter(())
    return list({line["step"]: line for line in lines if line["kind"] == "step"}.values())


def start(path: Path) -> subprocess.Popen[bytes]:
    with path.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "flatout", "train", str(path)], stdout=log, stderr=log)


def finish(path: Path) -> float:
    started = time.perf_counter()
    if start(path).wait() != 0:
        sys.exit(path.with_suffix(".log").read_text()[-4000:])
    return time.perf_counter() - started


def kill_at(path: Path, run_dir: Path, step: int) -> int:
    process = start(path)
    while process.poll() is None and len(steps_of(run_dir)) < step:
        time.sleep(0.01)
    process.kill()
    process.wait()
    return len(steps_of(run_dir))


def difference(one: Path, other: Path) -> tuple[bool, float]:
    """Whether the last checkpoints' weights and optimizer states are bit-equal, and their largest difference."""
    equal, largest = True, 0.0
    for stem in ("model", "optimizer"):
        files = [
            max((run / "checkpoints").iterdir(), key=lambda p: int(p.name[5:])) / f"{stem}.safetensors"
            for run in (one, other)
        ]
        with safe_open(files[0], "pt", "cuda") as a, safe_open(files[1], "pt", "cuda") as b:
            for name in a.keys():  # noqa: SIM118  (safe_open is no mapping)
                x, y = a.get_tensor(name), b.get_tensor(name)
                equal = equal and torch.equal(x, y)
                largest = max(largest, (x.double() - y.double()).abs().max().item())
    return equal, largest


def row(name: str, run_dir: Path, wall_s: float) -> str:
    steps = steps_of(run_dir)
    steady = steps[len(steps) // 2 :]
    rate = sum(s["num_tokens"] for s in steady) / sum(s["step_s"] for s in steady)
    peak_gib = max(s["peak_memory_bytes"] for s in steps) / 2**30
    return (
        f"{name:<28} {len(steps)} steps, loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}, "
        f"{rate:,.0f} tokens/s, peak {peak_gib:.1f} GiB, wall {wall_s:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("/tmp/real_run"))
    parser.add_argument("--method", nargs="+", default=["lora", "full"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.copytree(args.tokenizer, args.out / "model", dirs_exist_ok=True)
    (args.out / "model" / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    draw = random.Random(args.seed)
    for method in args.method:
        whole, killed, fast = f"{method}-whole", f"{method}-killed", f"{method}-fast"
        wall_s = finish(write_config(args, method, whole, deterministic=True))
        print(row(f"{method}, deterministic", args.out / whole, wall_s), flush=True)
        path = write_config(args, method, killed, deterministic=True)
        at = kill_at(path, args.out / killed, draw.randrange(args.save_every + 1, args.steps - 5))
        finish(path)
        equal, largest = difference(args.out / whole, args.out / killed)
        print(
            f"{method}: killed after step {at}, resumed: bit-equal {equal}, largest difference {largest:.3g}",
            flush=True,
        )
        shutil.rmtree(args.out / killed)
        wall_s = finish(write_config(args, method, fast, deterministic=False))
        print(row(f"{method}, not deterministic", args.out / fast, wall_s), flush=True)
        equal, largest = difference(args.out / whole, args.out / fast)
        print(
            f"{method}: not deterministic against deterministic: bit-equal {equal}, largest {largest:.3g}", flush=True
        )
        shutil.rmtree(args.out / whole)
        shutil.rmtree(args.out / fast)


if __name__ == "__main__":
    main()
