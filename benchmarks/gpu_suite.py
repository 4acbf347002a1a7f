"""Runs every test marked `gpu` on the GPUs of this machine and records which passed, and with what.

    make test-gpu
    python benchmarks/gpu_suite.py --commit SHA     # in a copy without git, with packages that are there

Writes benchmarks/results/gpu-suite.json, also when tests fail. Exits with 0 when none failed, with 1 when some did, and
with 2, writing nothing, where the suite cannot run: without a GPU, or without the `gpu` extra. Tests that need more
GPUs than there are count as skipped, with the reason.

Several processes share the GPUs: each test measures memory and waits of its own process alone, and most of the time
goes into compiling on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from bench.machine import gpu_header, versions

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "gpu-suite.json"
GPU_EXTRA = {"torchao": "torchao", "cudnn": "nvidia-cudnn-frontend"}
# a process compiles on two cores, and its CUDA context, its caches and the largest test take less than this
CORES_PER_PROCESS, GIB_PER_PROCESS, MAX_PROCESSES_PER_GPU = 2, 12, 8
MAX_REASON_CHARACTERS = 200
# tests of at least so many seconds are recorded one by one, and started first the next time
SLOW_S = 5.0


@dataclass(frozen=True)
class Case:
    """How one test ended. `outcome` is passed, failed, skipped or error (its process died, or it could not start)."""

    file: str
    name: str
    outcome: str
    seconds: float
    reason: str


def run_suite(tests: Path, num_processes: int, junit: Path) -> list[Case]:
    """Run the tests marked `gpu` under `tests`.

    `junit` gets pytest's XML with every traceback, and a .txt beside it those of failures as they come.

    Raises:
        SystemExit: pytest ended before it ran the tests, or found none.
    """
    command = [sys.executable, "-m", "pytest", str(tests), "-m", "gpu", "-rfE", "-vv", f"--junitxml={junit}"]
    # one test at a time, so that a slow one holds up no other
    command += ["-o", "junit_family=xunit1", "-n", str(num_processes), "--dist", "load", "--maxschedchunk", "1"]
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    if "CUDA_VISIBLE_DEVICES" not in environment:
        environment["FLATOUT_TEST_GPUS"] = str(torch.cuda.device_count())
    if OUT.exists():
        environment["FLATOUT_SLOW_TESTS"] = str(OUT)
    environment["FLATOUT_FAILURES_FILE"] = str(junit.with_suffix(".txt").resolve())
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code not in (0, 1):
        stop(f"pytest ended with code {code}: it found no test marked gpu, or could not run them")
    return read_cases(junit)


def read_cases(junit: Path) -> list[Case]:
    """Every test of pytest's XML in its `xunit1` form."""
    return [read_case(element) for element in ElementTree.parse(junit).iter("testcase")]


def read_case(element: ElementTree.Element) -> Case:
    file, name, seconds = element.get("file", ""), element.get("name", ""), float(element.get("time", 0))
    for tag, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (found := element.find(tag)) is not None:
            message, text = found.get("message", ""), found.text or ""
            # of a file that cannot be imported, only the end of the traceback tells why
            reason = one_line(text.splitlines()[-1]) if message == "collection failure" else one_line(message)
            return Case(file, name, outcome, seconds, reason)
    return Case(file, name, "passed", seconds, "")


def one_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:MAX_REASON_CHARACTERS]


def summarise(cases: Sequence[Case]) -> dict[str, Any]:
    """Counts, failures and skips with their reasons, the sum of each file's test times, and those of slow tests."""
    outcomes = Counter(case.outcome for case in cases)
    file_seconds: dict[str, float] = defaultdict(float)
    for case in cases:
        file_seconds[case.file] += case.seconds
    return {
        "counts": {outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped", "error")},
        "failures": [
            {"test": f"{case.file}::{case.name}", "reason": case.reason}
            for case in cases
            if case.outcome in ("failed", "error")
        ],
        "skips": dict(Counter(case.reason for case in cases if case.outcome == "skipped")),
        "file_seconds": {file: round(seconds, 1) for file, seconds in sorted(file_seconds.items())},
        "slow_tests": {f"{case.file}::{case.name}": round(case.seconds, 1) for case in cases if case.seconds >= SLOW_S},
    }


def machine() -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": names, "num_gpus": len(names), "driver": gpu_header().get("driver_version"), "cpus": os.cpu_count()}


def choose_num_processes() -> int:
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    per_gpu = min(MAX_PROCESSES_PER_GPU, int(gib / GIB_PER_PROCESS))  # each has another GPU first: tests/conftest.py
    return max(1, min(per_gpu * torch.cuda.device_count(), (os.cpu_count() or 1) // CORES_PER_PROCESS))


def git_state() -> tuple[str, bool]:
    """The commit of this checkout, and whether its files differ from it (the record itself left out)."""
    commit = git("rev-parse", "HEAD")
    return commit, bool(git("status", "--porcelain", "--", ".", f":(exclude){OUT.relative_to(ROOT)}"))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        stop(f"git cannot tell which commit this is ({one_line(done.stderr)}); pass --commit SHA")
    return done.stdout.strip()


def stop(why: str) -> None:
    """Ends the script with code 2 and one line."""
    print(f"gpu_suite: {why}", file=sys.stderr)
    raise SystemExit(2)


def check_machine() -> None:
    if not torch.cuda.is_available():
        stop("no GPU is visible to torch; run this on a machine with a CUDA GPU")
    missing = [package for module, package in GPU_EXTRA.items() if find_spec(module) is None]
    if missing:
        stop(f"{', '.join(missing)} not installed; run: pip install -e '.[gpu]'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="the commit of these files, where there is no git to tell")
    parser.add_argument("--dirty", action="store_true", help="with --commit: the files differ from it")
    parser.add_argument("--processes", type=int, help="processes that share the GPUs (default: by cores and memory)")
    parser.add_argument("--junit", type=Path, help="keep pytest's XML, with every traceback, in this file")
    args = parser.parse_args()
    check_machine()
    if args.commit and not re.fullmatch("[0-9a-f]{7,40}", args.commit):
        stop(f"--commit {args.commit}: give 7 to 40 hexadecimal digits")
    commit, dirty = (args.commit, args.dirty) if args.commit else git_state()
    num_processes = args.processes or choose_num_processes()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cases = run_suite(ROOT / "tests", num_processes, (args.junit or Path(folder) / "junit.xml").absolute())
    record = {
        "commit": commit,
        "dirty": dirty,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - started, 1),
        "processes": num_processes,
        **summarise(cases),
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['counts']} in {record['seconds']} s; wrote {OUT.relative_to(ROOT)}")
    raise SystemExit(1 if record["failures"] else 0)


if __name__ == "__main__":
    main()
