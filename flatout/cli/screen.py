"""Lines of a name and a text, for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 80


def rows(pairs: Iterable[tuple[str, str]], *, name_width: int = 18) -> str:
    """Format one line per pair, names in a column of `name_width`; long texts wrap within their column.

    Words are never broken, so that a long path can still be copied.
    """
    indent = " " * name_width
    return "\n".join(
        textwrap.fill(
            f"{name:<{name_width - 1}} {text}",
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in pairs
    )
