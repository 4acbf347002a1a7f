"""`flatout verify run.yaml [section.name=value ...]`: checks that all ways of computing a run's step agree."""

from __future__ import annotations

import argparse
import textwrap
from typing import Literal

from flatout.cli.parser import COUNT, Number, add_settings
from flatout.cli.screen import WIDTH, import_transformers, progress_console, say, show_gpus
from flatout.config.read import load_config

COLUMNS = f"{'case':<33} {'ranks':>5} {'micro':>5} {'loss':>7} {'gradient':>8} {'norm':>7}  verdict"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add_settings(parser, "model.precision=fp32")
    parser.add_argument("--ranks", type=COUNT, metavar="N", help="split over 2 to N processes (all GPUs; 2 on a CPU)")
    tolerance = "maximum relative difference (1e-4 in fp32)"
    parser.add_argument("--tolerance", type=Number(float, 0, is_above=True), metavar="X", help=tolerance)
    parser.add_argument("--fp64", action="store_true", help="verify in fp64 instead of fp32 (limit 1e-5)")


def run(args: argparse.Namespace) -> None:
    """Print the table. Raises NumericError (exit code 5) if one is above its limit."""
    config = load_config(args.config, args.overrides)
    show_gpus(config)
    import_transformers()
    import torch

    from flatout.verifier.compare import Comparison
    from flatout.verifier.run import require_equal, verify

    def print_row(row: Comparison) -> None:
        # differences are relative, the gradient's is the worst parameter's
        figures = zip((row.loss_difference, row.worst_difference, row.norm_difference), (7, 8, 7), strict=True)
        cells = " ".join(f"{'-' if value is None else format(value, '.1e'):>{width}}" for value, width in figures)
        print(f"{row.case:<33} {row.num_ranks:>5} {row.num_micro_batches:>5} {cells}  {row.verdict}", flush=True)
        if row.share is not None:
            print(f"  {row.share:.1%} of it, least exactly in {row.worst_parameter}", flush=True)
        if row.verdict != "ok":
            limit = f"limit {row.limit:.0e}" if row.verdict == "FAIL" else ""
            worst = f"worst gradient: {row.worst_parameter}" if row.worst_parameter else ""
            why = "; ".join(filter(None, (limit, row.note or worst)))
            for text in textwrap.wrap(why, WIDTH - 2, break_on_hyphens=False):
                print(f"  {text}", flush=True)

    has_gpus = config.device != "cpu" and torch.cuda.is_available()
    num_ranks = args.ranks or len(config.gpus or ()) or (torch.cuda.device_count() if has_gpus else 2)
    print(COLUMNS)
    exact: Literal["fp32", "fp64"] = "fp64" if args.fp64 else "fp32"
    with progress_console() as console:

        def show(row: Comparison) -> None:
            console.on_phase("")  # off the screen
            console.tick()
            print_row(row)
            console.on_phase("computing the next rows")

        console.on_phase("computing the first row")
        rows, notes = verify(config, num_ranks=num_ranks, exact=exact, tolerance=args.tolerance, on_row=show)
    for note in notes:
        print(textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="  "))
    say(f"written to {config.folder / 'verify.json'}")
    require_equal(rows)
    left_out = sum(row.verdict == "left out" for row in rows)
    print(f"{len(rows) - left_out} rows agree" + (f", {left_out} left out" if left_out else ""))
