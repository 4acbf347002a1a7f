"""`flatout runs`: lists the runs of a folder, with their losses, times and sizes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import UsageError
from flatout.io.redact import printable

if TYPE_CHECKING:
    from flatout.view.open_runs import RunRow

# what rows are sorted by: the field of RunRow
_SORTS = {
    "started": "started_at", "name": "name", "state": "state", "model": "model", "data": "data", "steps": "steps",
    "loss": "loss_after", "best": "best", "time": "time_s", "size": "size_bytes",
}  # fmt: skip
_HEAD = ("run", "state", "steps", "before", "after", "best", "time", "size", "model", "data")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of the runs (runs)")
    add("--sort", choices=_SORTS, default="started", help="what to sort by; rows without it come last (started)")
    add("--reverse", action="store_true", help="sort from the largest or last")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns 0; raises UsageError for a folder that does not exist."""
    from flatout.view.open_runs import list_runs

    if not args.folder.is_dir():
        hint = "train one: flatout train run.yaml" if args.folder == Path("runs") else "name the folder that holds runs"
        raise UsageError(f"there is no folder {args.folder}; {hint}")
    rows = list(list_runs(args.folder))
    field = _SORTS[args.sort]
    known = [row for row in rows if getattr(row, field) is not None]
    known.sort(key=lambda row: getattr(row, field), reverse=args.reverse)
    rows = known + [row for row in rows if getattr(row, field) is None]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not rows:
        print(f"no runs in {args.folder}; train one: flatout train run.yaml")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(_table([_HEAD, *map(_cells, rows)], width)))
    return 0


def _cells(row: RunRow) -> tuple[str, ...]:
    from flatout.track.summary import short_count, short_time

    def shown(value: Any, form: Callable[[Any], str]) -> str:
        return "-" if value is None else form(value)

    best = "-" if row.best is None else f"{row.best:.4f} @{row.best_step:,}"
    losses = (shown(loss, "{:.4f}".format) for loss in (row.loss_before, row.loss_after))
    steps = f"{row.steps:,}" if row.steps == row.planned_steps else f"{row.steps:,}/{row.planned_steps:,}"
    size = f"{short_count(row.size_bytes)}B"
    model, data = shown(row.model, lambda name: Path(name).name), shown(row.data, str)
    return row.name, row.state, steps, *losses, best, short_time(row.time_s), size, model, data


def _table(rows: list[tuple[str, ...]], width: int | None) -> list[str]:
    """Return aligned lines; names of models and data, at the end, are cut to the width of a terminal."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines if width is None else [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
