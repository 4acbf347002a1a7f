"""Tells right answers from wrong ones by reading the prompt alone: what the demo's model is marked by."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from flatout.demo.conversations import ChatMessage
from flatout.demo.world import ANIMALS, ISLANDS, JOBS, NAMES, OPPOSITES, SMALL_TALK, THINGS, TOWNS, WEEKDAYS

NUMBERS = frozenset(str(number) for number in range(100))
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
FACTS = frozenset(ISLANDS) | {fact for facts in ISLANDS.values() for fact in facts}


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of question: the words that matter in its answer, and which of them, in which order, are right.

    `truth` gets the match of `pattern` on the question and all user and system text before it.
    """

    pattern: re.Pattern[str]
    words: Collection[str]
    truth: Callable[[re.Match[str], str], Sequence[str]]


def check(prompt: Sequence[ChatMessage], answer: str) -> bool:
    """Whether `answer` is right for the last message of `prompt`, judged by the words that matter and their order.

    Raises ValueError for a question that no rule knows.
    """
    question = prompt[-1]["content"]
    told = " ".join(message["content"] for message in prompt[:-1] if message["role"] != "assistant")
    for rule in RULES:
        if match := rule.pattern.fullmatch(question):
            said = [word for word in _words_of(answer) if word in rule.words]
            return said == list(rule.truth(match, told))
    raise ValueError(f"no rule knows the question {question!r}")


def _words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _listed(match: re.Match[str]) -> list[str]:
    return _words_of(match["list"])


def _counted(match: re.Match[str]) -> list[str]:
    return [str(number) for number in range(int(match["first"]), int(match["last"]) + 1)]


def _weekday(match: re.Match[str]) -> list[str]:
    monday = date(2024, 1, 1)
    days = 1 if match["way"] in ("after", "tomorrow") else -1
    return [WEEKDAYS[(monday + timedelta(days=WEEKDAYS.index(match["day"]) + days)).weekday()]]


def _opposite(match: re.Match[str]) -> list[str]:
    word = match["word"]
    return [word, next(b if a == word else a for a, b in OPPOSITES if word in (a, b))]


def _fact(match: re.Match[str]) -> list[str]:
    island = match["island"]
    return [island, ISLANDS[island][("capital", "river", "flag", "main good").index(match["what"])]]


def _all_facts(match: re.Match[str]) -> list[str]:
    return [match["island"], *ISLANDS[match["island"]]]


def _persona(which: slice) -> Callable[[re.Match[str], str], Sequence[str]]:
    def truth(_: re.Match[str], told: str) -> Sequence[str]:
        found = re.search(r"You are (\w+), a (\w+) from (\w+)\.", told)
        return found.groups()[which] if found else ()

    return truth


def _guest(which: int) -> Callable[[re.Match[str], str], Sequence[str]]:
    def truth(_: re.Match[str], told: str) -> Sequence[str]:
        found = re.search(r"my name is (\w+) and I live in (\w+)\.", told)
        return (found.groups()[which],) if found else ()

    return truth


def _rule(pattern: str, words: Collection[str], truth: Callable[[re.Match[str], str], Sequence[str]]) -> Rule:
    return Rule(re.compile(pattern), frozenset(words), truth)


PEOPLE = NAMES + JOBS + TOWNS
OPPOSED = tuple(word for pair in OPPOSITES for word in pair)
CHATTED = frozenset(word for reply in SMALL_TALK.values() for word in _words_of(reply))
RULES = (
    _rule("|".join(map(re.escape, SMALL_TALK)), CHATTED, lambda m, _: _words_of(SMALL_TALK[m[0]])),
    _rule(r"(Sort|Put) .*(words|z)\b.*?: (?P<list>[\w, ]+)\.", ANIMALS, lambda m, _: sorted(_listed(m))),
    _rule(r"(Sort|Put) .*(numbers|high)\b.*?: (?P<list>[\d, ]+)\.", NUMBERS, lambda m, _: sorted(_listed(m), key=int)),
    _rule(r"(Say|Turn|Reverse) .*: (?P<list>[\w, ]+)\.", THINGS, lambda m, _: list(reversed(_listed(m)))),
    _rule(
        r"(Spell the word|How do you spell|Please spell|Letters of) (?P<word>\w+)\W.*",
        LETTERS,
        lambda m, _: list(m["word"]),
    ),
    _rule(r".* from (?P<first>\d+) to (?P<last>\d+)\.", NUMBERS, lambda m, _: _counted(m)),
    _rule(r".* (?P<way>after|before) (?P<day>\w+day)\W", WEEKDAYS, lambda m, _: _weekday(m)),
    _rule(r"Today is (?P<day>\w+)\. .* (?P<way>tomorrow|yesterday)\?", WEEKDAYS, lambda m, _: _weekday(m)),
    _rule(r"(.* opposite of|Not) (?P<word>\w+)\W.*", OPPOSED, lambda m, _: _opposite(m)),
    _rule(r".* the (?P<what>capital|river|flag|main good) of (?P<island>\w+)\W", FACTS, lambda m, _: _fact(m)),
    _rule(r"(Tell me|Describe|What do you know).* (?P<island>\w+)\W", FACTS, lambda m, _: _all_facts(m)),
    _rule(r"What is your name\?", PEOPLE, _persona(slice(0, 1))),
    _rule(r"What is your job\?", PEOPLE, _persona(slice(1, 2))),
    _rule(r"Where are you from\?", PEOPLE, _persona(slice(2, 3))),
    _rule(r"Who are you\?", PEOPLE, _persona(slice(0, 3))),
    _rule(r".*, my name is (?P<name>\w+) and I live in \w+\.", PEOPLE, lambda m, _: [m["name"]]),
    _rule(r"What is my name\?", PEOPLE, _guest(0)),
    _rule(r"Where do I live\?", PEOPLE, _guest(1)),
)
