"""Masks from a template's `{% generation %}` marks, exact to the character."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate

from flatout.data.loss_mask.turns import Rendering
from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate
from flatout.errors import DataError

# Private-use characters that replace the two marks in the rendered text; a row that contains one is refused.
BEGIN, END = "\U000f5a01", "\U000f5a02"
_TAG = re.compile(
    r"(?P<indent>^[ \t]*)?\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}(?P<newline>\n?)", re.M
)


class MarkError(ValueError):
    """The marks of a template do not give a valid mask."""


def with_visible_marks(template: ChatTemplate) -> str | None:
    """Return the template with each mark replaced by printing one character; None if no mark is ever reached.

    White space around the tags follows the rules that transformers sets (trim_blocks, lstrip_blocks), so that the text
    without the two characters is the plain rendering; marked_spans checks that for every row.
    """

    def print_mark(tag: re.Match[str]) -> str:
        before = (tag["indent"] or "") if tag["left"] else ""
        after = tag["newline"] if tag["right"] else ""
        left, right = tag["left"].replace("+", ""), tag["right"].replace("+", "")
        return f"{before}{{{{{left} '{END if tag['end'] else BEGIN}' {right}}}}}{after}"

    source = _TAG.sub(print_mark, template.source)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = template.render(turns, source=source)
    except RENDER_ERRORS as error:
        raise DataError(f"chat template {template.name!r}: its generation marks cannot be read: {error}") from error
    return source if BEGIN in text else None


def marked_spans(template: ChatTemplate, marked_source: str, rendering: Rendering) -> tuple[tuple[int, int], ...]:
    """Return the marked character ranges of a row. Raises MarkError if marks are nested or change the text."""
    if BEGIN in rendering.text or END in rendering.text:
        raise MarkError("the row holds the private-use characters U+F5A01 or U+F5A02; remove them")
    marked = template.render(rendering.messages, rendering.tools, source=marked_source)
    pieces = re.split(f"([{BEGIN}{END}])", marked)
    if "".join(pieces[::2]) != rendering.text:
        raise MarkError("the text changes when its generation marks are made visible; remove the marks")
    ends = accumulate(map(len, pieces[::2]))
    return paired((end, mark == BEGIN) for end, mark in zip(ends, pieces[1::2], strict=False))


def paired(marks: Iterable[tuple[int, bool]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges between marks (position, whether it begins a range). Raises MarkError for nested ranges."""
    spans, begin = [], -1
    for position, begins in marks:
        if begins == (begin >= 0):
            raise MarkError("its generation marks are nested")
        if not begins and begin < position:
            spans.append((begin, position))
        begin = position if begins else -1
    return tuple(spans)
