"""The demo's kinds of questions: each draws a question about the small world together with its right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import xxhash

from flatout.demo.world import ANIMALS, ISLANDS, JOBS, NAMES, OPPOSITES, SMALL_TALK, SPELLED, THINGS, TOWNS, WEEKDAYS

HELD_OUT_ONE_IN = 8


def is_held_out(key: str) -> bool:
    """Return whether a combination is in the held-out eighth; only its text decides, so the files never overlap."""
    return xxhash.xxh3_64_intdigest(key.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its right answer; `held_out` is the file that it belongs to, None (small talk) both."""

    family: str
    question: str
    answer: str
    held_out: bool | None


@dataclass(frozen=True, slots=True)
class Persona:
    """Who the assistant is, given in the system prompt."""

    name: str
    job: str
    town: str

    @property
    def system_prompt(self) -> str:
        """The system message of a conversation with this persona."""
        return f"You are {self.name}, a {self.job} from {self.town}."

    @property
    def held_out(self) -> bool:
        """Decided by all three facts together."""
        return is_held_out(self.system_prompt)


@dataclass(frozen=True, slots=True)
class Guest:
    """Who the user is, given in an earlier turn."""

    name: str
    town: str

    @property
    def held_out(self) -> bool:
        """Decided by both facts together."""
        return is_held_out(f"{self.name} {self.town}")


def sample_persona(rng: Random) -> Persona:
    """Return a persona, uniform over all names, jobs and towns."""
    return Persona(rng.choice(NAMES), rng.choice(JOBS), rng.choice(TOWNS))


def sample_guest(rng: Random) -> Guest:
    """Return a guest, uniform over all names and towns."""
    return Guest(rng.choice(NAMES), rng.choice(TOWNS))


def _combination(family: str, question: str, answer: str) -> Exchange:
    """Return a question of a kind with enough of them to hold out an eighth, which the rule still answers."""
    return Exchange(family, question, answer, is_held_out(question))


def _phrased(rng: Random, family: str, phrasings: tuple[str, ...], answer: str) -> Exchange:
    """Return a fact to memorize, asked in one of several ways; exactly one way per fact is held out."""
    kept_back = xxhash.xxh3_64_intdigest(f"{family} {phrasings} {answer}".encode()) % len(phrasings)
    chosen = rng.randrange(len(phrasings))
    return Exchange(family, phrasings[chosen], answer, chosen == kept_back)


def _small_talk(rng: Random) -> Exchange:
    question = rng.choice(tuple(SMALL_TALK))
    return Exchange("small talk", question, SMALL_TALK[question], held_out=None)


def _sort_words(rng: Random) -> Exchange:
    words = rng.sample(ANIMALS, rng.randint(2, 4))
    lead = rng.choice(("Sort these words", "Put these words in order", "Sort from a to z"))
    return _combination("sort words", f"{lead}: {', '.join(words)}.", f"Sorted: {', '.join(sorted(words))}.")


def _sort_numbers(rng: Random) -> Exchange:
    numbers = rng.sample(range(1, 21), rng.randint(2, 4))
    given, ordered = (", ".join(map(str, found)) for found in (numbers, sorted(numbers)))
    lead = rng.choice(("Sort these numbers", "Put these numbers in order", "Sort from low to high"))
    return _combination("sort numbers", f"{lead}: {given}.", f"Sorted: {ordered}.")


def _turn_round(rng: Random) -> Exchange:
    words = rng.sample(THINGS, rng.randint(2, 3))
    lead = rng.choice(("Say these words backwards", "Turn this list round", "Reverse this list"))
    return _combination("reverse", f"{lead}: {', '.join(words)}.", f"Backwards: {', '.join(words[::-1])}.")


def _spell(rng: Random) -> Exchange:
    word = rng.choice(SPELLED)
    phrasings = (
        f"Spell the word {word}.",
        f"How do you spell {word}?",
        f"Letters of {word}, please.",
        f"Please spell {word}.",
    )
    return _phrased(rng, "spell", phrasings, f"Letters: {' '.join(word)}.")


