"""The demo's chat data: conversations of very different lengths about a small world, and held-out ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import xxhash
import yaml

MAX_EXCHANGES = 20
ChatMessage = dict[str, str]
"""A message in OpenAI's form: role and content."""


_WORLD: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("world.yaml").read_text(encoding="utf-8"))
NAMES, TOWNS, JOBS, ANIMALS, THINGS, SPELLED, WEEKDAYS, OPPOSITES = (
    tuple(_WORLD[name].split())
    for name in ("names", "towns", "jobs", "animals", "things", "spelled", "weekdays", "opposites")
)
SMALL_TALK: dict[str, str] = _WORLD["small talk"]
_WEIGHTS, _WAYS, _FACTS = _WORLD["weights"], _WORLD["ways"], _WORLD["facts"]


def is_held_out(key: str) -> bool:
    """Return whether a combination is in the held-out eighth; only its text decides, so the files never overlap."""
    return xxhash.xxh3_64_intdigest(key.encode()) % 8 == 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its right answer; `held_out` is the file that it belongs to, None (small talk) both."""

    family: str
    question: str
    answer: str
    held_out: bool | None


def sample_conversations(num: int, seed: int, *, held_out: bool) -> Iterator[list[ChatMessage]]:
    """Yield `num` conversations whose questions are all on the wanted side of the split: a function of the arguments.

    A third starts with a system prompt, a quarter with the user's introduction; later turns may ask about both.
    """
    rng = Random(f"flatout demo {seed} {held_out}")
    for _ in range(num):
        system, about_system = _draw_persona(rng, held_out) if rng.random() < 0.33 else (None, ())
        exchanges = _draw_exchanges(rng, about_system, held_out)
        # conversations of only small talk would be in both files
        while held_out and all(exchange.held_out is None for exchange in exchanges):
            exchanges = _draw_exchanges(rng, about_system, held_out)
        yield _messages(exchanges, system)


def _draw_exchanges(rng: Random, about_system: Sequence[Exchange], held_out: bool) -> list[Exchange]:
    exchanges: list[Exchange] = []
    about_guest: Sequence[Exchange] = ()
    if rng.random() < 0.25:
        introduction, about_guest = _draw_guest(rng, held_out)
        exchanges.append(introduction)
    # log-normal: six in ten conversations have one or two exchanges, one in forty more than ten
    for _ in range(min(max(1, round(math.exp(rng.gauss(0.6, 0.9)))), MAX_EXCHANGES)):
        about = rng.random()
        if about_system and about < 0.35:
            exchanges.append(rng.choice(about_system))
        elif about_guest and about > 0.65:
            exchanges.append(rng.choice(about_guest))
        else:
            exchanges.append(_draw_exchange(rng, held_out))
    return exchanges


def _messages(exchanges: Sequence[Exchange], system: str | None = None) -> list[ChatMessage]:
    messages = [{"role": "system", "content": system}] if system else []
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
        while (exchange := _draw_exchange(rng, held_out=True)).family != family:
            pass
        return exchange

    sort = question("sort words")
    system, about_system = _draw_persona(rng, held_out=True)
    introduction, about_guest = _draw_guest(rng, held_out=True)
    between = question("sort numbers")
    about_persona = rng.choice(about_system)
    guest = [introduction, between, rng.choice(about_guest)]
    return _messages([sort]), _messages([about_persona], system), _messages(guest)


def _draw_persona(rng: Random, held_out: bool) -> tuple[str, Sequence[Exchange]]:
    """Draw who the assistant is; return the system prompt, and the questions whose answers are in it."""
    while True:
        name, job, town = rng.choice(NAMES), rng.choice(JOBS), rng.choice(TOWNS)
        system = f"You are {name}, a {job} from {town}."
        if is_held_out(system) == held_out:
            break
    return system, (
        Exchange("persona", "What is your name?", f"I am {name}.", held_out),
        Exchange("persona", "Where are you from?", f"I am from {town}.", held_out),
        Exchange("persona", "What is your job?", f"I am a {job}.", held_out),
        Exchange("persona", "Who are you?", f"I am {name}, a {job} from {town}.", held_out),
    )


def _draw_guest(rng: Random, held_out: bool) -> tuple[Exchange, Sequence[Exchange]]:
    """Draw who the user is; return the user's introduction, and the questions that later turns may ask about it."""
    while True:
        name, town = rng.choice(NAMES), rng.choice(TOWNS)
        if is_held_out(f"{name} {town}") == held_out:
            break
    greeting = rng.choice(("Hello", "Hi", "Good morning"))
    text = f"{greeting}, my name is {name} and I live in {town}."
    return Exchange("introduction", text, f"Nice to meet you, {name}.", held_out), (
        Exchange("guest", "What is my name?", f"Your name is {name}.", held_out),
        Exchange("guest", "Where do I live?", f"You live in {town}.", held_out),
    )


