"""Finds a turn in the rendered text: by rendering prefixes, or by varying only the turn's text.

G is the generation prompt (what a template adds to ask for an answer), `full` the whole rendering:

1. Prefix: render(messages[:k], G) must be a prefix of `full`; the turn begins at its end. render(messages[:k+1], G)
   without its G must be one too; the turn ends at its end, without white space (ChatML's newline after <|im_end|>).
2. Variation, for templates that rewrite earlier turns (Qwen3 removes their thinking) or whose prompt has more than
   the header (an opened <think>): the turn's text is replaced by two probes with different first and last letters.
   What the two renderings share before and after the probe is exactly what does not come from the turn.
   `full` must begin and end with it.
3. Parts, for templates that write a tool's result inside the model's turn (Gemma 4), or an answer's header behind the
   question (DeepSeek-V3.2): the turn begins where it departs from what inference shows before it, and ends with the
   template's stop behind its last part.
The first two never search the data's own text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from flatout.data.conversation import PICTURE
from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate, RawMessage
from flatout.errors import DataError, SettingError

Span = tuple[int, int]
_MARKUP_CHARS = 128  # no tag is longer
# Letters only: no template trims, splits or escapes them. They differ at both ends and occur in no real text.
PROBES = ("QxprobeoneZkj", "WyprobetwoVhg")


class UnprovenMaskError(SettingError):
    """What carries loss in the rendered text could not be proved."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One conversation as passed to the template, and its full rendering."""

    template: ChatTemplate
    messages: Sequence[RawMessage]
    tools: Sequence[Mapping[str, Any]]
    text: str

    def attempt(self, messages: Sequence[RawMessage], *, prompt: bool = False) -> str | None:
        """Render other messages with the same tools; return None if there are none or the template refuses them."""
        try:
            return self.template.render(messages, self.tools, generation_prompt=prompt) if messages else None
        except RENDER_ERRORS:
            return None


class PartRuns:
    """The parts of one row, (turn, start, end) ascending, as runs of the same turn; -1 is no turn's."""

    def __init__(self, parts: Sequence[tuple[int, int, int]], text: str, stops: Sequence[str]) -> None:
        """`parts` are in the rendered `text`, and `stops` end an answer."""
        runs = [(turn, list(run)) for turn, run in groupby(parts, key=itemgetter(0))]
        self._text, self._stops = text, stops
        self._turns = [turn for turn, _ in runs]
        self._firsts = [run[0][1] for _, run in runs] + [len(text)]
        self._lasts = [0] + [run[-1][2] for _, run in runs]
        self._of: dict[int, list[int]] = {}
        for index, turn in enumerate(self._turns):
            self._of.setdefault(turn, []).append(index)

    def __contains__(self, turn: int) -> bool:
        return turn in self._of

    def around(self, turn: int) -> tuple[int, int, int, int]:
        """Return the end of the part before a turn, its own first start and last end, and the start of the next."""
        first, last = self._of[turn][0], self._of[turn][-1]
        return self._lasts[first], self._firsts[first], self._lasts[last + 1], self._firsts[last + 1]

    def between(self, earlier: int, turn: int) -> tuple[Span, list[Span]]:
        """Return an earlier turn's last run, and what no part covers from there to a turn.

        Where no earlier turn is asked for (it is the turn itself), it is the run before the turn; (0, 0) if there is
        none.
        """
        last = self._of[turn][0]
        first = self._of[earlier][-1] if earlier < turn else last - 1
        gaps = [(self._lasts[run + 1], self._firsts[run + 1]) for run in range(first, last)]
        return ((self._firsts[first], self._lasts[first + 1]) if first >= 0 else (0, 0)), gaps

    def stop_in(self, start: int, end: int) -> int | None:
        """Return where the first stop in a range ends; without stops, the end of the text if it is in the range."""
        if not self._stops:
            return len(self._text.rstrip()) if end == len(self._text) else None
        ends = [at + len(stop) for stop in self._stops if (at := self._text.find(stop, start, end)) >= 0]
        return min(ends, default=None)

    def require_stop(self, turn: int) -> None:
        """Raise UnprovenMaskError if a turn goes on behind another's part inside it, and nothing ends it there."""
        _, _, own_end, after = self.around(turn)
        if self._stops and self._foreign(turn) and self.stop_in(own_end, after) is None:
            raise UnprovenMaskError(
                f"messages[{turn}]: it writes the text beside a tool call behind the tool's result, where nothing ends "
                "it; put that text into the answer that follows, or choose another template (data.template)"
            )

    def without_foreign(self, span: Span, turn: int) -> list[Span]:
        """Return a turn's range without what the template writes of other turns inside it. Raises UnprovenMaskError.

        The stop that precedes the other turn's part belongs to the range: there the model stops, and the tool answers.
        """
        pieces, start = [], span[0]
        for own_end, foreign_start, own_start in self._foreign(turn):
            end = self.stop_in(own_end, foreign_start) if self._stops else None
            if end is None:
                raise UnprovenMaskError(
                    f"messages[{turn}]: it writes another message inside this turn, with no token that ends the turn "
                    "before"
                )
            pieces.append((start, end))
            start = own_start
        return [*pieces, (start, span[1])]

    def _foreign(self, turn: int) -> list[tuple[int, int, int]]:
        """Return the runs of other turns inside a turn: (its part before ends, theirs starts, its next starts)."""
        return [
            (self._lasts[one + 1], self._firsts[one + 1], self._firsts[two])
            for one, two in pairwise(self._of[turn])
            if any(other not in (turn, -1) for other in self._turns[one + 1 : two])
        ]