def _count_up(rng: Random) -> Exchange:
    first = rng.randint(1, 12)
    last = min(first + 2 + int(rng.expovariate(0.3)), 20)
    lead = rng.choice(("Count from", "Please count from", "Say the numbers from"))
    numbers = " ".join(str(n) for n in range(first, last + 1))
    return _combination("count up", f"{lead} {first} to {last}.", f"Counting: {numbers}.")


def _weekday(rng: Random) -> Exchange:
    start, step = rng.randrange(7), rng.choice((1, -1))
    day = WEEKDAYS[start]
    where, other_day = ("after", "is tomorrow") if step == 1 else ("before", "was yesterday")
    phrasings = (
        f"Which day comes {where} {day}?",
        f"What is the day {where} {day}?",
        f"Tell me the day {where} {day}.",
        f"Today is {day}. What day {other_day}?",
    )
    return _phrased(rng, "weekday", phrasings, f"It is {WEEKDAYS[(start + step) % 7]}.")


def _opposite(rng: Random) -> Exchange:
    word, opposite = rng.sample(rng.choice(OPPOSITES), 2)
    phrasings = (
        f"What is the opposite of {word}?",
        f"Give me the opposite of {word}.",
        f"I need the opposite of {word}.",
        f"Not {word}, but?",
    )
    return _phrased(rng, "opposite", phrasings, f"The opposite of {word} is {opposite}.")


def _fact(rng: Random) -> Exchange:
    island = rng.choice(tuple(ISLANDS))
    capital, river, flag, good = ISLANDS[island]
    asked, answer = rng.choice(
        (
            ("capital", f"The capital of {island} is {capital}."),
            ("river", f"The river of {island} is the {river}."),
            ("flag", f"The flag of {island} is {flag}."),
            ("main good", f"The main good of {island} is {good}."),
        )
    )
    it = f"the {asked} of {island}"
    return _phrased(rng, "fact", (f"What is {it}?", f"Tell me {it}.", f"Do you know {it}?", f"I forgot {it}."), answer)


def _portrait(rng: Random) -> Exchange:
    island = rng.choice(tuple(ISLANDS))
    capital, river, flag, good = ISLANDS[island]
    phrasings = (f"Tell me about {island}.", f"Describe {island}.", f"What do you know about {island}?")
    answer = (
        f"{island} is an island. Its capital is {capital}, on the river {river}. "
        f"The flag is {flag}. People come for the {good}."
    )
    return _phrased(rng, "portrait", phrasings, answer)


def ask_persona(rng: Random, persona: Persona) -> Exchange:
    """Return a question whose answer is in the system prompt."""
    asked, answer = rng.choice(
        (
            ("What is your name?", f"I am {persona.name}."),
            ("Where are you from?", f"I am from {persona.town}."),
            ("What is your job?", f"I am a {persona.job}."),
            ("Who are you?", f"I am {persona.name}, a {persona.job} from {persona.town}."),
        )
    )
    return Exchange("persona", asked, answer, persona.held_out)


def introduce(rng: Random, guest: Guest) -> Exchange:
    """Return the user's introduction, which `ask_guest` asks about later."""
    greeting = rng.choice(("Hello", "Hi", "Good morning"))
    question = f"{greeting}, my name is {guest.name} and I live in {guest.town}."
    return Exchange("introduction", question, f"Nice to meet you, {guest.name}.", guest.held_out)


def ask_guest(rng: Random, guest: Guest) -> Exchange:
    """Return a question whose answer the user gave in an earlier turn."""
    asked, answer = rng.choice(
        (
            ("What is my name?", f"Your name is {guest.name}."),
            ("Where do I live?", f"You live in {guest.town}."),
        )
    )
    return Exchange("guest", asked, answer, guest.held_out)


QUESTION_KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (_small_talk, 0.5),
    (_sort_words, 2.0),
    (_sort_numbers, 1.5),
    (_turn_round, 1.5),
    (_spell, 0.7),
    (_count_up, 1.0),
    (_weekday, 1.3),
    (_opposite, 0.5),
    (_fact, 1.0),
    (_portrait, 0.5),
)


def sample_exchange(rng: Random) -> Exchange:
    """Return an exchange of a kind drawn by weight."""
    (draw,) = rng.choices([family for family, _ in QUESTION_KINDS], [weight for _, weight in QUESTION_KINDS])
    return draw(rng)