def _draw_exchange(rng: Random, held_out: bool) -> Exchange:
    """Draw a kind by weight and an exchange of it, until it may be in the wanted file (up to 8 draws on average)."""
    while True:
        (family,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        if family == "small talk":
            question = rng.choice(tuple(SMALL_TALK))
            return Exchange(family, question, SMALL_TALK[question], held_out=None)
        is_task = family in ("sort words", "sort numbers", "reverse", "count up")
        exchange = _task(rng, family) if is_task else _fact(rng, family)
        if exchange.held_out == held_out:
            return exchange


def _task(rng: Random, family: str) -> Exchange:
    """Return a task that a rule solves; an eighth of all combinations is held out, which the rule still answers."""
    if family == "sort words":
        words = rng.sample(ANIMALS, rng.randint(2, 4))
        given, answer = ", ".join(words), f"Sorted: {', '.join(sorted(words))}."
    elif family == "sort numbers":
        numbers = rng.sample(range(1, 21), rng.randint(2, 4))
        given, answer = ", ".join(map(str, numbers)), f"Sorted: {', '.join(map(str, sorted(numbers)))}."
    elif family == "reverse":
        words = rng.sample(THINGS, rng.randint(2, 3))
        given, answer = ", ".join(words), f"Backwards: {', '.join(words[::-1])}."
    else:
        first = rng.randint(1, 12)
        last = min(first + 2 + int(rng.expovariate(0.3)), 20)
        given, answer = f"{first} to {last}", f"Counting: {' '.join(str(n) for n in range(first, last + 1))}."
    question = f"{rng.choice(_WAYS[family])}{' ' if family == 'count up' else ': '}{given}."
    return Exchange(family, question, answer, is_held_out(question))


def _fact(rng: Random, family: str) -> Exchange:
    """Return a fact to memorize, asked in one of several ways; exactly one way per fact is held out."""
    of: dict[str, str]
    if family == "spell":
        of = {"word": rng.choice(SPELLED)}
        answer = f"Letters: {' '.join(of['word'])}."
    elif family == "weekday":
        start, step = rng.randrange(7), rng.choice((1, -1))
        where, other_day = ("after", "is tomorrow") if step == 1 else ("before", "was yesterday")
        of = {"day": WEEKDAYS[start], "where": where, "other_day": other_day}
        answer = f"It is {WEEKDAYS[(start + step) % 7]}."
    elif family == "opposite":
        word, opposite = rng.sample(rng.choice(OPPOSITES).split("/"), 2)
        of, answer = {"word": word}, f"The opposite of {word} is {opposite}."
    else:
        island = rng.choice(tuple(_WORLD["islands"]))
        capital, river, flag, good = _WORLD["islands"][island].split()
        of = {"island": island, "capital": capital, "river": river, "flag": flag, "good": good}
        if family == "fact":
            of["asked"] = rng.choice(tuple(_FACTS))
            answer = _FACTS[of["asked"]].format(**of)
        else:
            answer = (
                f"{island} is an island. Its capital is {capital}, on the river {river}. "
                f"The flag is {flag}. People come for the {good}."
            )
    ways = tuple(way.format(**of) for way in _WAYS[family])
    kept_back = xxhash.xxh3_64_intdigest(f"{family} {ways} {answer}".encode()) % len(ways)
    chosen = rng.randrange(len(ways))
    return Exchange(family, ways[chosen], answer, chosen == kept_back)
