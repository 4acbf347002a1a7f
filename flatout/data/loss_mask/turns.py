"""Finds a turn in the rendered text: by rendering prefixes, or by varying only the turn's text.

G is the generation prompt (what a template adds to ask for an answer), `full` the whole rendering:

1. Prefix: render(messages[:k], G) must be a prefix of `full`; the turn begins at its end. render(messages[:k+1], G)
   without its G must be one too; the turn ends at its end, without white space (ChatML's newline after <|im_end|>).
2. Variation, for templates that rewrite earlier turns (Qwen3 removes their thinking) or whose prompt has more than
   the header (an opened <think>): the turn's text is replaced by two probes with different first and last letters.
   What the two renderings share before and after the probe is exactly what does not come from the turn.
   `full` must begin and end with it.
The data's own text is never searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate, RawMessage
from flatout.errors import DataError

# Letters only: no template trims, splits or escapes them. They differ at both ends and occur in no real text.
PROBES = ("QxprobeoneZkj", "WyprobetwoVhg")


class UnprovenTurnError(ValueError):
    """The place of a turn in the rendered text could not be proved."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One conversation as passed to the template, and its full rendering."""

    template: ChatTemplate
    messages: Sequence[RawMessage]
    tools: Sequence[Mapping[str, Any]]
    text: str

    def prefix(self, num_messages: int, *, prompt: bool, last: RawMessage | None = None) -> str | None:
        """Return the rendering of the first messages (`last` replaces the last one), or None if it is refused."""
        if num_messages == 0:
            return None
        turns = list(self.messages[:num_messages])
        if last is not None:
            turns[-1] = last
        return self._try(turns, prompt)

    def replaced(self, turn: int, message: RawMessage) -> str | None:
        """Return the full rendering with one message replaced; None if the template refuses it."""
        return self._try([*self.messages[:turn], message, *self.messages[turn + 1 :]], False)

    def _try(self, turns: Sequence[RawMessage], prompt: bool) -> str | None:
        try:
            return self.template.render(turns, self.tools, generation_prompt=prompt)
        except RENDER_ERRORS:
            return None


class TurnFinder:
    """Finds turns of one template, from its generation prompt and the ways in which its turns open."""

    def __init__(self, template: ChatTemplate) -> None:
        """Probe the template. Raises DataError if asking for an answer changes the text before it."""
        self._prompt = _generation_prompt(template)
        self._openings = _openings(template, self._prompt)
        self._departures = sorted({length for length, _ in self._openings}, reverse=True)

    def span(self, rendering: Rendering, turn: int) -> tuple[int, int]:
        """Return the half-open character range of one turn's text with its end-of-turn token, without its header.

        For an assistant turn the text is everything after the generation prompt, including reasoning and tool calls.
        Raises UnprovenTurnError.
        """
        start = end = None
        before = rendering.prefix(turn, prompt=True) if rendering.messages[turn]["role"] == "assistant" else None
        if before is not None and rendering.text.startswith(before):
            start = len(before)
            end = self._end_by_prefix(rendering, turn, start)
        if start is None or end is None:
            start, end = self._by_variation(rendering, turn, start)
        text, content = rendering.text[start:end], str(rendering.messages[turn]["content"]).strip()
        # two rewrites are allowed: thinking written inside the content, and tool results written as JSON text
        holds = content in text or "</think>" in content or rendering.messages[turn]["role"] == "tool"
        if start > end or not holds:
            raise UnprovenTurnError(f"messages[{turn}]: the range found for the turn does not hold its text")
        return start, end

    def _end_by_prefix(self, rendering: Rendering, turn: int, start: int) -> int | None:
        until = rendering.prefix(turn + 1, prompt=True)
        if until is not None and until.endswith(self._prompt):
            until = until[: len(until) - len(self._prompt)]
        if until is None or not rendering.text.startswith(until):
            until = rendering.prefix(turn + 1, prompt=False)
        if until is None or not rendering.text.startswith(until) or len(until) < start:
            return None
        end = max(start, len(until.rstrip()))
        content = str(rendering.messages[turn]["content"])
        if content.strip() and rendering.text[start:end].endswith(content.rstrip()):
            return None  # no end of turn in the text, or a trimmed one: the variation finds where the content ends
        return end

    def _by_variation(self, rendering: Rendering, turn: int, start: int | None) -> tuple[int, int]:
        message = rendering.messages[turn]
        candidates = [{**message, "content": ""}]
        if message["role"] == "assistant":
            candidates.insert(0, {"role": "assistant", "content": ""})
        for candidate in candidates:
            around = self._surroundings(rendering, turn, candidate)
            if around is None or not rendering.text.endswith(around[1]):
                continue
            before, after, rest = around
            begin = start if start is not None else self._start_by_variation(rendering, turn, before)
            if begin is not None:
                return begin, len(rendering.text) - len(after) + len(rest.rstrip())
        raise UnprovenTurnError(
            f"messages[{turn}] ({message['role']}): it rewrites the text around this turn, so the turn's place cannot "
            "be proved; use a template with {% generation %} marks, or one of flatout's (data.template)"
        )

    def _start_by_variation(self, rendering: Rendering, turn: int, before: str) -> int | None:
        if rendering.messages[turn]["role"] != "assistant":
            return len(before) if rendering.text.startswith(before) else None
        for length, inserted in self._openings:
            if not before.endswith(self._prompt[:length] + inserted):
                continue
            base = len(before) - len(inserted) - length
            if not rendering.text.startswith(before[:base]):
                continue
            shared = _shared_length(rendering.text[base : base + len(self._prompt)], self._prompt)
            for departure in self._departures:
                if departure <= shared:
                    return base + departure
        return None

    def _surroundings(self, rendering: Rendering, turn: int, candidate: RawMessage) -> tuple[str, str, str] | None:
        """Return what is before and after a turn's text for any such text, and the turn's part of what is after."""
        first, second = ({**candidate, "content": probe} for probe in PROBES)
        one, two = rendering.replaced(turn, first), rendering.replaced(turn, second)
        if one is None or two is None:
            return None
        if (split := _split(one, two)) is None:
            return None
        before, after = split
        for prompt in (True, False):
            short = rendering.prefix(turn + 1, prompt=prompt, last=first)
            if short is None or short.count(PROBES[0]) != 1:
                continue
            rest = short[short.index(PROBES[0]) + len(PROBES[0]) :]
            if prompt and rest.endswith(self._prompt):
                rest = rest[: len(rest) - len(self._prompt)]
            if after.startswith(rest):
                return before, after, rest
        return None


