"""`flatout runs`: lists the runs of a folder, with their losses, times and sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import Any

from flatout.cli.screen import fitted, say
from flatout.errors import UsageError
from flatout.io.redact import printable
from flatout.track.figures import short_count, short_time
from flatout.track.run_log import write_notes
from flatout.track.summary import judged_text
from flatout.view.open_runs import RunRow, find_run, list_runs, run_folders

# what rows are sorted by: the field of RunRow
_SORTS = {
    "started": "started_at", "name": "name", "state": "state", "model": "model", "data": "data", "steps": "steps",
    "loss": "loss_after", "reward": "reward_after", "best": "best", "time": "time_s", "size": "size_bytes",
}  # fmt: skip
_HEAD = ("run", "state", "tags", "steps", "figure", "on", "before", "after", "best", "time", "size", "note", "model",
         "data")  # fmt: skip

_TEXTS = {"run", "tags", "note", "model", "data"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of the runs (runs)")
    sort = f"what to sort by: {', '.join(_SORTS)}; rows without it come last (started)"
    add("--sort", choices=_SORTS, default="started", metavar="COLUMN", help=sort)
    add("--reverse", action="store_true", help="sort from the largest or last")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--tagged", metavar="TAG", help="list only runs with this tag")
    add("--note", nargs=2, metavar=("RUN", "TEXT"), help="set the note of a run; an empty text removes it")
    add("--tag", nargs="+", metavar=("RUN", "TAG"), help="tag a run")
    add("--untag", nargs="+", metavar=("RUN", "TAG"), help="remove tags of a run")


def run(args: argparse.Namespace) -> None:
    """Print the list, after notes and tags were written. Raises UsageError for what does not exist."""
    if not args.folder.is_dir():
        if args.folder == Path("runs"):
            raise UsageError("there is no folder runs; train one: flatout train run.yaml")
        is_run = (Path("runs") / args.folder).is_dir()
        what = f"{args.folder} is a run, not a folder of runs; `flatout watch {args.folder}` shows it"
        raise UsageError(what if is_run else f"there is no folder {args.folder}; give a folder of runs")
    _write_notes(args)
    rows = [row for row in list_runs(args.folder) if args.tagged is None or args.tagged in row.tags]
    field = _SORTS[args.sort]
    known = [row for row in rows if getattr(row, field) is not None]
    known.sort(key=lambda row: getattr(row, field), reverse=args.reverse)
    rows = known + [row for row in rows if getattr(row, field) is None]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not rows and args.tagged is not None:
        print(f"no run in {args.folder} has the tag {args.tagged}")
    elif not rows:
        print(f"no runs in {args.folder}; train one: flatout train run.yaml")
    else:
        print("\n".join(_table([_HEAD, *map(_cells, rows)])))
        for problem in [printable(problem) for row in rows for problem in row.problems]:
            say(problem)


def _write_notes(args: argparse.Namespace) -> None:
    """Write what --note, --tag and --untag say. Raises UsageError for a run or a text that is missing."""
    for option in ("note", "tag", "untag"):
        if (words := getattr(args, option)) is None:
            continue
        target, *given = words
        if not given:
            raise UsageError(f"--{option} {target}: name a tag after the run, as in --{option} {target} baseline")
        folder = find_run(target, args.folder)
        if folder not in run_folders(folder):
            raise UsageError(f"{folder} is not the folder of a run, so it has no {option}; name a run of the list")
        changes: dict[str, Any] = {"note": {"note": given[0]}, "tag": {"add": given}, "untag": {"remove": given}}
        write_notes(folder, **changes[option])


def _cells(row: RunRow) -> tuple[str, ...]:
    def shown(value: Any, form: Callable[[Any], str]) -> str:
        return "-" if value is None else form(value)

    kind, figure = ("eval", "loss") if row.reward_after is None else ("held_out", "reward")
    values = (getattr(row, f"{figure}_before"), getattr(row, f"{figure}_after"), row.best)
    # a run without an evaluation shows what its steps or rounds had
    on = "-" if values[1] is None else "train" if row.best is None else "eval"
    # one error is enough to judge by, and three are too wide
    judged = zip(values, (None, row.stderrs[1], None), strict=True)
    ends = ["-" if value is None else judged_text(kind, value, error) for value, error in judged]
    ends[-1] += "" if row.best is None else f" @{row.best_step:,}"
    steps = f"{row.steps:,}" if row.steps == row.planned_steps else f"{row.steps:,}/{row.planned_steps:,}"
    size = f"{short_count(row.size_bytes)}B"
    model, data = shown(row.model, lambda name: Path(name).name), shown(row.data, str)
    tags, note = ",".join(row.tags) or "-", " ".join(row.note.split()) or "-"
    rest = short_time(row.time_s), size, note, model, data
    return row.name, row.state, tags, steps, figure, on, *ends, *rest


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return aligned lines, without columns that say nothing; they fit a terminal."""
    nothing = {"tags": "-", "note": "-", "figure": "loss"}
    is_shown = [{*cells} != {nothing.get(name)} for name, *cells in zip(*rows, strict=True)]
    texts = [index for index, name in enumerate(compress(_HEAD, is_shown)) if name in _TEXTS]
    return fitted([[printable(cell) for cell in compress(row, is_shown)] for row in rows], texts)
