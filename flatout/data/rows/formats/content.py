"""What a turn holds besides its role: tool calls and results, flags of loss, and content in typed parts."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from flatout.data.conversation import PICTURE, Message, PictureSource, ToolCall
from flatout.data.rows.formats.fields import (
    FieldError,
    Row,
    SourceOptions,
    flag_at,
    kind,
    list_at,
    object_at,
    optional_text,
    refused,
    text_at,
    unpacked,
)
from flatout.data.rows.formats.pictures import (
    PICTURE_KEYS,
    PICTURE_PARTS,
    holds_something,
    media_error,
    media_kind,
    picture_of_part,
)
from flatout.errors import Fix

Span = tuple[int, int]
TRAIN_KEYS = (
    "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "weight"
)  # fmt: skip
"""Flags of a turn that are true where it carries loss: Axolotl's, tinker's, ms-swift's, LLaMA-Factory's, OpenAI's."""
_MEANINGS = dict.fromkeys(TRAIN_KEYS, "train") | dict.fromkeys(("train_detail", "training_detail"), "train_detail")
# whole numbers under these names say where a turn stands, so 0 and 1 are no flags
_NUMBERING = re.compile(
    r"(?:.*_)?(?:id|ids|index|idx|turn|step|position|order|rank|round|time|timestamp|date|num|number)"
)
# a documented fact about a tool's result, which says nothing about loss
_FACTS = {"is_error"}
# what a flag that is not known may mean, and why one would set it so
_WAYS = {"ignored": "says nothing of loss", "train": "true: loss", "masked": "true: no loss"}
# the order in which all templates write the parts of a turn; another order cannot be rendered
_ORDER = {"tool_result": 0, "reasoning": 0, "text": 1, "picture": 1, "tool_call": 2}
_NAMES = {
    "reasoning": "reasoning", "thinking": "reasoning", "text": "text", "input_text": "text", "output_text": "text",
    "tool_call": "tool_call", "tool_use": "tool_call", "tool_result": "tool_result",
    **dict.fromkeys(PICTURE_PARTS, "picture"),
}  # fmt: skip
_TEXTS = ("value", "text", "thinking", "reasoning")
_READ = {*_TEXTS, "type", "id", "name", "input", "tool_use_id", "content", "tool_call", "detail", *PICTURE_KEYS}


def tools_of(row: Row) -> tuple[Mapping[str, Any], ...]:
    """Return tool schemas in the form that templates expect: {"type": "function", "function": {...}}.

    The column `tools` (`functions` in OpenAI's old form) is a list or JSON text of one; null or an empty text means no
    tools. Bare functions are wrapped, and Anthropic's `input_schema` is named `parameters`.
    """
    names = [name for column in ("tools", "functions") if (name := row.first([column]))]
    if len(names) > 1:
        raise FieldError(f"{' and '.join(names)} both list tools; keep one")
    if not names and (outer := next((value for value in row.columns.values() if holds_messages(value)), None)):
        return tools_of(Row(outer)) if outer.get("tools") else ()
    return _wrapped(list_at(row.columns[names[0]], names[0]), names[0]) if names else ()


def holds_messages(value: object) -> bool:
    """Whether a column is an object with a chat and its tools, as OpenAI's `input` is."""
    return isinstance(value, dict) and isinstance(value.get("messages"), list) and bool(value["messages"])


def _wrapped(functions: Iterable[object], place: str) -> tuple[Mapping[str, Any], ...]:
    tools: list[Mapping[str, Any]] = []
    for index, item in enumerate(functions):
        tool = object_at(item, f"{place}[{index}]")
        inner = tool.get("function")
        function = inner if isinstance(inner, dict) else tool
        text_at(function.get("name"), f"{place}[{index}].name")
        if function is tool and "input_schema" in tool:
            function = {("parameters" if key == "input_schema" else key): value for key, value in tool.items()}
        tools.append(tool if function is inner else {"type": "function", "function": function})
    return tuple(tools)


def calls_of(value: object, place: str) -> tuple[ToolCall, ...]:
    """Parse a call, or a list of parallel ones; either may be JSON text."""
    calls = unpacked(value, place)
    if isinstance(calls, list):
        return tuple(call_of(item, f"{place}[{index}]") for index, item in enumerate(calls))
    return (call_of(calls, place),)


