"""Lists of chat turns (OpenAI messages, ShareGPT, typed content parts) -> messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from flatout.data.conversation import Conversation, Message, Origin, Role, ToolCall, is_empty
from flatout.data.rows.formats.fields import (
    FieldError,
    Reading,
    flag_at,
    kind,
    list_at,
    optional_text,
    text_at,
    unpacked,
)
from flatout.data.rows.formats.roles import CALL, role_of
from flatout.data.rows.formats.tool_calls import call_of, call_text, calls_of, check_answers, refuse_calls, tools_of

T = TypeVar("T")
# fields of a turn that have several names in data sets
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FLAGS = ("train", "weight", "loss_weight")
CHAT_COLUMNS = ("messages", "conversations", "conversation")
# the order in which all templates write the parts of an assistant turn; another order cannot be rendered
_PART_ORDER = {"reasoning": 0, "text": 1, "tool_call": 2}
_PART_NAMES = {"reasoning": "reasoning", "thinking": "reasoning", "text": "text", "tool_call": "tool_call"}


def chat_column(row: Mapping[str, Any], reading: Reading) -> str | None:
    """Return the user's name of the row's column of turns, None if it has none."""
    names = (reading.name(column) for column in CHAT_COLUMNS)
    return next((name for name in names if row.get(name) is not None), None)


def parse_messages(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse OpenAI messages: role, content, tool_calls, ... in each turn; optional columns `tools`, `system`."""
    return _parse_chat(row, origin, reading, role_key=reading.name("role"), content_key=reading.name("content"))


