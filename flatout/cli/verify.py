"""`flatout verify run.yaml [section.name=value ...]`: is every way of computing this run's step the same step?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.train.verify_compare import Row

COLUMNS = f"{'case':<44} {'ranks':>5} {'micro':>5} {'loss':>9} {'gradient':>9} {'norm':>9} {'1-cosine':>9}  verdict"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("config", type=Path, help="a YAML file, or a .py file that sets `config` (which runs as code)")
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="such as model.precision=fp32")
    parser.add_argument("--ranks", type=int, metavar="N", help="split over 2 to N processes (all GPUs; 2 on a CPU)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest relative difference (fp32 1e-4)")
    parser.add_argument("--fp64", action="store_true", help="verify in fp64 instead of fp32 (limit 1e-5)")
    parser.add_argument("--families", action="store_true", help="also tiny models of five architectures, same settings")


def run(args: argparse.Namespace) -> int:
    """Print the table; 0 when all is equal. Raises NumericError (exit code 5) when a row is above its limit."""
    from flatout.config.read import load_config
    from flatout.launch.place import only_these
    from flatout.parallel.rank import adopt, environment

    if args.ranks is not None and args.ranks < 1:
        raise UsageError(f"--ranks is {args.ranks}; expected at least 1")
    if args.tolerance is not None and not args.tolerance > 0:
        raise UsageError(f"--tolerance is {args.tolerance:g}; expected more than 0")
    config = load_config(args.config, args.overrides)
    # before torch looks for GPUs
    adopt(only_these(environment(), gpus=config.gpus, on_cpu=config.device == "cpu"))
    import torch

    from flatout.cli.quiet import quiet_transformers
    from flatout.train.verify import verify

    quiet_transformers()
    has_gpus = config.device != "cpu" and torch.cuda.is_available()
    num_ranks = len(config.gpus) if config.gpus else torch.cuda.device_count() if has_gpus else 2
    print(COLUMNS)
    report = verify(
        config,
        num_ranks=args.ranks or num_ranks,
        exact="fp64" if args.fp64 else "fp32",
        tolerance=args.tolerance,
        families=args.families,
        on_row=lambda row: print(line_of(row), flush=True),
    )
    for note in report.notes:
        print(f"note: {note}")
    print(f"written to {config.folder / 'verify.json'}")
    report.require_equal()
    left_out = sum(row.verdict == "left out" for row in report.rows)
    print(f"{len(report.rows) - left_out} rows agree" + (f", {left_out} left out" if left_out else ""))
    return 0


def line_of(row: Row) -> str:
    """One row of the table; differences are relative, the gradient's is the worst parameter's, named behind."""
    cosine = None if row.cosine is None else 1 - row.cosine
    figures = (row.loss_difference, row.worst_difference, row.norm_difference, cosine)
    cells = " ".join(f"{'-' if value is None else format(value, '.1e'):>9}" for value in figures)
    limit = "" if row.verdict in ("noise", "left out") else f" (limit {row.limit:.0e})"
    why = row.note or row.worst_parameter or ""
    return f"{row.case:<44} {row.num_ranks:>5} {row.num_micro_batches:>5} {cells}  {row.verdict}{limit} {why}".rstrip()
