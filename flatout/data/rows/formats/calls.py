"""Tools, calls and results of the formats that have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatout.data.conversation import Message, ToolCall
from flatout.data.rows.formats.fields import FieldError, Row, list_at, object_at, optional_text, text_at, unpacked


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
    """Return functions with their envelope. Raises FieldError for one without a name."""
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
        arguments=arguments_at(call["arguments"], f"{place}.arguments"),
        call_id=optional_text(outer.get(id_key), f"{place}.{id_key}"),
    )


def arguments_at(value: object, place: str) -> dict[str, Any]:
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
            raise FieldError(
                f"{place} is a tool result without a call ({after}); an assistant turn with tool_calls must come first"
            )
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
        if len(caller.tool_calls) < 2:
            continue
        order = {call.call_id: place for place, call in enumerate(caller.tool_calls)}
        if None in order or len(order) < len(caller.tool_calls):
            continue
        end = index + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        ids = [result.tool_call_id for result in messages[index + 1 : end]]
        places = [order.get(call_id, -1) for call_id in ids]
        if -1 not in places and len(set(ids)) == len(ids) and places != sorted(places):
            results = sorted(messages[index + 1 : end], key=lambda result: order[result.tool_call_id])
            ordered = [*ordered[: index + 1], *results, *ordered[end:]]
    return ordered
