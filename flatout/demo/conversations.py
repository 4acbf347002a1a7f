"""The demo's chat data: a few thousand multi-turn conversations of very different lengths, and held-out ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from random import Random

from flatout.demo.question_kinds import (
    Exchange,
    Persona,
    ask_guest,
    ask_persona,
    draw_exchange,
    draw_guest,
    draw_persona,
    introduce,
)

MAX_EXCHANGES = 20
ChatMessage = dict[str, str]
"""A message in OpenAI's form: role and content."""


def sample_conversations(num: int, seed: int, *, held_out: bool) -> Iterator[list[ChatMessage]]:
    """Yield `num` conversations whose questions are all on the wanted side of the split: a function of the arguments.

    A third starts with a system prompt, a quarter with the user's introduction; later turns may ask about both.
    """
    rng = Random(f"flatout demo {seed} {held_out}")
    for _ in range(num):
        persona = draw_persona(rng, held_out) if rng.random() < 0.33 else None
        exchanges = _draw_exchanges(rng, persona, held_out)
        # conversations of only small talk would be in both files
        while held_out and all(exchange.held_out is None for exchange in exchanges):
            exchanges = _draw_exchanges(rng, persona, held_out)
        yield _messages(exchanges, persona)


def _draw_exchanges(rng: Random, persona: Persona | None, held_out: bool) -> list[Exchange]:
    guest = draw_guest(rng, held_out) if rng.random() < 0.25 else None
    exchanges = [introduce(rng, guest)] if guest else []
    # log-normal: six in ten conversations have one or two exchanges, one in forty more than ten
    for _ in range(min(max(1, round(math.exp(rng.gauss(0.6, 0.9)))), MAX_EXCHANGES)):
        about = rng.random()
        if persona and about < 0.35:
            exchanges.append(ask_persona(rng, persona))
        elif guest and about > 0.65:
            exchanges.append(ask_guest(rng, guest))
        else:
            exchanges.append(draw_exchange(rng, held_out))
    return exchanges


def _messages(exchanges: list[Exchange], persona: Persona | None = None) -> list[ChatMessage]:
    messages = [{"role": "system", "content": persona.system_prompt}] if persona else []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def held_out_prompts(seed: int) -> tuple[list[ChatMessage], ...]:
    """Return three conversations of different kinds outside the training data; the last message is the right answer.

    They are a list to sort, a question about the system prompt, and a question about an earlier turn.
    """
    rng = Random(f"flatout demo prompts {seed}")

    def question(family: str) -> Exchange:
        while (exchange := draw_exchange(rng, held_out=True)).family != family:
            pass
        return exchange

    sort = question("sort words")
    persona, guest = draw_persona(rng, held_out=True), draw_guest(rng, held_out=True)
    hello, between = introduce(rng, guest), question("sort numbers")
    about_persona = ask_persona(rng, persona)
    about_guest = [hello, between, ask_guest(rng, guest)]
    return _messages([sort]), _messages([about_persona], persona), _messages(about_guest)


def to_json_lines(conversations: Iterable[list[ChatMessage]]) -> str:
    """Return the conversations as JSON Lines, one `{"messages": [...]}` per line."""
    return "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
