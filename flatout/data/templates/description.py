"""What a chat template does, found by rendering probes: facts, and problems with one remedy each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

StopsFrom = Literal["template", "next turn", "setting", "nothing"]
Treatment = Literal["written", "dropped", "refused"]
_WIDTH, _INDENT = 80, 35
_HEAD, _TAIL = 60, 40
EARLIER = "an earlier answer"
"""The kind of answer that data.lost_reasoning: split trains in a sample of its own."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that training would learn and inference not show, or the other way round, and what mends it."""

    what: str
    remedy: str
    answer: str = ""  # the kind of answer that it is about


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A kind of answer before which inference shows other text (`shown`) than training does (`trained`)."""

    answer: str
    trained: str
    shown: str


@dataclass(frozen=True, slots=True)
class TemplateDescription:
    """How a template writes a conversation.

    `opens` stands between a question and its answer, `prompt` is what the generation prompt adds, and `ends` follows
    the last answer. `stops` are the texts, tokens where there are any, that end an answer, and carry loss; they are the
    template's own, the marker of the next turn, or the one of `data.end_of_turn`. `reasoning` is (before, after) the
    text of reasoning, empty if the template writes none; `empty_reasoning` stands before an answer without any.
    The treatments are of reasoning in the last answer and before the last question, and of other parts of a row.
    """

    name: str
    opens: str
    prompt: str
    ends: str
    stops: tuple[str, ...]
    stops_from: StopsFrom
    reasoning: tuple[str, str]
    empty_reasoning: str
    last_reasoning: Treatment
    earlier_reasoning: Treatment
    system: Treatment
    tools: Treatment
    calls: Treatment
    results: Treatment
    mismatches: tuple[Mismatch, ...] = ()
    problems: tuple[Problem, ...] = ()

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, value) of every fact, for a person."""
        yield "an answer opens with", brief(self.opens) if self.opens else "nothing"
        yield "the generation prompt adds", brief(self.prompt) if self.prompt else "nothing"
        same = "no: see below" if {mismatch.answer for mismatch in self.mismatches} - {EARLIER} else "yes"
        yield "answers begin with exactly that", same
        yield "an answer ends with", brief(self.ends) if self.ends else "nothing"
        source = {"template": "", "next turn": " (it opens the next turn)", "setting": " (data.end_of_turn)"}
        stops = ", ".join(map(repr, self.stops)) + source.get(self.stops_from, "")
        yield "what stops it, with loss", stops if self.stops else "nothing"
        tags = f" between {self.reasoning[0]!r} and {self.reasoning[1]!r}" if self.last_reasoning == "written" else ""
        yield "reasoning in the last answer", self.last_reasoning + tags
        yield "reasoning of earlier answers", self.earlier_reasoning
        yield "an answer without reasoning", f"gets {self.empty_reasoning!r}" if self.empty_reasoning else "as it is"
        yield from {"system prompt": self.system, "tools": self.tools, "tool calls": self.calls}.items()
        yield "tool results", self.results

    def summary_lines(self) -> list[str]:
        """Return what a build prints: one sentence of what is learnt, and one for each problem."""
        stops = ", ".join(map(repr, self.stops)) or "nothing"
        lines = [f"chat template {self.name!r}: an answer follows {brief(self.prompt)}, and ends with {stops}"]
        return lines + [f"chat template {self.name!r}: {problem.what}; {problem.remedy}" for problem in self.problems]

    def lines(self) -> list[str]:
        """Return a line for each fact and each problem, wrapped at 80 columns."""
        lines = [f"chat template {self.name!r}"]
        for name, value in self.facts():
            first, *more = textwrap.wrap(value, _WIDTH - _INDENT, break_on_hyphens=False)
            lines += [f"  {name + ':':<{_INDENT - 2}}{first}", *(" " * _INDENT + line for line in more)]
        for problem in self.problems:
            text = f"{problem.what}; {problem.remedy}"
            lines += textwrap.wrap(f"! {text}", _WIDTH, subsequent_indent="  ", break_long_words=False)
        return lines


def brief(text: str) -> str:
    """Return a text of a template quoted, a long one without its middle."""
    return repr(text if len(text) <= 2 * (_HEAD + _TAIL) else f"{text[:_HEAD]} ... {text[-_TAIL:]}")
