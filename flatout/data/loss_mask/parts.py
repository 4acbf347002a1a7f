"""Finds the parts of a row in its rendered text, which of them the template left out, and its generation marks.

A part is text from the data that a template has to show: a message's text, its reasoning, a call's name and arguments,
a tool's name. The row is rendered again with each part between two private-use characters. If removing them gives the
first rendering, every span is exact, and a part whose marks are missing was left out. Plain rows with the same roles
and fields (a shape) share the text around their parts, so marks are rendered once per shape, not per row.

A template's own `{% generation %}` marks are made visible in the same way, which gives the ranges with loss exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from flatout.data.conversation import PICTURE
from flatout.data.loss_mask.turns import PROBES, Rendering, Span, UnprovenMaskError
from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate, RawMessage
from flatout.errors import DataError

Kind = Literal["text", "reasoning", "tool call", "tools", "other", "cut"]
Part = tuple[int, Kind]
"""Turn (-1 for the tools column) and kind. `other` is marked only because it contains a control token; `cut` is a text
or reasoning of which the template shows only a part."""
# private-use characters: for the two generation marks, which no row may hold, and around a part and its number
BEGIN, END = "\U000f5a01", "\U000f5a02"
_OPEN, _THEN, _CLOSE = "\U000f5a03", "\U000f5a04", "\U000f5a05"
_TAG = re.compile(
    r"(?P<indent>^[ \t]*)?\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}(?P<newline>\n?)", re.M
)
_SIGNS = re.compile(f"({_OPEN}\\d+{_THEN}|[{_CLOSE}{BEGIN}{END}])")
_RESERVED = re.compile(f"[{BEGIN}-{_CLOSE}]")
_REASONING = "reasoning_content"
_PLAIN_KEYS = {"role", "content", _REASONING, "thinking"}
_MAX_SHAPES = 4096


@dataclass(frozen=True, slots=True)
class PartSpans:
    """`spans` are (turn, start, end) of all parts in a rendered text, ascending; `lost` the parts that are not in it.

    The turn is -1 if a part is not from a turn, or is repeated. `marked` are the ranges inside `{% generation %}`
    marks, empty without such marks.
    """

    spans: tuple[tuple[int, int, int], ...]
    lost: tuple[Part, ...]
    marked: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a template writes around the parts: literals[i] precedes part order[i], literals[-1] follows the last part.

    `signs` are generation marks: (literal, offset in it, whether it begins a range); `given` are the parts' texts.
    """

    literals: list[str]
    order: list[int]
    parts: list[Part]
    signs: list[tuple[int, int, bool]]
    given: list[str]

    def cut(self, texts: Sequence[str]) -> list[Part]:
        """Return the parts that are in no place of the rendering whole; `texts` are what stands in their places."""
        whole = {part for part, text in zip(self.order, texts, strict=True) if _holds(text, self.given[part])}
        return [(self.parts[part][0], "cut") for part in dict.fromkeys(self.order) if
                part not in whole and self.parts[part][1] in ("text", "reasoning")]  # fmt: skip

    def fit(self, texts: Sequence[str], rendered: str) -> PartSpans | None:
        """Return the layout of `rendered` if it has `texts` as its parts, and is equal elsewhere."""
        pieces = [""] * (2 * len(texts) + 1)
        pieces[::2], pieces[1::2] = self.literals, texts
        if "".join(pieces) != rendered:
            return None
        starts = [0, *accumulate(map(len, pieces))]
        spans, seen = [], set[int]()
        for index, part in enumerate(self.order):
            turn = -1 if part in seen else self.parts[part][0]  # a template may repeat a call's name
            seen.add(part)
            spans.append((turn, starts[2 * index + 1], starts[2 * index + 2]))
        lost = tuple(part for index, part in enumerate(self.parts) if index not in seen)
        marked = paired((starts[2 * literal] + offset, begins) for literal, offset, begins in self.signs)
        return PartSpans(tuple(spans), lost, marked)


def _holds(rendered: str, text: str) -> bool:
    """Return whether a rendering has a text whole, up to white space, or written as JSON text."""
    if text in rendered:
        return True
    squeezed = "".join(rendered.split())
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any("".join(form.split()) in squeezed for form in forms)


