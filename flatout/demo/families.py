"""The question families of the demo: each draws a question about the small world together with its right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from flatout.demo.world import ANIMALS, ISLANDS, JOBS, NAMES, OPPOSITES, SMALL_TALK, SPELLED, THINGS, TOWNS, WEEKDAYS


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its right answer.

    `key` is what must be new for the exchange to count as held out: the question itself, or the facts it asks about;
    None for small talk, which is the same everywhere.
    """

    family: str
    question: str
    answer: str
    key: str | None


@dataclass(frozen=True, slots=True)
class Persona:
    """Who the assistant is, told by the system prompt."""

    name: str
    job: str
    town: str

    @property
    def system_prompt(self) -> str:
        """The system message of a conversation with this persona."""
        return f"You are {self.name}, a {self.job} from {self.town}."

    @property
    def key(self) -> str:
        """What must be new for a held-out persona: all three facts together."""
        return self.system_prompt


@dataclass(frozen=True, slots=True)
class Guest:
    """Who the user is, told in an earlier turn."""

    name: str
    town: str

    @property
    def key(self) -> str:
        """What must be new for a held-out guest: both facts together."""
        return f"{self.name} {self.town}"


def draw_persona(rng: Random) -> Persona:
    """A persona, uniform over all names, jobs and towns."""
    return Persona(rng.choice(NAMES), rng.choice(JOBS), rng.choice(TOWNS))


def draw_guest(rng: Random) -> Guest:
    """A guest, uniform over all names and towns."""
    return Guest(rng.choice(NAMES), rng.choice(TOWNS))


def _exchange(family: str, question: str, answer: str) -> Exchange:
    return Exchange(family, question, answer, key=question)


def _series(words: list[str]) -> str:
    return ", ".join(words)


def _small_talk(rng: Random) -> Exchange:
    question = rng.choice(tuple(SMALL_TALK))
    return Exchange("small talk", question, SMALL_TALK[question], key=None)


def _sort_words(rng: Random) -> Exchange:
    words = rng.sample(ANIMALS, rng.randint(2, 4))
    lead = rng.choice(("Sort these words", "Put these words in order", "Sort from a to z"))
    return _exchange("sort words", f"{lead}: {_series(words)}.", f"Sorted: {_series(sorted(words))}.")


def _sort_numbers(rng: Random) -> Exchange:
    numbers = rng.sample(range(1, 21), rng.randint(2, 4))
    lead = rng.choice(("Sort these numbers", "Put these numbers in order", "Sort from low to high"))
    question = f"{lead}: {_series([str(n) for n in numbers])}."
    return _exchange("sort numbers", question, f"Sorted: {_series([str(n) for n in sorted(numbers)])}.")


def _turn_round(rng: Random) -> Exchange:
    words = rng.sample(THINGS, rng.randint(2, 3))
    lead = rng.choice(("Say these words backwards", "Turn this list round", "Reverse this list"))
    return _exchange("reverse", f"{lead}: {_series(words)}.", f"Backwards: {_series(words[::-1])}.")


def _spell(rng: Random) -> Exchange:
    word = rng.choice(SPELLED)
    if rng.random() < 0.5:
        question = rng.choice((f"Spell the word {word}.", f"How do you spell {word}?", f"Letters of {word}, please."))
        return _exchange("spell", question, f"Letters: {' '.join(word)}.")
    question = rng.choice((f"Spell {word} backwards.", f"Letters of {word} backwards, please."))
    return _exchange("spell backwards", question, f"Backwards: {' '.join(reversed(word))}.")


def _count_up(rng: Random) -> Exchange:
    first = rng.randint(1, 12)
    last = min(first + 2 + int(rng.expovariate(0.3)), 20)
    lead = rng.choice(("Count from", "Please count from", "Say the numbers from"))
    numbers = " ".join(str(n) for n in range(first, last + 1))
    return _exchange("count up", f"{lead} {first} to {last}.", f"Counting: {numbers}.")


