"""One question and one answer a row: alpaca and prompt/completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatout.data.conversation import Conversation, Message, Origin, PlainText
from flatout.data.formats.fields import FieldError, Reading, kind, list_at, optional_text, text_at
from flatout.data.formats.tool_calls import check_answers, tools_of
from flatout.data.formats.turns import read_turns, with_system


def parse_alpaca(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """instruction, output; optional input, system, and history (a list of [question, answer] pairs).

    A non-empty input stands under the instruction, on a new line.
    """
    instruction, given, output, system, history = (
        reading.name(column) for column in ("instruction", "input", "output", "system", "history")
    )
    question = text_at(row.get(instruction), instruction)
    if extra := optional_text(row.get(given), given):
        question = f"{question}\n{extra}"
    messages = _history(row.get(history), history)
    messages += [Message("user", question), Message("assistant", text_at(row.get(output), output))]
    return Conversation(tuple(with_system(messages, row.get(system), system, reading)), origin)


def _history(value: object, place: str) -> list[Message]:
    messages: list[Message] = []
    for index, pair in enumerate([] if value in (None, "") else list_at(value, place)):
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else kind(pair)
            raise FieldError(f"{place}[{index}] is {found}, not a [question, answer] pair")
        messages.append(Message("user", text_at(pair[0], f"{place}[{index}][0]")))
        messages.append(Message("assistant", text_at(pair[1], f"{place}[{index}][1]")))
    return messages


def answer_column(row: Mapping[str, Any], reading: Reading) -> str:
    """`completion`, or `chosen` of a preference row (one that has `rejected` too)."""
    completion = reading.name("completion")
    return "chosen" if completion not in row and "chosen" in row and "rejected" in row else completion


def parse_prompt_completion(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation | PlainText:
    """prompt and completion: two texts (no template is put around them), or two lists of messages.

    Loss falls on the completion only: no turn of a prompt carries any, unless it says `train: true`. A preference
    row (prompt, chosen, rejected) trains on `chosen`.
    """
    prompt, completion = reading.name("prompt"), answer_column(row, reading)
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
    messages = [_context(message) for message in read_turns(asked, prompt, reading, *keys)]
    if not answered:
        raise FieldError(f"{completion} is empty; there is nothing to learn")
    messages += read_turns(answered, completion, reading, *keys)
    check_answers(messages, prompt)
    tools, system = reading.name("tools"), reading.name("system")
    messages = with_system(messages, row.get(system), system, reading)
    return Conversation(tuple(messages), origin, tools_of(row.get(tools), tools))


def _context(message: Message) -> Message:
    return replace(message, train=False) if message.train is None else message
