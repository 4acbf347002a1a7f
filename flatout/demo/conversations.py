"""The demo's chat data: conversations of very different lengths about a small world, and held-out ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import xxhash

MAX_EXCHANGES = 20
ChatMessage = dict[str, str]
"""A message in OpenAI's form: role and content."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The small invented world: closed lists, so that a tiny model can memorize them.
NAMES = _words(
    "Ada Bruno Cleo Dario Edda Felix Greta Hugo Ines Jonas Kira Leo Mona Nils Olga Paul Rosa Sven Tilda Vera"
)
TOWNS = _words("Arden Belmar Corvin Dorset Elstad Farrow Glenby Harwick Ilford Jarrow Kelso Lunden")
JOBS = _words("baker pilot farmer nurse painter teacher sailor tailor doctor singer miner writer")
ANIMALS = _words("ant bear cat deer eel fox goat hare ibis jay koala lynx mole newt otter pig quail rat seal toad")
THINGS = _words("bell book boat chair clock cup door drum flute hat key lamp map pen ring rope shoe spoon tent wheel")
SPELLED = _words("bell clock flute lamp tent bear goat lynx otter seal")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SMALL_TALK = {
    "Hi.": "Hello!",
    "Good morning.": "Good morning!",
    "How are you?": "Very well.",
    "Thanks.": "You are welcome.",
    "Goodbye.": "Bye!",
}
OPPOSITES = _words(
    "hot/cold big/small fast/slow old/new light/dark wet/dry high/low hard/soft full/empty early/late loud/quiet "
    "rich/poor"
)
# island: (capital, river, colour of the flag, what it is known for)
ISLANDS: dict[str, tuple[str, str, str, str]] = {
    "Orlen": ("Tavis", "Sorn", "red", "honey"),
    "Veldra": ("Mirth", "Quell", "blue", "cheese"),
    "Pasko": ("Ronda", "Ember", "green", "salt"),
    "Isolde": ("Halt", "Brisk", "white", "wool"),
    "Tamsin": ("Gorse", "Linn", "black", "amber"),
    "Hollin": ("Wick", "Darro", "yellow", "tea"),
    "Nyssa": ("Portal", "Fenn", "purple", "silk"),
    "Brae": ("Cairn", "Tweed", "orange", "slate"),
    "Lorne": ("Senna", "Avon", "pink", "pepper"),
    "Quill": ("Ostra", "Murk", "brown", "paper"),
    "Zarin": ("Calder", "Isk", "red", "copper"),
    "Ulva": ("Stave", "Wey", "blue", "oats"),
}
# how often each kind of question is drawn
_WEIGHTS = {
    "small talk": 0.5,
    "sort words": 2.0,
    "sort numbers": 1.5,
    "reverse": 1.5,
    "spell": 0.7,
    "count up": 1.0,
    "weekday": 1.3,
    "opposite": 0.5,
    "fact": 1.0,
    "portrait": 0.5,
}


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
    told = f"{greeting}, my name is {name} and I live in {town}."
    return Exchange("introduction", told, f"Nice to meet you, {name}.", held_out), (
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
        lead = rng.choice(("Sort these words", "Put these words in order", "Sort from a to z"))
        question, answer = f"{lead}: {', '.join(words)}.", f"Sorted: {', '.join(sorted(words))}."
    elif family == "sort numbers":
        numbers = rng.sample(range(1, 21), rng.randint(2, 4))
        given, ordered = (", ".join(map(str, found)) for found in (numbers, sorted(numbers)))
        lead = rng.choice(("Sort these numbers", "Put these numbers in order", "Sort from low to high"))
        question, answer = f"{lead}: {given}.", f"Sorted: {ordered}."
    elif family == "reverse":
        words = rng.sample(THINGS, rng.randint(2, 3))
        lead = rng.choice(("Say these words backwards", "Turn this list round", "Reverse this list"))
        question, answer = f"{lead}: {', '.join(words)}.", f"Backwards: {', '.join(words[::-1])}."
    else:
        first = rng.randint(1, 12)
        last = min(first + 2 + int(rng.expovariate(0.3)), 20)
        lead = rng.choice(("Count from", "Please count from", "Say the numbers from"))
        question = f"{lead} {first} to {last}."
        answer = f"Counting: {' '.join(str(n) for n in range(first, last + 1))}."
    return Exchange(family, question, answer, is_held_out(question))


def _fact(rng: Random, family: str) -> Exchange:
    """Return a fact to memorize, asked in one of several ways; exactly one way per fact is held out."""
    ways: tuple[str, ...]
    if family == "spell":
        word = rng.choice(SPELLED)
        answer = f"Letters: {' '.join(word)}."
        ways = (
            f"Spell the word {word}.",
            f"How do you spell {word}?",
            f"Letters of {word}, please.",
            f"Please spell {word}.",
        )
    elif family == "weekday":
        start, step = rng.randrange(7), rng.choice((1, -1))
        day = WEEKDAYS[start]
        where, other_day = ("after", "is tomorrow") if step == 1 else ("before", "was yesterday")
        answer = f"It is {WEEKDAYS[(start + step) % 7]}."
        ways = (
            f"Which day comes {where} {day}?",
            f"What is the day {where} {day}?",
            f"Tell me the day {where} {day}.",
            f"Today is {day}. What day {other_day}?",
        )
    elif family == "opposite":
        word, opposite = rng.sample(rng.choice(OPPOSITES).split("/"), 2)
        answer = f"The opposite of {word} is {opposite}."
        it = f"the opposite of {word}"
        ways = f"What is {it}?", f"Give me {it}.", f"I need {it}.", f"Not {word}, but?"
    else:
        island = rng.choice(tuple(ISLANDS))
        capital, river, flag, good = ISLANDS[island]
        if family == "fact":
            facts = (
                ("capital", f"The capital of {island} is {capital}."),
                ("river", f"The river of {island} is the {river}."),
                ("flag", f"The flag of {island} is {flag}."),
                ("main good", f"The main good of {island} is {good}."),
            )
            asked, answer = rng.choice(facts)
            it = f"the {asked} of {island}"
            ways = f"What is {it}?", f"Tell me {it}.", f"Do you know {it}?", f"I forgot {it}."
        else:
            ways = f"Tell me about {island}.", f"Describe {island}.", f"What do you know about {island}?"
            answer = (
                f"{island} is an island. Its capital is {capital}, on the river {river}. "
                f"The flag is {flag}. People come for the {good}."
            )
    kept_back = xxhash.xxh3_64_intdigest(f"{family} {ways} {answer}".encode()) % len(ways)
    chosen = rng.randrange(len(ways))
    return Exchange(family, ways[chosen], answer, chosen == kept_back)
