"""What verbs have in common: rows of 80 columns, quick imports, and no progress bars of other libraries."""

from __future__ import annotations

import gc
import sys
import textwrap
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from flatout.environment import require_docstrings
from flatout.io.redact import printable

WIDTH = 80
_NAME_WIDTH = 18


def rows(pairs: Iterable[tuple[str, str]], name_width: int = _NAME_WIDTH) -> str:
    """Format one line per pair, names in a column of `name_width`; long texts wrap within their column.

    Words are never broken, so that a long path can still be copied.
    """
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * name_width, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(printable(f"{name:<{name_width - 1}} {text}")) for name, text in pairs)


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
    """Import torch and transformers, without progress bars for loading and writing weights."""
    import_without_gc("transformers.modeling_utils")
    quiet_transformers()


def quiet_transformers() -> None:
    """Switch off transformers' progress bars for loading and writing weights, in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def run_folder(name: str) -> Path:
    """Return the folder of a run that an argument names. Raises UsageError as `find_run` does."""
    from flatout.view.open_runs import find_run  # lazy, so that --help stays instant

    return find_run(name)


def model_target(name: str) -> str:
    """Return the folder or hub id of a model that an argument names. Raises UsageError as `find_model` does."""
    from flatout.view.open_runs import find_model  # lazy, as above

    return find_model(name)
