"""Rows that hold a conversation: lists of turns (OpenAI messages, ShareGPT), alpaca, and prompt/completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from flatout.data.conversation import ROLES, Conversation, Message, Origin, PlainText, Role, ToolCall, is_empty
from flatout.data.rows.formats.fields import (
    FieldError,
    Reading,
    flag_at,
    kind,
    list_at,
    object_at,
    optional_text,
    text_at,
    unpacked,
)

T = TypeVar("T")
# not a separate role: an assistant turn whose text is a function call in JSON
_CALL = "function_call"
# role -> the names that data sets give it
_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "tool_result", "ipython"),
    _CALL: ("function_call", "tool_call"),
}
_KNOWN = {name: role for role, names in _NAMES.items() for name in names}
ROLE_TARGETS = (*ROLES, _CALL)
# fields of a turn that have several names in data sets
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FLAGS = ("train", "weight", "loss_weight")
# the order in which all templates write the parts of an assistant turn; another order cannot be rendered
_PART_ORDER = {"reasoning": 0, "text": 1, "tool_call": 2}
_PART_NAMES = {"reasoning": "reasoning", "thinking": "reasoning", "text": "text", "tool_call": "tool_call"}
CHAT_COLUMNS = ("messages", "conversations", "conversation")


def chat_column(row: Mapping[str, Any], reading: Reading) -> str | None:
    """Return the user's name of the row's column of turns, None if it has none."""
    names = (reading.name(column) for column in CHAT_COLUMNS)
    return next((name for name in names if row.get(name) is not None), None)


def parse_chat(row: Mapping[str, Any], origin: Origin, reading: Reading, *, role: str, content: str) -> Conversation:
    """Parse a list of turns, whose keys are `role` and `content`; optional columns `tools`, `system`.

    OpenAI messages have the keys role and content (and tool_calls, ...), ShareGPT has from and value.
    """
    keys = (reading.name(role), reading.name(content))
    column = chat_column(row, reading) or reading.name(CHAT_COLUMNS[0])
    turns = list_at(row.get(column), column)
    if not turns:
        raise FieldError(f"{column} is empty; a conversation needs at least one turn")
    messages = _read_turns(turns, column, reading, *keys)
    answer = reading.columns.get("completion")  # a column with the last answer is only used if the user named it
    if answer is not None and row.get(answer) is not None and messages[-1].role != "assistant":
        answers = row[answer] if isinstance(row[answer], list) else [row[answer]]
        messages += _read_turns(answers, answer, reading, *keys)
    _check_answers(messages, column)
    return Conversation(_completed(messages, row, reading), origin, _tools(row, reading))


def parse_alpaca(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse instruction and output; optional input, system, and history (a list of [question, answer] pairs)."""
    instruction, given, output, history = map(reading.name, ("instruction", "input", "output", "history"))
    question = text_at(row.get(instruction), instruction)
    if extra := optional_text(row.get(given), given):
        question = f"{question}\n{extra}"
    messages: list[Message] = []
    pairs = row.get(history)
    for index, pair in enumerate([] if pairs in (None, "") else list_at(pairs, history)):
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else kind(pair)
            raise FieldError(f"{history}[{index}] is {found}, not a [question, answer] pair")
        messages.append(Message("user", text_at(pair[0], f"{history}[{index}][0]")))
        messages.append(Message("assistant", text_at(pair[1], f"{history}[{index}][1]")))
    messages += [Message("user", question), Message("assistant", text_at(row.get(output), output))]
    return Conversation(_completed(messages, row, reading), origin)


