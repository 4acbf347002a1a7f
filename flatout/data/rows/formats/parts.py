"""Content that is a list of typed parts: OpenAI's, TRL's and Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.data.conversation import PICTURE, PictureSource, ToolCall
from flatout.data.rows.formats.calls import arguments_at, calls_of
from flatout.data.rows.formats.fields import FieldError, SourceOptions, kind, optional_text, text_at
from flatout.data.rows.formats.pictures import PICTURE_KEYS, PICTURE_PARTS, picture_of_part
from flatout.data.rows.formats.turn_flags import Span, media_error, media_kind, turn_flags

# the order in which all templates write the parts of a turn; another order cannot be rendered
_ORDER = {"tool_result": 0, "reasoning": 0, "text": 1, "picture": 1, "tool_call": 2}
_NAMES = {
    "reasoning": "reasoning", "thinking": "reasoning", "text": "text", "input_text": "text", "output_text": "text",
    "tool_call": "tool_call", "tool_use": "tool_call", "tool_result": "tool_result",
    **dict.fromkeys(PICTURE_PARTS, "picture"),
}  # fmt: skip
_READ = {
    "type", "value", "text", "thinking", "reasoning", "id", "name", "input", "tool_use_id", "content", "tool_call",
    "detail", *PICTURE_KEYS,
}  # fmt: skip


@dataclass(slots=True)
class Content:
    """What a turn says: `results` are (id, name, text) of tools, and `silent` the ranges of `text` without loss.

    `is_trained` is whether a part of the turn asks for loss.
    """

    text: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    results: list[tuple[str | None, str | None, str]] = field(default_factory=list)
    silent: tuple[Span, ...] = ()
    is_trained: bool = False
    pictures: tuple[PictureSource, ...] = ()


def read_parts(parts: list[Any], place: str, role: str, options: SourceOptions, remarks: dict[str, None]) -> Content:
    """Read typed parts; texts are joined without a separator.

    Raises FieldError for other kinds, for media, and for an order that no template writes.
    """
    if not parts:
        raise FieldError(f"{place} is an empty list, not a string")
    content, thoughts, last = Content(), list[str](), 0
    flags: list[tuple[Span, bool | None]] = []
    for index, part in enumerate(parts):
        here = f"{place}[{index}]"
        name = _name_of(part, here)
        if _ORDER[name] < last:
            order = "tool results, then text" if name == "tool_result" else "reasoning, then text, then tool calls"
            raise FieldError(f"{here} ({name}) is out of order; parts must be {order}")
        last = _ORDER[name]
        train, ranges = turn_flags(part, here, options, _READ, remarks) if len(part) > 2 else (None, None)
        if ranges is not None or (train is not None and name != "text"):
            raise FieldError(f"{here} says what carries loss; only texts may, each as a whole")
        if name == "tool_result":
            content.results.append(_result(part, here))
        elif name == "tool_call":
            content.calls += _calls(part, here)
        elif name == "picture":
            if role == "assistant":
                raise FieldError(f"{here} is a picture, but a model that is trained here writes none; remove it")
            content.pictures += (picture_of_part(part, here),)
            content.text += PICTURE
        else:
            value = next(
                (part[key] for key in ("value", "text", "thinking", "reasoning") if part.get(key) is not None), None
            )
            text = text_at(value, f"{here}.{name}")
            if name == "reasoning":
                thoughts.append(text)
                continue
            flags.append(((len(content.text), len(content.text) + len(text)), train))
            content.text += text
    content.reasoning = "".join(thoughts) if thoughts else None
    content.is_trained = any(train for _, train in flags)
    is_silent = content.is_trained and role != "assistant"  # texts of other turns carry loss only where they ask for it
    content.silent = tuple(span for span, train in flags if span[0] < span[1] and train in (False, *[None] * is_silent))
    return content


def _name_of(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise FieldError(f"{place} is {kind(part)}, not an object with type and text")
    part_type = part.get("type")
    if (name := _NAMES.get(str(part_type))) is None:
        if media := media_kind(str(part_type).removeprefix("input_")):
            raise FieldError(media_error(f"{place} ({part_type})", media))
        raise FieldError(
            f"{place}.type {part_type!r} cannot be trained on; only text, image, reasoning and tool_call parts can"
        )
    return name


def _calls(part: Mapping[str, Any], place: str) -> tuple[ToolCall, ...]:
    if part["type"] == "tool_call":
        return calls_of(
            next((part[key] for key in ("value", "tool_call", "text") if part.get(key) is not None), None), place
        )
    if part.get("input") is None:
        raise FieldError(f"{place}.input missing; keys: {', '.join(part)}")
    arguments = arguments_at(part["input"], f"{place}.input")
    return (
        ToolCall(text_at(part.get("name"), f"{place}.name"), arguments, optional_text(part.get("id"), f"{place}.id")),
    )


def _result(part: Mapping[str, Any], place: str) -> tuple[str | None, str | None, str]:
    """Return id, name and text of Anthropic's tool_result: its content is a text, a list of text parts, or absent."""
    value = part.get("content")
    if isinstance(value, list):
        texts = []
        for index, item in enumerate(value):
            here = f"{place}.content[{index}]"
            if _name_of(item, here) != "text":
                raise FieldError(f"{here} is not a text; a tool's result is text")
            texts.append(text_at(item.get("text"), f"{here}.text"))
        value = "".join(texts)
    text = "" if value is None else text_at(value, f"{place}.content")
    call_id, name = (optional_text(part.get(key), f"{place}.{key}") for key in ("tool_use_id", "name"))
    return call_id, name, text