def _split(one: str, two: str) -> tuple[str, str] | None:
    """Return what two renderings with different probes share before and after them; None if they differ elsewhere."""
    before = one[: _shared_length(one, two)]
    after = one[len(one) - _shared_length(one[::-1], two[::-1]) :]
    if one == before + PROBES[0] + after and two == before + PROBES[1] + after:
        return before, after
    return None


def _shared_length(one: str, two: str) -> int:
    """Return the length of the longest common prefix, by bisection: comparing slices is far faster than characters."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _generation_prompt(template: ChatTemplate) -> str:
    question: list[RawMessage] = [{"role": "user", "content": "a"}]
    plain, asked = template.render(question), template.render(question, generation_prompt=True)
    eos = template.tokenizer.eos_token or ""
    # Phi-3's template ends every text with eos unless it asks for an answer
    for stem in (plain, plain.removesuffix(eos)):
        if asked.startswith(stem):
            return asked[len(stem) :]
    raise DataError(
        f"chat template {template.name!r}: asking for an answer changes the text before it, so masks cannot be proved; "
        "use a template with {% generation %} marks, or one of flatout's (data.template)"
    )


def _openings(template: ChatTemplate, prompt: str) -> list[tuple[int, str]]:
    """Return how assistant turns open: (length shared with the generation prompt, what is inserted after it)."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    asked = template.render([user], generation_prompt=True)
    base = len(asked) - len(prompt)
    found: set[tuple[int, str]] = set()
    for tail in ([], [user, answer]):
        for field in ("content", "reasoning_content"):
            texts = []
            for probe in PROBES:
                turn = {**answer, field: probe}
                if field == "reasoning_content":
                    turn["thinking"] = probe
                try:
                    texts.append(template.render([user, turn, *tail]))
                except RENDER_ERRORS:
                    break
            split = _split(*texts) if len(texts) == 2 else None
            if split is None or not split[0].startswith(asked[:base]):
                continue
            opening = split[0][base:]
            shared = _shared_length(opening, prompt)
            if shared:
                found.add((shared, opening[shared:]))
    return sorted(found, key=lambda item: item[0] + len(item[1]), reverse=True)
