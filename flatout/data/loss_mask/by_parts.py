"""Bounds a turn by its own parts where rendering prefixes or varying its text does not: see turns.

The generation prompt over the messages before shows where an answer begins, and the template's stop where it ends.
Gemma 4 writes a tool's result inside the model's turn, and DeepSeek-V3.2 the answer's header behind the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter

from flatout.data.loss_mask.turns import Rendering, Span, TurnFinder, UnprovenMaskError


class PartRuns:
    """The parts of one row, (turn, start, end) ascending, as runs of the same turn; -1 is no turn's."""

    def __init__(self, parts: Sequence[tuple[int, int, int]], length: int) -> None:
        runs = [(turn, list(run)) for turn, run in groupby(parts, key=itemgetter(0))]
        self._turns = [turn for turn, _ in runs]
        self._firsts = [run[0][1] for _, run in runs] + [length]
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

    def foreign(self, turn: int) -> list[tuple[int, int, int]]:
        """Return the runs of other turns inside a turn: (its part before ends, theirs starts, its next starts)."""
        return [
            (self._lasts[one + 1], self._firsts[one + 1], self._firsts[two])
            for one, two in pairwise(self._of[turn])
            if any(other not in (turn, -1) for other in self._turns[one + 1 : two])
        ]


def span_by_parts(
    finder: TurnFinder, rendering: Rendering, turn: int, runs: PartRuns, stops: Sequence[str]
) -> Span | None:
    """Return the range of an answer with its stop; None if it cannot be proved."""
    text = rendering.text
    _, _, own_end, after = runs.around(turn)
    shown = rendering.attempt(rendering.messages[:turn], prompt=True)
    if rendering.messages[turn]["role"] != "assistant" or shown is None:
        return None
    start = _start(finder, text, shown, runs, turn)
    end = _end(text, own_end, after, stops)
    behind = text[own_end:after].strip()
    if end is None and (not behind or (finder.prompt and behind.startswith(finder.prompt.strip()))):
        end = own_end  # the next message goes on in this turn
    return None if start is None or end is None else (start, end)


def _start(finder: TurnFinder, text: str, shown: str, runs: PartRuns, turn: int) -> int | None:
    """Return where a turn departs from what inference shows before it, if that is behind the part before the turn."""
    before, own_start, _, _ = runs.around(turn)
    anchor = text[slice(*runs.between(turn, turn)[0])]
    start = finder.shared_whole(text, shown)
    if not before <= start <= own_start:  # earlier turns are rewritten: compare behind the last part before
        if anchor not in shown:
            return None
        start = before + finder.shared_whole(text[before:own_start], shown.rpartition(anchor)[2])
    is_bare = not text[before:own_start].strip()  # the turn has no header at all
    return start if start > before or is_bare or shown.endswith(anchor) else None


def require_stop(text: str, runs: PartRuns, turn: int, stops: Sequence[str]) -> None:
    """Raise UnprovenMaskError if a turn goes on behind another's part inside it, and nothing ends it there."""
    _, _, own_end, after = runs.around(turn)
    if runs.foreign(turn) and _end(text, own_end, after, stops or ("",)) is None:
        raise UnprovenMaskError(
            f"messages[{turn}]: it writes the text beside a tool call behind the tool's result, where nothing ends it; "
            "put that text into the answer that follows, or choose another template (data.template)"
        )


def without_foreign(text: str, span: Span, runs: PartRuns, turn: int, stops: Sequence[str]) -> list[Span]:
    """Return a turn's range without what the template writes of other turns inside it. Raises UnprovenMaskError.

    The stop that precedes the other turn's part belongs to the range: there the model stops, and the tool answers.
    """
    pieces, start = [], span[0]
    for own_end, foreign_start, own_start in runs.foreign(turn):
        end = _end(text, own_end, foreign_start, stops) if stops else None
        if end is None:
            raise UnprovenMaskError(
                f"messages[{turn}]: it writes another message inside this turn, with no token that ends the turn before"
            )
        pieces.append((start, end))
        start = own_start
    return [*pieces, (start, span[1])]


def _end(text: str, own_end: int, after: int, stops: Sequence[str]) -> int | None:
    """Return where the first stop behind a turn's last part ends; without stops, the end of the text if it is last."""
    if not stops:
        return len(text.rstrip()) if after == len(text) else None
    return min((at + len(stop) for stop in stops if (at := text.find(stop, own_end, after)) >= 0), default=None)
