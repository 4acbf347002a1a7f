"""What verbs have in common: rows and tables, quick imports, and no progress bars of other libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TypeVar

from flatout.environment import environment, require_docstrings, set_environment
from flatout.errors import Fix, UsageError
from flatout.io.redact import WIDTH as WIDTH
from flatout.io.redact import printable, wrapped
from flatout.io.redact import rows as rows

if TYPE_CHECKING:
    from flatout.config.schema import Config, DataConfig
    from flatout.track.console import ConsoleCallback

T = TypeVar("T")
# a column of texts gives way to the width of a terminal down to so many characters
LEAST_TEXT = 20
COLUMN_FORM = "FLATOUT_NAME=YOUR_COLUMN, such as instruction=question"


def import_without_gc(module: str) -> None:
    """Import a large module with the garbage collector off, then freeze its objects, so that collections skip them."""
    if module in sys.modules:
        return
    require_docstrings()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import_module(module)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def import_transformers() -> None:
    """Import torch and transformers, without progress bars for loading and writing weights; say so if it takes long."""
    with progress_console() as console:
        console.on_phase("importing torch and transformers")
        import_without_gc("transformers.modeling_utils")
    quiet_transformers()


def quiet_transformers() -> None:
    """Switch off transformers' progress bars for loading and writing weights, in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def show_gpus(config: Config) -> None:
    """Show this process the GPUs of a run alone; call it before torch looks for GPUs."""
    from flatout.launch.launch_mode import visible_devices_env

    set_environment(visible_devices_env(environment(), gpus=config.gpus, on_cpu=config.device == "cpu"))


def progress_console() -> ConsoleCallback:
    """Return a console that shows progress on stderr, so that stdout has only the outcome."""
    from rich.console import Console

    from flatout.track.console import ConsoleCallback  # both lazy, so that --help stays instant

    return ConsoleCallback(Console(stderr=True))


def with_columns(read: Callable[[DataConfig], T], data: DataConfig, *, takes: bool) -> T:
    """Return what `read` makes of data; columns that it proposes are taken on a yes at a terminal, or with `takes`."""
    from flatout.config.data import SourceConfig  # lazy, as all that reads rows
    from flatout.data.rows.formats.advice import ColumnsError

    while True:
        try:
            return read(data)
        except ColumnsError as error:
            sources = [SourceConfig(**one) for one in error.fixes[0].settings["data.sources"]]
            pairs = zip(sources, data.sources, strict=True)
            mapped = next(new for new, old in pairs if new.columns != old.columns)
            message = ", ".join(f"{ours} is {theirs}" for ours, theirs in mapped.columns.items())
            message = printable(f"{mapped.path}: {message}")
            if not (takes or _agrees(f"Take columns of {message}? [Y/n] ")):
                error.fixes = (Fix({"--yes": True}, "builds with these columns"), *error.fixes)
                raise
            print(f"columns    {message}", flush=True)
            data = data.model_copy(update={"sources": sources})


def _agrees(question: str) -> bool:
    """Ask at a terminal, where Enter agrees; nobody agrees elsewhere."""
    is_asked = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    return is_asked and input(question).strip().lower() in ("", "y", "yes")


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def say(text: str) -> None:
    """Print a text, in 80 columns at a terminal."""
    print(wrapped(text, sys.stdout), flush=True)


def fitted(table: Sequence[Sequence[str]], texts: Iterable[int]) -> list[str]:
    """Return rows as `aligned` does; on a terminal, they fit its width: the columns `texts` give, then the ends."""
    if not sys.stdout.isatty():
        return aligned(table)
    width, widths = get_terminal_size().columns, [max(map(len, column)) for column in zip(*table, strict=True)]
    while sum(widths) + 2 * len(widths) - 2 > width and (wide := [one for one in texts if widths[one] > LEAST_TEXT]):
        widths[max(wide, key=widths.__getitem__)] -= 1

    def shortened(cell: str, room: int) -> str:
        """The ends of a name say more than its middle."""
        return cell if len(cell) <= room else f"{cell[: room // 2]}…{cell[len(cell) - (room - 1) // 2 :]}"

    lines = aligned([[*map(shortened, row, widths)] for row in table])
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def pairs_of(option: str, given: Iterable[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """Return what a repeatable option maps, such as `--column OURS=YOURS`. Raises UsageError for other words."""
    pairs = [word.partition("=") for word in given]
    if odd := ["".join(pair) for pair in pairs if not pair[1]]:
        end = "; without it, names for your columns are proposed" if form == COLUMN_FORM else ""
        raise UsageError(f"{option} {odd[0]!r}: write {form}{end}")
    return {name: value for name, _, value in pairs}
