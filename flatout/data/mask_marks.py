"""Masks from a template's `{% generation %}` marks, exact to the character."""

from __future__ import annotations

import re

from flatout.data.mask_turns import Row
from flatout.data.template import RENDER_ERRORS, ChatTemplate
from flatout.errors import DataError

# Private-use characters that stand for the two marks in the rendered text; a row that holds one is refused.
_BEGIN, _END = "\U000f5a01", "\U000f5a02"
_TAG = re.compile(
    r"(?P<indent>^[ \t]*)?\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}(?P<newline>\n?)", re.M
)


class MarkError(ValueError):
    """The marks of a template do not give a mask."""


def with_visible_marks(template: ChatTemplate) -> str | None:
    """The template with each mark replaced by the printing of one character; None when no mark is ever reached.

    White space around the tags follows the rules that transformers sets (trim_blocks, lstrip_blocks), so that the
    text without the two characters is the plain rendering; marked_spans proves that for every row.
    """
    source = _TAG.sub(_print_mark, template.source)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = template.render(turns, source=source)
    except RENDER_ERRORS as error:
        raise DataError(f"chat template {template.name!r}: its generation marks cannot be read: {error}") from error
    return source if _BEGIN in text else None


def marked_spans(template: ChatTemplate, marked_source: str, row: Row) -> tuple[tuple[int, int], ...]:
    """The marked character ranges of a row. Raises MarkError when they are not nested singly or change the text."""
    if _BEGIN in row.text or _END in row.text:
        raise MarkError("the row holds the private-use characters U+F5A01 or U+F5A02; remove them")
    marked = template.render(row.messages, row.tools, source=marked_source)
    pieces = re.split(f"([{_BEGIN}{_END}])", marked)
    if "".join(pieces[::2]) != row.text:
        raise MarkError("the text changes when its generation marks are made visible; remove the marks")
    spans, position, begin = [], 0, -1
    for piece in pieces:
        if piece == _BEGIN and begin < 0:
            begin = position
        elif piece == _END and begin >= 0:
            spans.append((begin, position))
            begin = -1
        elif piece in (_BEGIN, _END):
            raise MarkError("its generation marks are nested")
        else:
            position += len(piece)
    return tuple(span for span in spans if span[0] < span[1])


def _print_mark(tag: re.Match[str]) -> str:
    mark = _END if tag["end"] else _BEGIN
    before = (tag["indent"] or "") if tag["left"] else ""
    after = tag["newline"] if tag["right"] else ""
    left, right = tag["left"].replace("+", ""), tag["right"].replace("+", "")
    return f"{before}{{{{{left} '{mark}' {right}}}}}{after}"