class PartFinder:
    """Finds the parts of rows of one template; `marked_source` is the template with visible generation marks."""

    def __init__(self, template: ChatTemplate, marked_source: str | None, control: re.Pattern[str] | None) -> None:
        self._template, self._source, self._control = template, marked_source, control
        self._shapes: dict[tuple[tuple[str, bool], ...], tuple[_Shape, list[str]] | None] = {}

    def find(self, rendering: Rendering) -> PartSpans | None:
        """Return the layout of a row; None if the template processes the text of a part, so that marks change the rest.

        Raises UnprovenMaskError for nested generation marks.
        """
        messages, text = rendering.messages, rendering.text
        if not text.isascii() and _RESERVED.search(text):
            return None
        # plain rows have only non-empty texts, none of which contains another part
        is_plain = not rendering.tools and all(
            message.keys() <= _PLAIN_KEYS
            and all(map(str.strip, message.values()))
            and "</think>" not in message["content"]
            for message in messages
        )
        layout = None
        if is_plain:
            key = tuple((str(message["role"]), _REASONING in message) for message in messages)
            if key not in self._shapes:
                if len(self._shapes) >= _MAX_SHAPES:
                    self._shapes.clear()
                probes = [message | dict.fromkeys(message.keys() - {"role"}, PROBES[0]) for message in messages]
                self._shapes[key] = self._rendered(probes, ())
            if shapes := self._shapes[key]:
                given = [message[name] for message in messages for name in (_REASONING, "content") if name in message]
                texts = [given[part] for part in shapes[0].order]
                # many templates trim
                layout = shapes[0].fit(texts, text) or shapes[0].fit([text.strip() for text in texts], text)
        if layout is None and (shapes := self._rendered(messages, rendering.tools)):
            layout = shapes[0].fit(shapes[1], text)
            if layout is not None and (cut := shapes[0].cut(shapes[1])):
                layout = replace(layout, lost=(*layout.lost, *cut))
        # a template may write a tool's result inside the turn that called it, but turns begin in order
        turns = list(dict.fromkeys(turn for turn, _, _ in layout.spans if turn >= 0)) if layout else []
        return layout if turns == sorted(turns) else None

    def lost(self, rendering: Rendering) -> Iterator[Part]:
        """Yield the parts that the rendered text lacks, or cuts; this renders once per part.

        A part is lacking if replacing it does not change the text, and cut if the text does not hold it whole.
        """
        messages, tools = rendering.messages, rendering.tools
        original = _Marked(messages, tools, None, replaced=-1)
        for index, (part, given) in enumerate(zip(original.parts, original.texts, strict=True)):
            marked = _Marked(messages, tools, None, replaced=index)
            try:
                if self._template.render(marked.messages, marked.tools) == rendering.text:
                    yield part
                    continue
            except RENDER_ERRORS:
                pass  # the template needs this part
            if part[1] in ("text", "reasoning") and not _holds(rendering.text, given):
                yield part[0], "cut"

    def _rendered(
        self, messages: Sequence[RawMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[_Shape, list[str]] | None:
        marked = _Marked(messages, tools, self._control)
        try:
            text = self._template.render(marked.messages, marked.tools, source=self._source)
        except RENDER_ERRORS:
            return None
        literals, texts, order, signs = [""], list[str](), list[int](), list[tuple[int, int, bool]]()
        inside = False
        for piece in _SIGNS.split(text):
            if piece.startswith(_OPEN) or piece in (_CLOSE, BEGIN, END):
                if inside != (piece == _CLOSE):
                    return None  # the template changed or split the part
                if piece in (BEGIN, END):
                    signs.append((len(literals) - 1, len(literals[-1]), piece == BEGIN))
                    continue
                inside = not inside
                order += [int(piece[1:-1])] if inside else []
                (texts if inside else literals).append("")
            else:
                (texts if inside else literals)[-1] += piece
        return None if inside else (_Shape(literals, order, marked.parts, signs, marked.texts), texts)


class _Marked:
    """A row with its parts between marks, or with one of them replaced by a probe.

    `parts` are in their order, and `texts` what they say, without white space around it.
    """

    def __init__(
        self,
        messages: Sequence[RawMessage],
        tools: Sequence[Mapping[str, Any]],
        control: re.Pattern[str] | None,
        replaced: int | None = None,
    ) -> None:
        self._control, self._replaced = control, replaced
        self.parts: list[Part] = []
        self.texts: list[str] = []
        self.messages = [self._message(message, turn) for turn, message in enumerate(messages)]
        self.tools = [self._function(tool, -1, "tools") for tool in tools]

    def _message(self, message: RawMessage, turn: int) -> RawMessage:
        marked: RawMessage = {"role": message["role"]}
        if _REASONING in message:
            # two names for one text: see templates.template
            marked[_REASONING] = marked["thinking"] = self._part(message[_REASONING], turn, "reasoning")
        content = message["content"]
        head, close, answer = content.partition("</think>") if message["role"] == "assistant" else ("", "", "")
        if not close:
            # what the template writes around a picture is no text of the row
            marked["content"] = PICTURE.join(self._part(text, turn, "text") for text in content.split(PICTURE))
        else:  # reasoning inside the text; what stands before it is text too
            intro, opened, thought = head.partition("<think>") if "<think>" in head else ("", "", head)
            pieces = (self._part(intro, turn, "cut"), opened, self._part(thought, turn, "reasoning"), close)
            marked["content"] = "".join((*pieces, self._part(answer, turn, "text")))
        for name, value in message.items():
            if name == "tool_calls":
                marked[name] = [self._function(call, turn, "tool call") for call in value]
            elif name not in marked:
                marked[name] = self._leaves(value, turn, "other")
        return marked

    def _function(self, outer: Mapping[str, Any], turn: int, kind: Kind) -> dict[str, Any]:
        """Mark a tool or a call. A template must show only the name of a tool, but everything in a call."""
        function = {
            name: self._leaves(value, turn, kind if kind == "tool call" or name == "name" else "other")
            for name, value in outer["function"].items()
        }
        return {name: self._leaves(value, turn, "other") for name, value in outer.items()} | {"function": function}

    def _leaves(self, value: Any, turn: int, kind: Kind) -> Any:
        if isinstance(value, str):
            return self._part(value, turn, kind)
        if isinstance(value, Mapping):
            return {name: self._leaves(item, turn, kind) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._leaves(item, turn, kind) for item in value]
        return value

    def _part(self, text: str, turn: int, kind: Kind) -> str:
        inner = text.strip()  # white space stays outside the marks: a template may trim it
        if not inner or (kind == "other" and not (self._control and self._control.search(text))):
            return text
        self.parts.append((turn, kind))
        self.texts.append(inner)
        number = len(self.parts) - 1
        if self._replaced is not None:
            return PROBES[0] if number == self._replaced else text
        start = text.index(inner)
        return f"{text[:start]}{_OPEN}{number}{_THEN}{inner}{_CLOSE}{text[start + len(inner) :]}"


def with_visible_marks(template: ChatTemplate) -> str | None:
    """Return the template with each `{% generation %}` mark replaced by printing one character; None without marks.

    White space around the tags follows the rules that transformers sets (trim_blocks, lstrip_blocks), so that the text
    without the two characters is the plain rendering; marked_spans checks that for every row.
    """

    def print_mark(tag: re.Match[str]) -> str:
        before = (tag["indent"] or "") if tag["left"] else ""
        after = tag["newline"] if tag["right"] else ""
        left, right = tag["left"].replace("+", ""), tag["right"].replace("+", "")
        return f"{before}{{{{{left} '{END if tag['end'] else BEGIN}' {right}}}}}{after}"

    source = _TAG.sub(print_mark, template.source)
    if source == template.source:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = template.render(turns, source=source)
    except RENDER_ERRORS as error:
        raise DataError(f"chat template {template.name!r}: its generation marks cannot be read: {error}") from error
    return source if BEGIN in text else None  # a mark may stand in a comment, or in a branch that is never reached


def marked_spans(template: ChatTemplate, marked_source: str, rendering: Rendering) -> tuple[Span, ...]:
    """Return the marked character ranges of a row. Raises UnprovenMaskError if marks are nested or change the text."""
    if BEGIN in rendering.text or END in rendering.text:
        raise UnprovenMaskError("the row contains the private-use character U+F5A01 or U+F5A02; remove it")
    marked = template.render(rendering.messages, rendering.tools, source=marked_source)
    pieces = re.split(f"([{BEGIN}{END}])", marked)
    if "".join(pieces[::2]) != rendering.text:
        raise UnprovenMaskError("its text changes when its generation marks are made visible; remove the marks")
    ends = accumulate(map(len, pieces[::2]))
    return paired((end, mark == BEGIN) for end, mark in zip(ends, pieces[1::2], strict=False))


def paired(marks: Iterable[tuple[int, bool]]) -> tuple[Span, ...]:
    """Return the ranges between marks (position, whether it begins a range). Raises UnprovenMaskError if nested."""
    spans, begin = [], -1
    for position, begins in marks:
        if begins == (begin >= 0):
            raise UnprovenMaskError("its generation marks are nested")
        if not begins and begin < position:
            spans.append((begin, position))
        begin = position if begins else -1
    return tuple(spans)
