"""What verbs have in common on a terminal: rows of 80 columns, and no progress bars of other libraries."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 80
_NAME_WIDTH = 18


def rows(pairs: Iterable[tuple[str, str]], name_width: int = _NAME_WIDTH) -> str:
    """Format one line per pair, names in a column of `name_width`; long texts wrap within their column.

    Words are never broken, so that a long path can still be copied.
    """
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * name_width, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(f"{name:<{name_width - 1}} {text}") for name, text in pairs)


def quiet_transformers() -> None:
    """Switch off transformers' progress bars for loading and writing weights, in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
