"""`flatout bench`: flatout measured on this machine, beside other trainers where they are installed."""

from __future__ import annotations

import argparse
from pathlib import Path


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
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="a built data set's folder instead of chat lengths")
    parser.add_argument("--parity", type=Path, metavar="FILE", help="verdicts written by benchmarks/parity.py")
    parser.add_argument("--steps", type=int, default=13, metavar="N", help="optimizer steps a run, 3 left out (13)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of every row (3)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no run that would end later")


def run(args: argparse.Namespace) -> int:
    """Measure and print the table; 0 when every run finished, else 1."""
    from flatout.bench.rows import OURS, choose, read_parity, read_peers

    peers = read_peers(args.peers) if args.peers else None
    known = [*OURS, *(peers.rows if peers else ())]
    if args.list:
        for row in known:
            print(f"{row.name:<28} {row.system:<10} {row.shape:<14} {dict(row.settings)}")
        return 0
    # torch is imported only now
    from flatout.bench.protocol import Settings, run_rows
    from flatout.bench.report import markdown, svg

    names = args.rows.split(",") if args.rows else default_rows()
    settings = Settings(
        out=args.out,
        work=(args.work or args.out / "work").resolve(),
        num_steps=args.steps,
        num_repeats=args.repeats,
        time_limit_s=args.time_limit,
        data=args.data,
        peer_program=(args.peers / peers.trainer).resolve() if peers else None,
        paths=tuple(str(path.resolve()) for path in args.peer_path),
        parity=read_parity(args.parity) if args.parity else {},
    )
    results = run_rows(choose(known, names), settings, lambda text: print(text, flush=True))
    table = markdown(results, peers.targets if peers else ())
    (args.out / "results.md").write_text(table, encoding="utf-8")
    (args.out / "results.svg").write_text(svg(results), encoding="utf-8")
    print(f"\n{table}\nin {args.out}: results.json, results.md, results.svg")
    return 1 if "stopped" in results or any("error" in found for found in results["runs"]) else 0


def default_rows() -> list[str]:
    """The small shape's rows on a GPU, the tiny one on a CPU."""
    import torch

    return ["0.6b-auto"] if torch.cuda.is_available() else ["tiny"]
