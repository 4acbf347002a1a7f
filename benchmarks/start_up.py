"""Where the seconds go from launch to the end of the first step: a cold start, a warm one, and imports by package.

python benchmarks/start_up.py                                         # on a CPU: a narrow model of as many layers
python benchmarks/start_up.py --shape qwen3-8b --width 1 --device cuda    # on a GPU

Cold: no compiler cache, no kept verdicts, no kept hashes (the page cache is warm). Warm: the second start of the same
run. The sum of the stages is compared with the time from the start of the process to the first step that this script
measures itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.samples import CHAT, NAME, random_samples, write_store, write_tokenizer
from bench.shapes import SHAPES, shape_config

from flatout.track.run_log import read_run
from flatout.track.start_up import EVENT, stages_of

# what loads weights; the targets leave it out
LOADING = "loading weights"
# sizes of a shape that --width divides
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run_yaml = prepare(Path(folder), args)
        starts = {}
        for name in ("cold", *(f"warm {index + 1}" for index in range(args.warm))):
            starts[name] = start(Path(folder), run_yaml, args.overrides)
            print(f"{name}: {starts[name]['measured_s']:.1f} s", flush=True)
        imported = start(Path(folder), run_yaml, args.overrides, imports=True)["imports"]
    warm = {name: found for name, found in starts.items() if name != "cold"}
    lines = [*table(starts["cold"], list(warm.values())), "", *imports_table(imported)]
    print("\n".join(lines))
    if args.out:
        args.out.write_text(
            json.dumps({"args": vars(args), "starts": starts, "imports": imported}, default=str, indent=1)
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument(
        "--width", type=int, default=16, metavar="N", help="divide the shape's width by N (16; 1: whole)"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--samples", type=int, default=4992, help="samples of the data set (4,992)")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer of the model (a tiny one is made)")
    parser.add_argument("--warm", type=int, default=3, metavar="N", help="warm starts; their medians are shown (3)")
    parser.add_argument("--folder", type=Path, help="where the run and its caches are written (the temporary folder)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="further settings of the run")
    return parser.parse_args()


def prepare(folder: Path, args: argparse.Namespace) -> Path:
    """Write a model folder without weights, a token store and the configuration; return the configuration."""
    model, values = folder / "model", shape_config(args.shape)
    if args.tokenizer:
        shutil.copytree(args.tokenizer, model)
    else:
        write_tokenizer(model)
    values.update({name: max(1, values[name] // args.width) for name in WIDTHS})
    (model / "config.json").write_text(json.dumps(values))
    samples = random_samples(args.samples // CHAT.samples_per_group, values["vocab_size"])
    write_store(folder / "data", str(model), values["vocab_size"], samples)
    (folder / "run.yaml").write_text(
        f"name: start\nrun_dir: {folder}/run\nmethod: lora\ndevice: {args.device}\n"
        f"model: {{name: {model}, init: random}}\ndata: {{name: {NAME}, root: {folder}/data}}\n"
        f"batch: {{samples_per_step: {1 if args.device == 'cpu' else 32}, max_steps: 2}}\n"
        "checkpoint: {every_steps: null}\n"
    )
    return folder / "run.yaml"


def start(folder: Path, run_yaml: Path, overrides: list[str], *, imports: bool = False) -> dict[str, Any]:
    """Train two steps in a new process whose caches are in `folder`; return the stages and the time until step 1."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "cache" / "triton")}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    options = ["-X", "importtime"] if imports else []
    command = [sys.executable, *options, "-m", "flatout", "train", str(run_yaml), *overrides]
    log = folder / "imports.txt"
    launched_s = time.time()
    with log.open("w") as errors:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{log.read_text()[-2000:]}")
    run = read_run(folder / "run")
    event = next(event for event in reversed(run.events) if event["kind"] == EVENT)
    return {
        "measured_s": from_iso(str(event["time"])) - launched_s,
        "stages": stages_of(event),
        "lines": done.stdout.splitlines(),
        "imports": by_package(log.read_text()) if imports else {},
    }


def from_iso(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def by_package(log: str) -> dict[str, float]:
    """Return the seconds that each top package took to import, without what it imported from others."""
    seconds: Counter[str] = Counter()
    for own_us, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +([\w.]+)$", log, re.MULTILINE):
        seconds[name.partition(".")[0]] += int(own_us) / 1e6
    return dict(seconds.most_common())


def table(cold: dict[str, Any], warm: list[dict[str, Any]]) -> list[str]:
    """Return the table of all stages: cold, and the median of the warm starts."""
    stages = dict.fromkeys(name for found in (cold, *warm) for name in found["stages"])
    rows = [
        (name, cold["stages"].get(name, 0.0), statistics.median(found["stages"].get(name, 0.0) for found in warm))
        for name in stages
    ]
    lines = ["| stage | cold s | warm s |", "|---|---|---|"]
    lines += [f"| {name} | {before:.2f} | {after:.2f} |" for name, before, after in rows]
    sums = [sum(found["stages"].values()) for found in (cold, *warm)]
    apart = [total - found["stages"].get(LOADING, 0.0) for total, found in zip(sums, (cold, *warm), strict=True)]
    measured = [found["measured_s"] for found in (cold, *warm)]
    totals = {"sum": sums, "sum without loading": apart, "measured from outside": measured}
    lines += [f"| {name} | {one[0]:.2f} | {statistics.median(one[1:]):.2f} |" for name, one in totals.items()]
    return lines


def imports_table(seconds: dict[str, float]) -> list[str]:
    """Return a table of the packages that take longest to import."""
    lines = ["| imports by package (of the whole run) | s |", "|---|---|"]
    lines += [f"| {name} | {one:.2f} |" for name, one in list(seconds.items())[:12]]
    return [*lines, f"| all {len(seconds)} | {sum(seconds.values()):.2f} |"]


if __name__ == "__main__":
    main()
