"""One question and one answer per row: alpaca and prompt/completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatout.data.conversation import Conversation, Message, Origin, PlainText
from flatout.data.rows.formats.fields import FieldError, Reading, kind, list_at, optional_text, text_at
from flatout.data.rows.formats.tool_calls import check_answers, tools_of
from flatout.data.rows.formats.turns import read_turns, with_system, without_loss_if_empty


def parse_alpaca(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse instruction and output; optional input, system, and history (a list of [question, answer] pairs).

    A non-empty input goes below the instruction, on a new line.
    """
    instruction, given, output, system, history = (
        reading.name(column) for column in ("instruction", "input", "output", "system", "history")
    )
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
    return Conversation(tuple(with_system(messages, row.get(system), system, reading)), origin)


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
    tools, system = reading.name("tools"), reading.name("system")
    messages = with_system(messages, row.get(system), system, reading)
    return Conversation(tuple(messages), origin, tools_of(row.get(tools), tools))