def parse_sharegpt(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse ShareGPT: from and value in each turn; optional columns `tools`, `system`."""
    return _parse_chat(row, origin, reading, role_key=reading.name("from"), content_key=reading.name("value"))


def _parse_chat(
    row: Mapping[str, Any], origin: Origin, reading: Reading, role_key: str, content_key: str
) -> Conversation:
    column = chat_column(row, reading) or reading.name(CHAT_COLUMNS[0])
    turns = list_at(row.get(column), column)
    if not turns:
        raise FieldError(f"{column} is empty; a conversation needs at least one turn")
    messages = read_turns(turns, column, reading, role_key, content_key)
    answer = reading.columns.get("completion")  # a column with the last answer is only used if the user named it
    if answer is not None and row.get(answer) is not None and messages[-1].role != "assistant":
        answers = row[answer] if isinstance(row[answer], list) else [row[answer]]
        messages += read_turns(answers, answer, reading, role_key, content_key)
    check_answers(messages, column)
    tools_name, system_name = reading.name("tools"), reading.name("system")
    messages = with_system(messages, row.get(system_name), system_name, reading)
    return Conversation(tuple(messages), origin, tools_of(row.get(tools_name), tools_name))


def with_system(messages: list[Message], value: object, place: str, reading: Reading) -> list[Message]:
    """Put the row's system column in front, else the source's `system` if the chat has no system turn.

    A null or empty column means none. Raises FieldError if column and chat both have a system prompt.
    """
    has_system = any(message.role == "system" for message in messages)
    prompt = optional_text(value, place) or None
    if prompt is not None and has_system:
        raise FieldError(f"{place} is given, but the conversation has a system turn too; keep one")
    if prompt is None and not has_system:
        prompt = reading.system
    return messages if prompt is None else [Message("system", prompt), *messages]


def read_turns(turns: list[Any], place: str, reading: Reading, role_key: str, content_key: str) -> list[Message]:
    """Return one message per turn. Raises FieldError with the turn's index, counted from 0 as in JSON."""
    return [
        without_loss_if_empty(_read_turn(turn, f"{place}[{index}]", reading, role_key, content_key))
        for index, turn in enumerate(turns)
    ]


def without_loss_if_empty(message: Message) -> Message:
    """Mask an answer without content, which would only teach its end of turn, unless it has `train: true`."""
    teaches_nothing = message.role == "assistant" and message.train is None and is_empty(message)
    return replace(message, train=False) if teaches_nothing else message


def _read_turn(turn: object, place: str, reading: Reading, role_key: str, content_key: str) -> Message:
    if isinstance(turn, str) and turn.lstrip().startswith("{"):
        turn = unpacked(turn, place)
    if not isinstance(turn, dict):
        raise FieldError(f"{place} is {kind(turn)}, not an object with {role_key} and {content_key}")
    if turn.get(role_key) is None:
        raise _missing(turn, place, role_key)
    role = role_of(turn[role_key], f"{place}.{role_key}", reading.roles)
    if role == CALL:
        if turn.get(content_key) is None:
            raise _missing(turn, place, content_key)
        calls = call_text(turn[content_key], f"{place}.{content_key}")
        return Message("assistant", "", tool_calls=calls, train=_same_in_all(turn, _FLAGS, place, flag_at))
    content, reasoning, calls = _read_content(turn, place, role, content_key)
    if len(turn) > 2:  # most turns only have a role and a text
        own = _same_in_all(turn, _REASONING, place, text_at)
        if reasoning is not None and own is not None:
            raise FieldError(f"{place} has reasoning in its parts and beside them; keep one")
        reasoning = own if reasoning is None else reasoning
    message = Message(cast(Role, role), content, reasoning=reasoning, tool_calls=calls)
    if reasoning and role != "assistant":
        raise FieldError(f"{place} has reasoning, but is a {role} turn; only an assistant turn reasons")
    if len(turn) == 2:
        return message
    return replace(
        message,
        name=optional_text(turn.get("name"), f"{place}.name"),
        tool_call_id=optional_text(turn.get("tool_call_id"), f"{place}.tool_call_id"),
        train=_same_in_all(turn, _FLAGS, place, flag_at),
    )


def _missing(turn: Mapping[str, Any], place: str, key: str) -> FieldError:
    if key in turn:
        return FieldError(f"{place}.{key} is null, not a text")
    return FieldError(f"{place}.{key} missing; keys: {', '.join(turn)}")


def _read_content(
    turn: Mapping[str, Any], place: str, role: str, key: str
) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Return text, reasoning and calls of a turn, from its content and `tool_calls` (or OpenAI's old function_call)."""
    value, calls = turn.get(key), calls_of(turn.get("tool_calls"), f"{place}.tool_calls")
    if turn.get("function_call") is not None:
        calls += (call_of(turn["function_call"], f"{place}.function_call"),)
    if role != "assistant":
        refuse_calls(list(calls), role, f"{place}.tool_calls")
    if isinstance(value, str):
        return text_at(value, f"{place}.{key}"), None, calls
    if value is None and calls:
        return "", None, calls
    if value is None and key not in turn:
        raise _missing(turn, place, key)
    if not isinstance(value, list):
        hint = "; only an assistant turn with tool_calls may have none" if value is None else ""
        raise FieldError(f"{place}.{key} is {kind(value)}, not a text{hint}")
    text, reasoning, part_calls = _read_parts(value, f"{place}.{key}")
    refuse_calls(part_calls if role != "assistant" else (), role, f"{place}.{key}")
    return text, reasoning, part_calls + calls


def _read_parts(parts: list[Any], place: str) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Read typed parts; texts are joined without a separator. Raises FieldError for other kinds or another order."""
    if not parts:
        raise FieldError(f"{place} is an empty list, not a text")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    last = 0
    for index, part in enumerate(parts):
        here = f"{place}[{index}]"
        if not isinstance(part, dict):
            raise FieldError(f"{here} is {kind(part)}, not an object with type and text")
        found = part.get("type")
        name = _PART_NAMES.get(found) if isinstance(found, str) else None
        if name is None:
            raise FieldError(
                f"{here}.type {found!r} cannot be trained on; only text, reasoning and tool_call parts can"
            )
        if _PART_ORDER[name] < last:
            raise FieldError(f"{here} ({name}) comes too late; parts must be reasoning, then text, then tool calls")
        last = _PART_ORDER[name]
        value = next((part[key] for key in ("value", "text", "thinking") if part.get(key) is not None), None)
        if name == "tool_call":
            calls += call_text(value, here)
        else:
            (thoughts if name == "reasoning" else texts).append(text_at(value, f"{here}.{name}"))
    return "".join(texts), "".join(thoughts) if thoughts else None, tuple(calls)


def _same_in_all(
    turn: Mapping[str, Any], keys: Sequence[str], place: str, read: Callable[[object, str], T]
) -> T | None:
    """Return the value that a turn has under any of several names, which must agree; None if it has none."""
    given = {key: read(turn[key], f"{place}.{key}") for key in keys if turn.get(key) is not None}
    if len(set(given.values())) > 1:
        raise FieldError(f"{place} has {' and '.join(given)} that say different things; keep one")
    return next(iter(given.values()), None)
