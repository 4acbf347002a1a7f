"""Rows that hold a conversation: lists of turns, alpaca, and prompt/completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatout.data.conversation import Conversation, Message, Origin, PlainText
from flatout.data.rows.formats.fields import FieldError, Reading, kind, list_at, object_at, optional_text, text_at
from flatout.data.rows.formats.turns import check_answers, read_turns, without_loss_if_empty

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
    messages = read_turns(turns, column, reading, *keys)
    answer = reading.columns.get("completion")  # a column with the last answer is only used if the user named it
    if answer is not None and row.get(answer) is not None and messages[-1].role != "assistant":
        answers = row[answer] if isinstance(row[answer], list) else [row[answer]]
        messages += read_turns(answers, answer, reading, *keys)
    check_answers(messages, column)
    return Conversation(_with_system(messages, row, reading), origin, _tools(row, reading))


def parse_alpaca(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse instruction and output; optional input, system, and history (a list of [question, answer] pairs).

    A non-empty input goes below the instruction, on a new line.
    """
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
    messages = [without_loss_if_empty(message) for message in messages]
    return Conversation(_with_system(messages, row, reading), origin)


def parse_prompt_completion(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation | PlainText:
    """Parse prompt and completion: two texts (no template is applied), or two lists of messages.

    Only the completion carries loss: no turn of a prompt does, unless it has `train: true`.
    """
    prompt, completion = reading.name("prompt"), reading.name("completion")
    asked, answered = row.get(prompt), row.get(completion)
    if isinstance(asked, str) and isinstance(answered, str):
        if reading.system is not None:
            raise FieldError(f"{prompt} is a text, not messages, so the source's system cannot apply; remove system")
        return PlainText(text_at(answered, completion), origin, prompt=text_at(asked, prompt))
    if not isinstance(asked, list) or not isinstance(answered, list):
        raise FieldError(
            f"{prompt} is {kind(asked)} and {completion} is {kind(answered)}; give two texts or two lists of messages"
        )
    keys = (reading.name("role"), reading.name("content"))
    asked_turns = read_turns(asked, prompt, reading, *keys)
    messages = [replace(turn, train=False) if turn.train is None else turn for turn in asked_turns]
    if not answered:
        raise FieldError(f"{completion} is empty; there is nothing to learn")
    messages += read_turns(answered, completion, reading, *keys)
    check_answers(messages, prompt)
    return Conversation(_with_system(messages, row, reading), origin, _tools(row, reading))


def _with_system(messages: list[Message], row: Mapping[str, Any], reading: Reading) -> tuple[Message, ...]:
    """Put the row's system column in front, else the source's `system` if the chat has no system turn.

    A null or empty column means none. Raises FieldError if column and chat both have a system prompt.
    """
    column = reading.name("system")
    has_system = any(message.role == "system" for message in messages)
    prompt = optional_text(row.get(column), column) or None
    if prompt is not None and has_system:
        raise FieldError(f"{column} is given, but the conversation has a system turn too; keep one")
    if prompt is None and not has_system:
        prompt = reading.system
    return tuple(messages) if prompt is None else (Message("system", prompt), *messages)


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