def parse_prompt_completion(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation | PlainText:
    """Parse prompt and completion: two texts (no template is applied), or two lists of messages.

    Only the completion carries loss: no turn of a prompt does, unless it has `train: true`.
    """
    prompt, completion = reading.name("prompt"), reading.name("completion")
    asked, answered = row.get(prompt), row.get(completion)
    if isinstance(asked, str) and isinstance(answered, str):
        if reading.system is not None:
            raise FieldError(f"{prompt} is a string, not messages, so the source's system cannot apply; remove system")
        return PlainText(text_at(answered, completion), origin, prompt=text_at(asked, prompt))
    if not isinstance(asked, list) or not isinstance(answered, list):
        raise FieldError(
            f"{prompt} is {kind(asked)} and {completion} is {kind(answered)}; give two strings or two lists of messages"
        )
    keys = (reading.name("role"), reading.name("content"))
    asked_turns = _read_turns(asked, prompt, reading, *keys)
    messages = [replace(turn, train=False) if turn.train is None else turn for turn in asked_turns]
    if not answered:
        raise FieldError(f"{completion} is empty; there is nothing to learn")
    messages += _read_turns(answered, completion, reading, *keys)
    _check_answers(messages, prompt)
    return Conversation(_completed(messages, row, reading), origin, _tools(row, reading))


def _completed(messages: list[Message], row: Mapping[str, Any], reading: Reading) -> tuple[Message, ...]:
    """Put the row's system column in front, else the source's `system` if the chat has no system turn.

    A null or empty column means none. An answer without content, which would only teach its end of turn, gets no loss
    unless it has `train: true`. Raises FieldError if column and chat both have a system prompt.
    """
    column = reading.name("system")
    has_system = any(message.role == "system" for message in messages)
    prompt = optional_text(row.get(column), column) or None
    if prompt is not None and has_system:
        raise FieldError(f"{column} is given, but the conversation also has a system turn; keep one")
    if prompt is None and not has_system:
        prompt = reading.system
    completed = [] if prompt is None else [Message("system", prompt)]
    for message in messages:
        teaches_nothing = message.role == "assistant" and message.train is None and is_empty(message)
        completed.append(replace(message, train=False) if teaches_nothing else message)
    return tuple(completed)


def _tools(row: Mapping[str, Any], reading: Reading) -> tuple[Mapping[str, Any], ...]:
    """Return tool schemas in the form that templates expect: {"type": "function", "function": {...}}.

    The column is a list or JSON text of one; null or an empty text means no tools. Bare functions are wrapped.
    """
    column = reading.name("tools")
    tools: list[Mapping[str, Any]] = []
    for index, item in enumerate([] if row.get(column) in (None, "") else list_at(row[column], column)):
        tool = object_at(item, f"{column}[{index}]")
        inner = tool.get("function")
        function = inner if isinstance(inner, dict) else tool
        text_at(function.get("name"), f"{column}[{index}].name")
        tools.append({"type": "function", "function": tool} if function is tool else tool)
    return tuple(tools)


def _read_turns(turns: list[Any], place: str, reading: Reading, role_key: str, content_key: str) -> list[Message]:
    """Return one message per turn. Raises FieldError with the turn's index, counted from 0 as in JSON."""
    return [_read_turn(turn, f"{place}[{index}]", reading, role_key, content_key) for index, turn in enumerate(turns)]


def _check_answers(messages: Sequence[Message], place: str) -> None:
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
            raise FieldError(f"{place}[{index}].tool_call_id {call_id!r} matches no call; calls before it: {calls}")


def _read_turn(turn: object, place: str, reading: Reading, role_key: str, content_key: str) -> Message:
    if isinstance(turn, str) and turn.lstrip().startswith("{"):
        turn = unpacked(turn, place)
    if not isinstance(turn, dict):
        raise FieldError(f"{place} is {kind(turn)}, not an object with {role_key} and {content_key}")
    role = role_of(_required(turn, place, role_key), f"{place}.{role_key}", reading.roles)
    if role == _CALL:
        calls = _calls_of(_required(turn, place, content_key), f"{place}.{content_key}")
        return Message("assistant", "", tool_calls=calls, train=_same_in_all(turn, _FLAGS, place, flag_at))
    content, reasoning, calls = _read_content(turn, place, role, content_key)
    if len(turn) > 2:  # most turns only have a role and a text
        own = _same_in_all(turn, _REASONING, place, text_at)
        if reasoning is not None and own is not None:
            raise FieldError(f"{place} has reasoning both in its parts and next to them; keep one")
        reasoning = own if reasoning is None else reasoning
    if reasoning and role != "assistant":
        raise FieldError(f"{place} has reasoning, but is a {role} turn; only an assistant turn may have reasoning")
    if len(turn) == 2:
        return Message(cast(Role, role), content, reasoning, calls)
    return Message(
        cast(Role, role),
        content,
        reasoning,
        calls,
        name=optional_text(turn.get("name"), f"{place}.name"),
        tool_call_id=optional_text(turn.get("tool_call_id"), f"{place}.tool_call_id"),
        train=_same_in_all(turn, _FLAGS, place, flag_at),
    )


def _required(turn: Mapping[str, Any], place: str, key: str) -> Any:
    if turn.get(key) is not None:
        return turn[key]
    if key in turn:
        raise FieldError(f"{place}.{key} is null, not a string")
    raise FieldError(f"{place}.{key} missing; keys: {', '.join(turn)}")


def _read_content(
    turn: Mapping[str, Any], place: str, role: str, key: str
) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Return text, reasoning and calls of a turn, from its content and `tool_calls` (or OpenAI's old function_call)."""
    value, calls_place = turn.get(key), f"{place}.tool_calls"
    calls: tuple[ToolCall, ...] = ()
    if turn.get("tool_calls") is not None:
        calls = _calls_of(list_at(turn["tool_calls"], calls_place), calls_place)
    if turn.get("function_call") is not None:
        calls += (_call_of(turn["function_call"], f"{place}.function_call"),)
    if calls and role != "assistant":
        raise FieldError(f"{calls_place} is a list in a {role} turn; only an assistant turn has tool calls")
    if isinstance(value, str):
        return text_at(value, f"{place}.{key}"), None, calls
    if value is None and calls:
        return "", None, calls
    if value is None and key not in turn:
        raise FieldError(f"{place}.{key} missing; keys: {', '.join(turn)}")
    if not isinstance(value, list):
        hint = "; only an assistant turn with tool_calls may have none" if value is None else ""
        raise FieldError(f"{place}.{key} is {kind(value)}, not a string{hint}")
    text, reasoning, part_calls = _read_parts(value, f"{place}.{key}")
    if part_calls and role != "assistant":
        raise FieldError(f"{place}.{key} is a list in a {role} turn; only an assistant turn has tool calls")
    return text, reasoning, part_calls + calls


def _read_parts(parts: list[Any], place: str) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Read typed parts; texts are joined without a separator. Raises FieldError for other kinds or another order."""
    if not parts:
        raise FieldError(f"{place} is an empty list, not a string")
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
            raise FieldError(f"{here} ({name}) is out of order; parts must be reasoning, then text, then tool calls")
        last = _PART_ORDER[name]
        value = next((part[key] for key in ("value", "text", "thinking") if part.get(key) is not None), None)
        if name == "tool_call":
            calls += _calls_of(value, here)
        else:
            (thoughts if name == "reasoning" else texts).append(text_at(value, f"{here}.{name}"))
    return "".join(texts), "".join(thoughts) if thoughts else None, tuple(calls)


def _calls_of(value: object, place: str) -> tuple[ToolCall, ...]:
    """Parse a call, or a list of parallel ones; either may be JSON text."""
    found = unpacked(value, place)
    if isinstance(found, list):
        return tuple(_call_of(item, f"{place}[{index}]") for index, item in enumerate(found))
    return (_call_of(found, place),)


def _call_of(value: object, place: str) -> ToolCall:
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


def _same_in_all(
    turn: Mapping[str, Any], keys: Sequence[str], place: str, read: Callable[[object, str], T]
) -> T | None:
    """Return the value that a turn has under any of several names, which must agree; None if it has none."""
    given = {key: read(turn[key], f"{place}.{key}") for key in keys if turn.get(key) is not None}
    if len(set(given.values())) > 1:
        raise FieldError(f"{place} has {' and '.join(given)} with different values; keep one")
    return next(iter(given.values()), None)


def role_of(value: object, place: str, extra: Mapping[str, str]) -> str:
    """Return one of ROLE_TARGETS; the user's `extra` names come first, built-in ones match in any case."""
    if not isinstance(value, str):
        raise FieldError(f"{place} is {kind(value)}, not a string")
    role = extra.get(value) or _KNOWN.get(value) or _KNOWN.get(value.lower())
    if role is None:
        raise FieldError(
            f"{place} {value!r:.200} is unknown; allowed: {', '.join(_KNOWN)}; "
            f"map others with roles, such as roles: {{{value if value.isprintable() else repr(value):.200}: assistant}}"
        )
    return role
