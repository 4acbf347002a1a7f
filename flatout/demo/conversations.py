"""The demo's chat data: conversations of very different lengths about a small world, and held-out ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import xxhash
import yaml

MAX_EXCHANGES = 20
ChatMessage = dict[str, str]
"""A message in OpenAI's form: role and content."""

_WORLD: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("world.yaml").read_text(encoding="utf-8"))
_WORDS = {kind: tuple(words.split()) for kind, words in _WORLD["words"].items()}
SMALL_TALK: dict[str, str] = _WORLD["small talk"]
_TASKS = ("sort words", "sort numbers", "reverse", "count up")


def is_held_out(key: str) -> bool:
    """Return whether a combination is in the held-out eighth; only its text decides, so the files never overlap."""
    return xxhash.xxh3_64_intdigest(key.encode()) % 8 == 0


class Exchange(NamedTuple):
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
        system, about_system = _draw_person(rng, "persona", held_out) if rng.random() < 0.33 else (None, ())
        exchanges = _draw_exchanges(rng, about_system, held_out)
        # conversations of only small talk would be in both files
        while held_out and all(exchange.held_out is None for exchange in exchanges):
            exchanges = _draw_exchanges(rng, about_system, held_out)
        yield _messages(exchanges, system)


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
    system, about_system = _draw_person(rng, "persona", held_out=True)
    introduction, about_guest = _introduce(rng, held_out=True)
    between = question("sort numbers")
    about_persona = rng.choice(about_system)
    guest = [introduction, between, rng.choice(about_guest)]
    return _messages([sort]), _messages([about_persona], system), _messages(guest)


def sample_tasks(num: int, seed: int) -> dict[str, str]:
    """Return `num` different held-out tasks that a rule solves, by question, with their answers."""
    rng, tasks = Random(f"flatout demo tasks {seed}"), dict[str, str]()
    while len(tasks) < num:
        exchange = _draw_exchange(rng, held_out=True)
        if exchange.family in _TASKS:
            tasks[exchange.question] = exchange.answer
    return tasks


def _messages(exchanges: Sequence[Exchange], system: str | None = None) -> list[ChatMessage]:
    messages = [{"role": "system", "content": system}] if system else []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def _draw_exchanges(rng: Random, about_system: Sequence[Exchange], held_out: bool) -> list[Exchange]:
    exchanges: list[Exchange] = []
    about_guest: Sequence[Exchange] = ()
    if rng.random() < 0.25:
        introduction, about_guest = _introduce(rng, held_out)
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


def _draw_person(rng: Random, kind: str, held_out: bool) -> tuple[str, Sequence[Exchange]]:
    """Draw who the assistant or the user is; return that as a text, and the questions about it."""
    about = _WORLD["people"][kind]
    while True:
        person = {word: rng.choice(_WORDS[word]) for word in about["draws"]}
        text = about["text"].format(**person)
        if is_held_out(text) == held_out:
            return text, [Exchange(kind, q, a.format(**person), held_out) for q, a in about["asks"].items()]


def _introduce(rng: Random, held_out: bool) -> tuple[Exchange, Sequence[Exchange]]:
    """Return the user's introduction, and the questions that later turns may ask about it."""
    person, questions = _draw_person(rng, "guest", held_out)
    name, town = person.split()
    text = f"{rng.choice(('Hello', 'Hi', 'Good morning'))}, my name is {name} and I live in {town}."
    return Exchange("introduction", text, f"Nice to meet you, {name}.", held_out), questions


def _draw_exchange(rng: Random, held_out: bool) -> Exchange:
    """Draw a kind by weight and an exchange of it, until it may be in the wanted file (up to 8 draws on average)."""
    weights = _WORLD["weights"]
    while True:
        (family,) = rng.choices(list(weights), list(weights.values()))
        if family == "small talk":
            question = rng.choice(tuple(SMALL_TALK))
            return Exchange(family, question, SMALL_TALK[question], held_out=None)
        is_task = family in _TASKS
        exchange = _task(rng, family) if is_task else _fact(rng, family)
        if exchange.held_out == held_out:
            return exchange


def _task(rng: Random, family: str) -> Exchange:
    """Return a task that a rule solves; an eighth of all combinations is held out, which the rule still answers."""
    if family == "count up":
        first = rng.randint(1, 12)
        last = min(first + 2 + int(rng.expovariate(0.3)), 20)
        given, answer = f" {first} to {last}", f"Counting: {' '.join(str(n) for n in range(first, last + 1))}."
    elif family == "reverse":
        words = rng.sample(_WORDS["thing"], rng.randint(2, 3))
        given, answer = f": {', '.join(words)}", f"Backwards: {', '.join(words[::-1])}."
    else:
        of_words = family == "sort words"
        words = rng.sample(_WORDS["animal"] if of_words else [str(n) for n in range(1, 21)], rng.randint(2, 4))
        ordered = sorted(words) if of_words else sorted(words, key=int)
        given, answer = f": {', '.join(words)}", f"Sorted: {', '.join(ordered)}."
    question = f"{rng.choice(_WORLD['ways'][family])}{given}."
    return Exchange(family, question, answer, is_held_out(question))


def _fact(rng: Random, family: str) -> Exchange:
    """Return a fact to memorize, asked in one of several ways; exactly one way per fact is held out."""
    answer = _WORLD["answers"].get(family)
    if family == "spell":
        word = rng.choice(_WORDS["spelled"])
        of = {"word": word, "letters": " ".join(word)}
    elif family == "weekday":
        start, step = rng.randrange(7), rng.choice((1, -1))
        where, asked = ("after", "is tomorrow") if step == 1 else ("before", "was yesterday")
        days = _WORDS["weekday"]
        of = {"day": days[start], "where": where, "asked": asked, "other": days[(start + step) % 7]}
    elif family == "opposite":
        of = dict(zip(("word", "opposite"), rng.sample(rng.choice(_WORDS["opposite"]).split("/"), 2), strict=True))
    else:
        island = rng.choice(tuple(_WORLD["islands"]))
        facts = zip(("capital", "river", "flag", "good"), _WORLD["islands"][island].split(), strict=True)
        of = {"island": island, **dict(facts)}
        if family == "fact":
            of["asked"] = rng.choice(tuple(_WORLD["facts"]))
            answer = _WORLD["facts"][of["asked"]]
    answer = answer.format(**of)
    ways = tuple(way.format(**of) for way in _WORLD["ways"][family])
    kept_back = xxhash.xxh3_64_intdigest(f"{family} {ways} {answer}".encode()) % len(ways)
    chosen = rng.randrange(len(ways))
    return Exchange(family, ways[chosen], answer, chosen == kept_back)