class TurnFinder:
    """Finds turns of one template, from its generation prompt and the ways in which its turns open."""

    def __init__(self, template: ChatTemplate) -> None:
        """Probe the template. Raises DataError if asking for an answer changes the text before it."""
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        plain, asked = template.render([user]), template.render([user], generation_prompt=True)
        self._markup = template.markup
        self._tokens = template.tokens.keys()
        # Phi-3's template ends every text with eos unless it asks for an answer
        self._eos = template.tokenizer.eos_token or ""
        ends = [self._eos, *(match[0] for match in self._markup.finditer(plain))]
        stems = (plain, plain.removesuffix(ends[0]), plain.removesuffix(ends[-1]))
        stem = next((stem for stem in stems if asked.startswith(stem)), None)
        if stem is None:
            raise DataError(
                f"chat template {template.name!r}: the generation prompt changes the text before it, so masks "
                "cannot be proved; use a template with {% generation %} marks, or one of flatout's (data.template)"
            )
        self._prompt, self._plain = asked[len(stem) :], plain
        rendering = Rendering(template, (), (), "")
        self._header = self._find_header(rendering)
        # how assistant turns open: (length shared with the generation prompt, what is inserted after it)
        openings: set[tuple[int, str]] = set()
        for tail in ([], [user, answer]):
            for fields in (("content",), ("reasoning_content", "thinking")):
                turns = [answer | dict.fromkeys(fields, probe) for probe in PROBES]
                split = _split(*(rendering.attempt([user, turn, *tail]) for turn in turns))
                if split is not None and split[0].startswith(stem):
                    opening = split[0][len(stem) :]
                    shared = self.shared_whole(opening, self._prompt)
                    if shared:
                        openings.add((shared, opening[shared:]))
        self._openings = sorted(openings, key=lambda item: item[0] + len(item[1]), reverse=True)

    def _find_header(self, rendering: Rendering) -> str:
        """Return the first tag of the generation prompt that ends no answer, or the last of what asks for one."""
        user, answer = {"role": "user", "content": PROBES[0]}, {"role": "assistant", "content": PROBES[1]}
        asked, both = rendering.attempt([user], prompt=True) or "", rendering.attempt([user, answer, user]) or ""
        ended = self._markup.findall(both.partition(PROBES[1])[2])[:1]
        tags = self._markup.findall(self._prompt) or self._markup.findall(asked.rpartition(PROBES[0])[2])[-1:]
        return next((tag for tag in tags if tag not in ended), "")

    @property
    def prompt(self) -> str:
        """What the template adds to ask for an answer to one question."""
        return self._prompt

    def has_marker(self, text: str, like: Sequence[str]) -> bool:
        """Whether a text holds a token; a tag will do if none of `like` is a token. What closes a tag is neither."""
        tags = (match[0] for match in self._markup.finditer(text) if match[0][1] != "/" or match[0] == self._eos)
        return any(tag in self._tokens or self._tokens.isdisjoint(like) for tag in tags)

    def shared_whole(self, text: str, prompt: str) -> int:
        """Return the length of the longest common prefix that ends inside no tag and no word of either.

        <think> and </think> share "<", which is no place for a range to begin.
        """
        length = shared_length(text, prompt)
        if length == len(prompt) or length == len(text):
            return length
        for one in (text, prompt):
            for match in self._markup.finditer(one, max(0, length - _MARKUP_CHARS), length + _MARKUP_CHARS):
                if match.start() < length < match.end():
                    length = match.start()
        while length and text[length - 1].isalnum() and (text[length].isalnum() or prompt[length].isalnum()):
            length -= 1
        return length

    def span(self, rendering: Rendering, turn: int) -> Span:
        """Return the half-open character range of one turn's text with its end-of-turn token, without its header.

        For an assistant turn the text is everything after the generation prompt, including reasoning and tool calls.
        Raises UnprovenMaskError.
        """
        start = end = None
        is_answer = rendering.messages[turn]["role"] == "assistant"
        before = rendering.attempt(rendering.messages[:turn], prompt=True) if is_answer else None
        if before is not None and rendering.text.startswith(before):
            start = len(before)
            end = self._end_by_prefix(rendering, turn, start)
        if start is None or end is None:
            start, end = self._by_variation(rendering, turn, start)
        text, content = rendering.text[start:end], str(rendering.messages[turn]["content"]).strip()
        # two rewrites are allowed: thinking written inside the content, and tool results written as JSON text
        has_text = all(piece.strip() in text for piece in content.split(PICTURE))
        holds = has_text or "</think>" in content or rendering.messages[turn]["role"] == "tool"
        if start > end or not holds:
            raise UnprovenMaskError(f"messages[{turn}]: the range found for the turn does not contain its text")
        return start, end

    def proved(self, rendering: Rendering, turn: int, runs: PartRuns) -> Span:
        """Return `span`, or the range by the turn's parts; that of an answer begins behind its header."""
        try:
            start, end = self.span(rendering, turn)
        except UnprovenMaskError:
            if (by_parts := self._by_parts(rendering, turn, runs)) is None:
                raise
            start, end = by_parts
        if rendering.messages[turn]["role"] == "assistant":
            start = self._behind_header(rendering, turn, start, runs.around(turn)[1])
        return start, end

    def _behind_header(self, rendering: Rendering, turn: int, start: int, own_start: int) -> int:
        """Return where an answer begins behind what inference shows directly before it, if other text precedes that.

        Raises UnprovenMaskError if its header would still carry loss.
        """
        shown = rendering.attempt(rendering.messages[:turn], prompt=True) or self._prompt
        lead = rendering.text[start:own_start]
        if turn and rendering.text.startswith(
            shown
        ):  # it may not ask for a second answer in a row, and yet give it a header
            return start + len(self._prompt) * lead.startswith(self._prompt)
        near = "".join(shown[-2 * len(lead) - _MARKUP_CHARS :].split())
        first = next((tag.end() for tag in self._markup.finditer(lead)), len(lead) + 1)
        ends = (end for end in range(len(lead), first - 1, -1) if near.endswith("".join(lead[:end].split())))
        if end := len(lead[: next(ends, 0)].rstrip()):
            start += end + shared_length(lead[end:], shown[len(shown.rstrip()) :])
        if self._header and self._header in rendering.text[start:own_start]:
            raise UnprovenMaskError(
                f"messages[{turn}]: it writes {lead!r} before this answer, but {shown[-len(lead) :]!r} where it asks "
                "for one; use another template (data.template)"
            )
        return start

    def asks_again(self, text: str, shown: str, own_start: int) -> bool:
        """Whether inference shows the header of an answer that follows another, or its tool's result."""
        header = self._header or self._prompt
        return text.startswith(shown) and not (header and header in text[len(shown) : own_start])

    def _end_by_prefix(self, rendering: Rendering, turn: int, start: int) -> int | None:
        turns = rendering.messages[: turn + 1]
        until = rendering.attempt(turns, prompt=True)
        if until is not None:
            until = until.removesuffix(self._prompt)
        if until is None or not rendering.text.startswith(until):
            until = rendering.attempt(turns)
        if until is None or not rendering.text.startswith(until) or len(until) < start:
            return None
        end = max(start, len(until.rstrip()))
        content = str(rendering.messages[turn]["content"])
        if content.strip() and rendering.text[start:end].endswith(content.rstrip()):
            return None  # no end of turn in the text, or a trimmed one: the variation finds where the content ends
        return end

    def _by_variation(self, rendering: Rendering, turn: int, start: int | None) -> Span:
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
        raise UnprovenMaskError(
            f"messages[{turn}] ({message['role']}): it rewrites the text around this turn, so the turn's range cannot "
            "be proved; use a template with {% generation %} marks, or one of flatout's (data.template)"
        )

    def _start_by_variation(self, rendering: Rendering, turn: int, before: str) -> int | None:
        if rendering.messages[turn]["role"] != "assistant":
            return len(before) if rendering.text.startswith(before) else None
        if not turn and not self._openings:  # without a header, the first turn begins where a question would
            return min(self.shared_whole(rendering.text, self._plain), len(before))
        for length, inserted in self._openings:
            base = len(before) - len(inserted) - length
            if before.endswith(self._prompt[:length] + inserted) and rendering.text.startswith(before[:base]):
                shared = self.shared_whole(
                    rendering.text[base : base + len(self._prompt) + _MARKUP_CHARS], self._prompt
                )
                departures = [departure for departure, _ in self._openings if departure <= shared]
                if departures:
                    return base + max(departures)
        return None

    def _surroundings(self, rendering: Rendering, turn: int, candidate: RawMessage) -> tuple[str, str, str] | None:
        """Return what is before and after a turn's text for any such text, and the turn's part of what is after."""
        past, later = list(rendering.messages[:turn]), rendering.messages[turn + 1 :]
        first, second = ({**candidate, "content": probe} for probe in PROBES)
        split = _split(rendering.attempt([*past, first, *later]), rendering.attempt([*past, second, *later]))
        if split is None:
            return None
        before, after = split
        for prompt in (True, False):
            short = rendering.attempt([*past, first], prompt=prompt)
            if short is None or short.count(PROBES[0]) != 1:
                continue
            rest = short.partition(PROBES[0])[2]
            if prompt:
                rest = rest.removesuffix(self._prompt)
            if after.startswith(rest):
                return before, after, rest
        return None

    def _by_parts(self, rendering: Rendering, turn: int, runs: PartRuns) -> Span | None:
        text = rendering.text
        before, own_start, own_end, after = runs.around(turn)
        shown = rendering.attempt(rendering.messages[:turn], prompt=True)
        if rendering.messages[turn]["role"] != "assistant" or shown is None:
            return None
        # it begins where it departs from what inference shows before it, if that is behind the part before it
        anchor = text[slice(*runs.between(turn, turn)[0])]
        start = self.shared_whole(text, shown)
        if not before <= start <= own_start:  # earlier turns are rewritten: compare behind the last part before
            if anchor not in shown:
                return None
            start = before + self.shared_whole(text[before:own_start], shown.rpartition(anchor)[2])
        is_bare = not text[before:own_start].strip()  # the turn has no header at all
        if start <= before and not is_bare and not shown.endswith(anchor):
            return None
        end, behind = runs.stop_in(own_end, after), text[own_end:after].strip()
        if end is None and (not behind or (self._prompt and behind.startswith(self._prompt.strip()))):
            end = own_end  # the next message goes on in this turn
        return None if end is None else (start, end)


def _split(one: str | None, two: str | None) -> tuple[str, str] | None:
    """Return what two renderings with different probes share before and after them; None if they differ elsewhere."""
    if one is None or two is None:
        return None
    before = one[: shared_length(one, two)]
    after = one[len(one) - shared_length(one[::-1], two[::-1]) :]
    return (before, after) if (one, two) == (before + PROBES[0] + after, before + PROBES[1] + after) else None


def shared_length(one: str, two: str) -> int:
    """Return the length of the longest common prefix, by bisection: comparing slices is far faster than characters."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
