"""The demo's chat data: a few thousand multi-turn conversations of very different lengths, and held-out ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TypedDict, TypeVar

from flatout.demo.question_kinds import (
    Exchange,
    Guest,
    Persona,
    ask_guest,
    ask_persona,
    introduce,
    sample_exchange,
    sample_guest,
    sample_persona,
)

MAX_EXCHANGES = 20
T = TypeVar("T", Exchange, Guest, Persona)


class ChatMessage(TypedDict):
    """A message in OpenAI's form."""

    role: str
    content: str


def sample_conversation(rng: Random, *, held_out: bool) -> list[ChatMessage]:
    """Return one conversation whose questions are all on the wanted side of the split.

    A third starts with a system prompt, a quarter with the user's introduction; later turns may ask about both.
    """
    persona = _draw(lambda: sample_persona(rng), held_out) if rng.random() < 0.33 else None
    exchanges = _sample_exchanges(rng, persona, held_out)
    # conversations of only small talk would be in both files
    while held_out and all(exchange.held_out is None for exchange in exchanges):
        exchanges = _sample_exchanges(rng, persona, held_out)
    return _messages(exchanges, persona)


def _messages(exchanges: list[Exchange], persona: Persona | None = None) -> list[ChatMessage]:
    messages: list[ChatMessage] = [{"role": "system", "content": persona.system_prompt}] if persona else []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def _sample_exchanges(rng: Random, persona: Persona | None, held_out: bool) -> list[Exchange]:
    guest = _draw(lambda: sample_guest(rng), held_out) if rng.random() < 0.25 else None
    exchanges = [introduce(rng, guest)] if guest else []
    # log-normal: six in ten conversations have one or two exchanges, one in forty more than ten
    for _ in range(min(max(1, round(math.exp(rng.gauss(0.6, 0.9)))), MAX_EXCHANGES)):
        about = rng.random()
        if persona and about < 0.35:
            exchanges.append(ask_persona(rng, persona))
        elif guest and about > 0.65:
            exchanges.append(ask_guest(rng, guest))
        else:
            exchanges.append(_draw(lambda: sample_exchange(rng), held_out))
    return exchanges


def sample_conversations(num: int, seed: int, *, held_out: bool) -> Iterator[list[ChatMessage]]:
    """Yield `num` conversations, a pure function of the arguments."""
    rng = Random(f"flatout demo {seed} {held_out}")
    for _ in range(num):
        yield sample_conversation(rng, held_out=held_out)


def held_out_prompts(seed: int) -> tuple[list[ChatMessage], ...]:
    """Return three conversations of different kinds outside the training data; the last message is the right answer.

    They are a list to sort, a question about the system prompt, and a question about an earlier turn.
    """
    rng = Random(f"flatout demo prompts {seed}")

    def question(family: str) -> Exchange:
        while (exchange := _draw(lambda: sample_exchange(rng), held_out=True)).family != family:
            pass
        return exchange

    sort = question("sort words")
    persona = _draw(lambda: sample_persona(rng), held_out=True)
    guest = _draw(lambda: sample_guest(rng), held_out=True)
    hello, between = introduce(rng, guest), question("sort numbers")
    about_persona = ask_persona(rng, persona)
    return (
        _messages([sort]),
        _messages([about_persona], persona),
        _messages([hello, between, ask_guest(rng, guest)]),
    )


def to_json_lines(conversations: Iterable[list[ChatMessage]]) -> str:
    """Return the conversations as JSON Lines, one `{"messages": [...]}` per line."""
    return "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)


def _draw(draw: Callable[[], T], held_out: bool) -> T:
    """Draw until the value may be in the wanted file (up to 8 draws on average for a held-out one)."""
    value = draw()
    while value.held_out is not None and value.held_out != held_out:
        value = draw()
    return value