def call_of(value: object, place: str) -> ToolCall:
    """Parse one call: {"name", "arguments"}, OpenAI's {"id", "function": {...}}, or Llama Stack's {"call_id",
    "tool_name", "arguments"}.
    """
    outer = object_at(value, place)
    inner = outer.get("function")
    call = outer if inner is None else object_at(inner, f"{place}.function")
    name_key = "tool_name" if call.get("name") is None and call.get("tool_name") is not None else "name"
    for key in (name_key, "arguments"):
        if call.get(key) is None:
            raise FieldError(f"{place}.{key} missing; keys: {', '.join(call)}")
    id_key = "call_id" if outer.get("id") is None and outer.get("call_id") is not None else "id"
    return ToolCall(
        name=text_at(call[name_key], f"{place}.{name_key}"),
        arguments=_arguments_at(call["arguments"], f"{place}.arguments"),
        call_id=optional_text(outer.get(id_key), f"{place}.{id_key}"),
    )


def _arguments_at(value: object, place: str) -> dict[str, Any]:
    """Return a call's arguments: an object, JSON text of one, JSON text of such a text, or an empty text for none."""
    for _ in range(2):
        if isinstance(value, str) and not value.strip():
            return {}
        value = unpacked(value, place)
    return object_at(value, place) if not isinstance(value, str) or value.strip() else {}


def check_answers(messages: Sequence[Message], places: Sequence[str]) -> None:
    """Check that every tool message answers the assistant turn before it (other answers may be in between).

    With a tool_call_id it must name one of that turn's calls. Without one the turn is enough: many data sets write the
    call into the text. Raises FieldError with the turn.
    """
    caller: Message | None = None
    for message, place in zip(messages, places, strict=True):
        if message.role != "tool":
            caller = message
            continue
        if caller is None or caller.role != "assistant":
            after = "at the start" if caller is None else f"after a {caller.role} turn"
            raise FieldError(f"{place} is a tool result without a call ({after}); add the assistant turn that calls it")
        call_id, ids = message.tool_call_id, [call.call_id for call in caller.tool_calls]
        if call_id not in (None, *ids) and None not in ids:
            calls = ", ".join(map(repr, ids)) or "none"
            raise FieldError(f"{place}.tool_call_id {call_id!r} matches no call; calls before it: {calls}")


def in_call_order(messages: list[Message]) -> list[Message]:
    """Return the messages with the results of parallel calls in the order of the calls, where ids prove it.

    The list itself comes back if nothing is to be moved. Many templates write results without their ids, so that only
    the order says which call one answers.
    """
    ordered = messages
    for index, caller in enumerate(messages):
        order = {call.call_id: place for place, call in enumerate(caller.tool_calls)}
        if len(caller.tool_calls) < 2 or None in order or len(order) < len(caller.tool_calls):
            continue
        end = index + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        places = [order.get(result.tool_call_id, -1) for result in messages[index + 1 : end]]
        if -1 not in places and len(set(places)) == len(places) and places != sorted(places):
            results = sorted(messages[index + 1 : end], key=lambda result: order[result.tool_call_id])
            ordered = [*ordered[: index + 1], *results, *ordered[end:]]
    return ordered


def turn_flags(
    turn: Mapping[str, Any], place: str, options: SourceOptions, read: Container[str], remarks: dict[str, None]
) -> tuple[bool | None, list[tuple[Span, bool]] | None]:
    """Read the keys of a turn, a part or a segment that are not in `read`.

    Returns whether it carries loss (None: not said) and its character ranges with their flags (None: not given). A key
    that is not known goes into `remarks` as `key:NAME`. Raises FieldError for media, for flags that differ, and for an
    unknown key whose value is true, false, 0 or 1, as it may be a flag.
    """
    flags, ranges, unclear = dict[str, bool](), None, list[str]()
    for key, value in turn.items():
        if value is None or key in read:
            continue
        meaning, here = options.keys.get(key) or _MEANINGS.get(key), f"{place}.{key}"
        if meaning == "train_detail":
            ranges = _ranges(value, here)
        elif meaning == "train" or meaning == "masked":
            flags[key] = flag_at(value, here) == (meaning == "train")
        else:
            if meaning is None and (media := media_kind(key)) and holds_something(value):
                raise FieldError(media_error(here, media))
            if meaning is None and _may_be_flag(key, value):
                unclear.append(key)
            remarks[f"key:{key if key.isprintable() and len(key) < 100 else ascii(key)[:100]}"] = None
    if unclear:
        said = f"{place}.{unclear[0]} is {kind(turn[unclear[0]])}, which may say whether the turn carries loss"
        raise refused(said, options, *(Fix({"keys": dict.fromkeys(unclear, way)}, why) for way, why in _WAYS.items()))
    if len(set(flags.values())) > 1:
        raise FieldError(f"{place} has {' and '.join(flags)} with different values; keep one")
    return next(iter(flags.values()), None), ranges


