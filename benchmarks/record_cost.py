"""The cost of records and a tracker: step time of `flatout train` with all of them, and with none.

    python benchmarks/record_cost.py --shape qwen3-0.6b --steps 60 --repeats 2 --out FILE
    python benchmarks/record_cost.py --shape tiny --steps 200 --track ""        # on a CPU, without a tracker

Each run is a process of its own, in turn with and without. "On" writes a record every step and sends it to the
tracker; "off" writes two records, one for each half of the run. Compared are the means of the second half.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from bench.machine import gpu_header, versions
from bench.ours import base_values
from bench.rows import SAMPLES_PER_STEP
from bench.shapes import SHAPES
from whole_steps import prepare

from flatout.track.run_log import read_run

MICRO_BATCH_TOKENS = {"qwen3-0.6b": 32_768, "qwen3-8b": 24_000}


def train(folder: Path, values: dict[str, Any], name: str, overrides: list[str]) -> float:
    """Train in a process of its own; return the seconds of a step in the second half of the run."""
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump({**values, "run_dir": str(folder / name)}))
    command = [sys.executable, "-m", "flatout", "train", str(config), *overrides]
    with (folder / f"{name}.log").open("wb") as log:
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
            raise SystemExit(f"{name} failed:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    half = values["batch"]["max_steps"] // 2
    later = [record for record in read_run(folder / name).steps if record.step > half]
    return sum(record.step_s * record.num_recorded for record in later) / sum(record.num_recorded for record in later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--track", default="tensorboard", help="trackers by name, with commas between them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_steps = args.steps // 2 * 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder / "inputs", SHAPES[args.shape], num_steps)
        paths = {"run_dir": "", "model_dir": str(folder / "inputs/model"), "data_root": str(folder / "inputs/data")}
        values = base_values({**paths, "num_steps": num_steps, "samples_per_step": SAMPLES_PER_STEP})
        values["model"]["init"] = "random"
        values["batch"]["micro_batch_tokens"] = MICRO_BATCH_TOKENS.get(args.shape, 8192)
        modes = {"on": ["log_every_steps=1", f"track=[{args.track}]"], "off": [f"log_every_steps={num_steps // 2}"]}
        found: dict[str, list[float]] = {name: [] for name in modes}
        for repeat in range(args.repeats):
            for name, overrides in modes.items():
                found[name].append(train(folder, values, f"{name}{repeat}", overrides))
                print(f"{name}: {found[name][-1] * 1e3:.2f} ms a step", flush=True)
    ratio = sum(found["on"]) / sum(found["off"])
    record = {"shape": args.shape, "steps": num_steps, "track": args.track, "step_s": found, "ratio": round(ratio, 4)}
    print(f"on / off: {ratio:.4f}")
    if args.out:
        args.out.write_text(json.dumps({**record, "gpu": gpu_header(), "versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
