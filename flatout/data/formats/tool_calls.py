"""Tool schemas, tool calls and their answers, in the shapes data sets write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.data.conversation import Message, ToolCall
from flatout.data.formats.fields import FieldError, kind, list_at, object_at, optional_text, text_at, unpacked


def tools_of(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    """Tool schemas as templates expect them: {"type": "function", "function": {...}}; bare functions are wrapped.

    `value` is a list, JSON text of one, or null or an empty text for no tools.
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
    """OpenAI's `tool_calls` list; null is no call."""
    if value is None:
        return ()
    return tuple(call_of(item, f"{place}[{index}]") for index, item in enumerate(list_at(value, place)))


def call_text(value: object, place: str) -> tuple[ToolCall, ...]:
    """A call written as JSON text (or an object), or a list of parallel ones."""
    found = unpacked(value, place)
    if isinstance(found, list):
        return calls_of(found, place)
    return (call_of(found, place),)


def call_of(value: object, place: str) -> ToolCall:
    """One call: {"name", "arguments"} or OpenAI's {"id", "function": {...}}; arguments an object or its JSON text."""
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
    """Every tool message must answer the assistant turn before it (other answers may stand between).

    With a tool_call_id it must name one of that turn's calls. Without one the turn itself is enough: many data sets
    write the call into the text. Raises FieldError with the turn.
    """
    caller: Message | None = None
    for index, message in enumerate(messages):
        if message.role != "tool":
            caller = message
        else:
            _check_answer(message, caller, f"{place}[{index}]")


def _check_answer(answer: Message, caller: Message | None, place: str) -> None:
    if caller is None or caller.role != "assistant":
        after = "at the start" if caller is None else f"after a {caller.role} turn"
        raise FieldError(
            f"{place} is a tool result without a call ({after}); an assistant turn with tool_calls must come first"
        )
    ids = [call.call_id for call in caller.tool_calls]
    if answer.tool_call_id is not None and answer.tool_call_id not in ids and not (ids and None in ids):
        calls = ", ".join(repr(call_id) for call_id in ids) or "none"
        raise FieldError(f"{place}.tool_call_id {answer.tool_call_id!r} answers no call; calls before it: {calls}")


def refuse_calls(value: object, role: str, place: str) -> None:
    """Raises FieldError when a turn that is no assistant's has tool calls."""
    if value:
        raise FieldError(f"{place} is {kind(value)} in a {role} turn; only an assistant turn has tool calls")