def _may_be_flag(key: str, value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return key not in _FACTS
    return isinstance(value, int | float) and value in (0, 1) and not _NUMBERING.fullmatch(key)


def _ranges(value: object, place: str) -> list[tuple[Span, bool]]:
    """Read Axolotl's ranges: begin_offset and end_offset of characters, both included, and train."""
    ranges = []
    for index, item in enumerate(list_at(value, place)):
        here = f"{place}[{index}]"
        detail = object_at(item, here)
        for name in ("begin_offset", "end_offset"):
            if type(detail.get(name)) is not int:
                raise FieldError(f"{here}.{name} is {kind(detail.get(name))}, not an integer")
        span = detail["begin_offset"], detail["end_offset"] + 1
        ranges.append((span, flag_at(detail.get("train"), f"{here}.train")))
    return ranges


def silent_spans(ranges: Sequence[tuple[Span, bool]], text: str, place: str) -> tuple[Span, ...]:
    """Return the characters of `text` outside the ranges that carry loss, ascending.

    Raises FieldError for ranges that overlap or go beyond the text.
    """
    end, ranges = 0, sorted(ranges)
    for (first, after), _ in ranges:
        if first < end or after <= first:
            raise FieldError(f"{place}: the range {first} to {after - 1} is empty or overlaps another; correct it")
        if after > len(text):
            last = f"whose last character has offset {len(text) - 1}"
            raise FieldError(f"{place}: end_offset {after - 1} is beyond the text, {last} (end_offset is included)")
        end = after
    edges = [0, *chain(*(span for span, is_trained in ranges if is_trained)), len(text)]
    return tuple(span for span in zip(edges[::2], edges[1::2], strict=True) if span[0] < span[1])


@dataclass(slots=True)
class Content:
    """What a turn says."""

    text: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    results: list[tuple[str | None, str | None, str]] = field(default_factory=list)
    """Call id, name and text of each tool result."""
    silent: tuple[Span, ...] = ()
    """The ranges of `text` without loss."""
    is_trained: bool = False
    """Whether a part of the turn asks for loss."""
    pictures: tuple[PictureSource, ...] = ()


def read_parts(parts: list[Any], place: str, role: str, options: SourceOptions, remarks: dict[str, None]) -> Content:
    """Read typed parts, as OpenAI, TRL and Anthropic have them; texts are joined without a separator.

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
            text = text_at(_first(part, _TEXTS), f"{here}.{name}")
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


def _first(part: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _name_of(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise FieldError(f"{place} is {kind(part)}, not an object with type and text")
    part_type = part.get("type")
    if (name := _NAMES.get(str(part_type))) is None:
        if media := media_kind(str(part_type).removeprefix("input_")):
            raise FieldError(media_error(f"{place} ({part_type})", media))
        raise FieldError(f"{place}.type {part_type!r} cannot be trained on; text, image, reasoning and tool_call can")
    return name


def _calls(part: Mapping[str, Any], place: str) -> tuple[ToolCall, ...]:
    if part["type"] == "tool_call":
        return calls_of(_first(part, ("value", "tool_call", "text")), place)
    if part.get("input") is None:
        raise FieldError(f"{place}.input missing; keys: {', '.join(part)}")
    name, call_id = text_at(part.get("name"), f"{place}.name"), optional_text(part.get("id"), f"{place}.id")
    return (ToolCall(name, _arguments_at(part["input"], f"{place}.input"), call_id),)


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
