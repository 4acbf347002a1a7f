"""`python -m benchmarks.bench`: flatout measured on this machine, beside other trainers where they are installed.

    python -m benchmarks.bench --list
    python -m benchmarks.bench --rows 8b-bf16,8b-fp8@2,8b-unsloth-bf16 --peers benchmarks/peers --out bench
    python -m benchmarks.bench --cap 24GB --peers benchmarks/peers --rows '8b-nf4-2k,8b-unsloth-nf4-2k-*'
    python -m benchmarks.bench --cap 24GB --rows 8b-nf4-2k --sweep 'recompute=none,full;batch.layout=packed,rows'

With --cap, every run sees a GPU of that size; it computes and reads memory as fast as the GPU that is there.
Writes results.json (every run) and results.md (ratios first). Exits with 0 when every run finished, with 1 when one did
not, with 2 for a row or option that does not exist.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flatout.errors import FlatoutError, ResourceError, UsageError

from .cap import total_bytes
from .machine import gpu_header
from .protocol import Settings, run_rows
from .report import markdown, summary
from .rows import OURS, Row, choose, read_parity, read_peers, sweep

# a capped run is one of many that are tried
STEPS, CAPPED_STEPS = 13, 8
GRID = "recompute=none,selective,full;batch.micro_batch_tokens=2048,4096,8192"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--rows", metavar="A,B,C", help="what to measure (0.6b-auto; tiny without a GPU)")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="results go here (bench)")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="model folders and logs (FOLDER of --out/work)")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="rows of other trainers: a folder with rows.json")
    parser.add_argument(
        "--peer-path",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="put before the peers' Python path",
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="a built data set's folder, not random tokens")
    parser.add_argument("--parity", type=Path, metavar="FILE", help="verdicts written by benchmarks/parity.py")
    steps = f"optimizer steps a run, 3 left out ({STEPS}, with --cap {CAPPED_STEPS})"
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of every row (3)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no run that would end later")
    parser.add_argument("--cap", metavar="GPU", help="every run sees a GPU of this size or name, such as 24GB or 4090")
    parser.add_argument("--capability", metavar="X.Y", help="flatout chooses kernels by it, as on an older GPU: 8.9")
    parser.add_argument("--random-init", action="store_true", help="flatout draws weights in memory: no model files")
    parser.add_argument(
        "--sweep", nargs="?", const=GRID, metavar="A=1,2;B=3,4", help=f"also each combination of settings ({GRID})"
    )


def chosen_rows(args: argparse.Namespace, known: Sequence[Row]) -> list[Row]:
    """The rows that were asked for. Raises UsageError."""
    rows = choose(known, (args.rows or ("0.6b-auto" if torch.cuda.is_available() else "tiny")).split(","))
    if args.random_init:
        if others := [row.name for row in rows if row.system != "flatout"]:
            raise UsageError(f"--random-init: {others[0]} needs files of weights; leave it out, or the row")
        rows = [row.with_overrides(["model.init=random"]) for row in rows]
    return sweep(rows, args.sweep) if args.sweep else rows


def cap_bytes(args: argparse.Namespace) -> int | None:
    """The memory of the GPU that runs are to see. Raises UsageError, and ResourceError where there is no larger one."""
    if args.capability and not re.fullmatch(r"\d{1,2}\.\d", args.capability):
        raise UsageError(f"--capability is {args.capability!r}, expected a compute capability such as 8.9")
    if args.cap is None:
        return None
    cap, has_mib = total_bytes(args.cap), float(gpu_header().get("memory.total", 0))
    if cap > has_mib * 2**20:
        raise ResourceError(f"--cap {args.cap} needs a larger GPU; this machine's has {has_mib / 1024:.1f} GiB")
    return cap


def run(args: argparse.Namespace) -> int:
    """Measure and print the table; 0 when every run finished, else 1. Raises UsageError and ResourceError."""
    peers = read_peers(args.peers) if args.peers else None
    known = [*OURS, *(peers.rows if peers else ())]
    if args.list:
        width = max(len(row.name) for row in known)
        for row in known:
            settings = row.settings.get("overrides", [f"{key}={value}" for key, value in row.settings.items()])
            print(f"{row.name:<{width}} {row.system}, {row.shape}\n{'':<{width}} {' '.join(settings)}".rstrip())
        return 0
    rows, cap = chosen_rows(args, known), cap_bytes(args)
    settings = Settings(
        out=args.out,
        work=(args.work or args.out / "work").resolve(),
        num_steps=args.steps or (CAPPED_STEPS if cap else STEPS),
        num_repeats=args.repeats,
        time_limit_s=args.time_limit,
        data=args.data,
        peer_program=(args.peers / peers.trainer).resolve() if peers else None,
        paths=tuple(str(path.resolve()) for path in args.peer_path),
        parity=read_parity(args.parity) if args.parity else {},
        cap_bytes=cap,
        capability=args.capability,
    )
    results = run_rows(rows, settings, lambda text: print(text, flush=True))
    targets = peers.targets if peers else ()
    (args.out / "results.md").write_text(markdown(results, targets), encoding="utf-8")
    print(f"\n{summary(results, targets)}\nin {args.out}: results.json, results.md")
    return 1 if "stopped" in results or any("error" in found for found in results["runs"]) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except FlatoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
