"""Tool schemas, tool calls and their answers, in the forms that data sets use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.data.conversation import Message, ToolCall
from flatout.data.rows.formats.fields import FieldError, kind, list_at, object_at, optional_text, text_at, unpacked


def tools_of(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    """Return tool schemas in the form that templates expect: {"type": "function", "function": {...}}.

    `value` is a list or JSON text of one; null or an empty text means no tools. Bare functions are wrapped.
    """
    if value is None or value == "":
        return ()
    tools: list[Mapping[str, Any]] = []
    for index, item in enumerate(list_at(value, place)):
        tool = object_at(item, f"{place}[{index}]")
        inner = tool.get("function")
        function = inner if isinstance(inner, dict) else tool
        text_at(function.get("name"), f"{place}[{index}].name")
        tools.append({"type": "function", "function": tool} if function is tool else tool)
    return tuple(tools)


def calls_of(value: object, place: str) -> tuple[ToolCall, ...]:
    """Parse OpenAI's `tool_calls` list; null means no call."""
    if value is None:
        return ()
    return tuple(call_of(item, f"{place}[{index}]") for index, item in enumerate(list_at(value, place)))


def call_text(value: object, place: str) -> tuple[ToolCall, ...]:
    """Parse a call written as JSON text (or an object), or a list of parallel ones."""
    found = unpacked(value, place)
    if isinstance(found, list):
        return calls_of(found, place)
    return (call_of(found, place),)


def call_of(value: object, place: str) -> ToolCall:
    """Parse one call: {"name", "arguments"} or OpenAI's {"id", "function": {...}}; arguments may be JSON text."""
    outer = object_at(value, place)
    inner = outer.get("function")
    call = outer if inner is None else object_at(inner, f"{place}.function")
    for key in ("name", "arguments"):
        if call.get(key) is None:
            raise FieldError(f"{place}.{key} missing; keys: {', '.join(call)}")
    return ToolCall(
        name=text_at(call["name"], f"{place}.name"),
        arguments=object_at(call["arguments"], f"{place}.arguments"),
        call_id=optional_text(outer.get("id"), f"{place}.id"),
    )


def check_answers(messages: Sequence[Message], place: str) -> None:
    """Check that every tool message answers the assistant turn before it (other answers may be in between).

    With a tool_call_id it must name one of that turn's calls. Without one the turn is enough: many data sets write the
    call into the text. Raises FieldError with the turn.
    """
    caller: Message | None = None
    for index, message in enumerate(messages):
        if message.role != "tool":
            caller = message
            continue
        if caller is None or caller.role != "assistant":
            after = "at the start" if caller is None else f"after a {caller.role} turn"
            raise FieldError(
                f"{place}[{index}] is a tool result without a call ({after}); "
                "an assistant turn with tool_calls must come first"
            )
        call_id, ids = message.tool_call_id, [call.call_id for call in caller.tool_calls]
        if call_id not in (None, *ids) and None not in ids:
            calls = ", ".join(map(repr, ids)) or "none"
            raise FieldError(f"{place}[{index}].tool_call_id {call_id!r} answers no call; calls before it: {calls}")


def refuse_calls(value: object, role: str, place: str) -> None:
    """Raise FieldError if a turn other than an assistant's has tool calls."""
    if value:
        raise FieldError(f"{place} is {kind(value)} in a {role} turn; only an assistant turn has tool calls")
