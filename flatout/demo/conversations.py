"""The demo's chat data: a few thousand multi-turn conversations of very uneven length, and held-out ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TypedDict, TypeVar

from flatout.demo.families import (
    Exchange,
    Guest,
    Persona,
    ask_guest,
    ask_persona,
    draw_exchange,
    draw_guest,
    draw_persona,
    introduce,
)

MAX_EXCHANGES = 20
T = TypeVar("T", Exchange, Guest, Persona)


class ChatMessage(TypedDict):
    """A message in OpenAI's form."""

    role: str
    content: str


def draw_conversation(rng: Random, *, held_out: bool) -> list[ChatMessage]:
    """One conversation; every question in it lies on the wanted side of the split.

    A third starts with a system prompt, a quarter with the user's introduction; later turns may ask about both.
    """
    persona = _draw(lambda: draw_persona(rng), held_out) if rng.random() < 0.33 else None
    exchanges = _draw_exchanges(rng, persona, held_out)
    # small talk alone would be in both files
    while held_out and all(exchange.held_out is None for exchange in exchanges):
        exchanges = _draw_exchanges(rng, persona, held_out)
    messages: list[ChatMessage] = []
    if persona:
        messages.append({"role": "system", "content": persona.system_prompt})
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def _draw_exchanges(rng: Random, persona: Persona | None, held_out: bool) -> list[Exchange]:
    guest = _draw(lambda: draw_guest(rng), held_out) if rng.random() < 0.25 else None
    exchanges = [introduce(rng, guest)] if guest else []
    for _ in range(_num_exchanges(rng)):
        about = rng.random()
        if persona and about < 0.35:
            exchanges.append(ask_persona(rng, persona))
        elif guest and about > 0.65:
            exchanges.append(ask_guest(rng, guest))
        else:
            exchanges.append(_draw(lambda: draw_exchange(rng), held_out))
    return exchanges


def draw_conversations(num: int, seed: int, *, held_out: bool) -> Iterator[list[ChatMessage]]:
    """`num` conversations, a pure function of the arguments."""
    rng = Random(f"flatout demo {seed} {held_out}")
    for _ in range(num):
        yield draw_conversation(rng, held_out=held_out)


def draw_held_out_persona(rng: Random) -> Persona:
    """A persona that the training data never has."""
    return _draw(lambda: draw_persona(rng), held_out=True)


def draw_held_out_guest(rng: Random) -> Guest:
    """A guest that the training data never has."""
    return _draw(lambda: draw_guest(rng), held_out=True)


def draw_question(rng: Random, family: str, *, held_out: bool) -> Exchange:
    """An exchange of one family on the wanted side of the split."""
    while (exchange := _draw(lambda: draw_exchange(rng), held_out)).family != family:
        pass
    return exchange


def to_json_lines(conversations: Iterable[list[ChatMessage]]) -> str:
    """One `{"messages": [...]}` a line."""
    return "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)


def _draw(draw: Callable[[], T], held_out: bool) -> T:
    """Draw until the value may stand in the wanted file (up to 8 draws on average for a held-out one)."""
    value = draw()
    while value.held_out is not None and value.held_out != held_out:
        value = draw()
    return value


def _num_exchanges(rng: Random) -> int:
    """Log-normal: six in ten conversations have one or two exchanges, one in forty more than ten."""
    return min(max(1, round(math.exp(rng.gauss(0.6, 0.9)))), MAX_EXCHANGES)