def _weekday(rng: Random) -> Exchange:
    start = rng.randrange(7)
    day = WEEKDAYS[start]
    forward, question = rng.choice(
        (
            (True, f"Which day comes after {day}?"),
            (True, f"What is the day after {day}?"),
            (True, f"Today is {day}. What day is tomorrow?"),
            (False, f"Which day comes before {day}?"),
            (False, f"What is the day before {day}?"),
            (False, f"Today is {day}. What day was yesterday?"),
        )
    )
    return _exchange("weekday", question, f"It is {WEEKDAYS[(start + (1 if forward else -1)) % 7]}.")


def _opposite(rng: Random) -> Exchange:
    word, opposite = rng.sample(rng.choice(OPPOSITES), 2)
    question = rng.choice((f"What is the opposite of {word}?", f"Give me the opposite of {word}.", f"Not {word}, but?"))
    return _exchange("opposite", question, f"The opposite of {word} is {opposite}.")


def _fact(rng: Random) -> Exchange:
    island = rng.choice(tuple(ISLANDS))
    capital, river, flag, good = ISLANDS[island]
    ask = rng.choice(("What is", "Tell me", "Do you know", "I forgot"))
    asked, answer = rng.choice(
        (
            ("the capital", f"The capital of {island} is {capital}."),
            ("the river", f"The river of {island} is the {river}."),
            ("the flag", f"The flag of {island} is {flag}."),
            ("the main good", f"The main good of {island} is {good}."),
        )
    )
    return _exchange("fact", f"{ask} {asked} of {island}{'.' if ask in ('Tell me', 'I forgot') else '?'}", answer)


def _portrait(rng: Random) -> Exchange:
    island = rng.choice(tuple(ISLANDS))
    capital, river, flag, good = ISLANDS[island]
    question = rng.choice((f"Tell me about {island}.", f"Describe {island}.", f"What do you know about {island}?"))
    answer = (
        f"{island} is an island. Its capital is {capital}, on the river {river}. "
        f"The flag is {flag}. People come for the {good}."
    )
    return _exchange("portrait", question, answer)


def ask_persona(rng: Random, persona: Persona) -> Exchange:
    """A question whose answer stands in the system prompt."""
    asked, answer = rng.choice(
        (
            ("What is your name?", f"I am {persona.name}."),
            ("Where are you from?", f"I am from {persona.town}."),
            ("What is your job?", f"I am a {persona.job}."),
            ("Who are you?", f"I am {persona.name}, a {persona.job} from {persona.town}."),
        )
    )
    return Exchange("persona", asked, answer, key=persona.key)


def introduce(rng: Random, guest: Guest) -> Exchange:
    """The user's introduction, which `ask_guest` asks about later."""
    greeting = rng.choice(("Hello", "Hi", "Good morning"))
    question = f"{greeting}, my name is {guest.name} and I live in {guest.town}."
    return Exchange("introduction", question, f"Nice to meet you, {guest.name}.", key=guest.key)


def ask_guest(rng: Random, guest: Guest) -> Exchange:
    """A question whose answer the user gave in an earlier turn."""
    asked, answer = rng.choice(
        (
            ("What is my name?", f"Your name is {guest.name}."),
            ("Where do I live?", f"You live in {guest.town}."),
        )
    )
    return Exchange("guest", asked, answer, key=guest.key)


FAMILIES: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (_small_talk, 0.5),
    (_sort_words, 2.0),
    (_sort_numbers, 1.5),
    (_turn_round, 1.5),
    (_spell, 1.0),
    (_count_up, 1.0),
    (_weekday, 1.3),
    (_opposite, 0.5),
    (_fact, 1.0),
    (_portrait, 0.5),
)


def draw_exchange(rng: Random) -> Exchange:
    """One exchange of a family drawn by its weight."""
    (draw,) = rng.choices([family for family, _ in FAMILIES], [weight for _, weight in FAMILIES])
    return draw(rng)
