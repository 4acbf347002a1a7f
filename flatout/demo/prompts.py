"""The three prompts that end the demo, each of another kind, each absent from the training data."""

from __future__ import annotations

from random import Random

from flatout.demo.conversations import ChatMessage, draw_held_out_guest, draw_held_out_persona, draw_question
from flatout.demo.families import ask_guest, ask_persona, introduce


def held_out_prompts(seed: int) -> tuple[list[ChatMessage], ...]:
    """A list to sort, a question about the system prompt, and one about an earlier turn; each ends with the user."""
    rng = Random(f"flatout demo prompts {seed}")
    sort = draw_question(rng, "sort words", held_out=True)
    persona = draw_held_out_persona(rng)
    guest = draw_held_out_guest(rng)
    hello, between = introduce(rng, guest), draw_question(rng, "sort numbers", held_out=True)
    return (
        [_user(sort.question)],
        [{"role": "system", "content": persona.system_prompt}, _user(ask_persona(rng, persona).question)],
        [
            _user(hello.question),
            _assistant(hello.answer),
            _user(between.question),
            _assistant(between.answer),
            _user(ask_guest(rng, guest).question),
        ],
    )


def _user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def _assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}
