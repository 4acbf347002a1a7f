"""The first steps of a run, drawn to scale: packed micro-batches, and what a padding loader would have computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from flatout.view.page import render

MAX_LANES = 24
# units of the viewBox; a gap between micro-batches is this share of the widest lane
_WIDTH, _GAP = 1000.0, 0.008

Lane = Sequence[Sequence[int]]
Steps = Sequence[Sequence[Lane]]


def draw_packing(packing: Steps, padded: Steps) -> str:
    """Return a lane for each step and rank of `packing`, above the batches of a padding loader if there are any.

    Both are, for each step, for each rank, for each batch the lengths of its samples.
    """
    lanes = [
        (step, rank, len(ranks), batches, beside)
        for step, (ranks, all_beside) in enumerate(zip_longest(packing, padded, fillvalue=()), start=1)
        for rank, (batches, beside) in enumerate(zip_longest(ranks, all_beside, fillvalue=()))
    ][:MAX_LANES]
    if not lanes:
        return ""
    widest = max(max(sum(map(sum, batches)), naive_tokens(beside)) for *_, batches, beside in lanes) or 1
    drawn = []
    for *place, batches, beside in lanes:
        padded_bars = _bars(beside, widest, is_padded=True) if beside else ""
        drawn.append((*place, _bars(batches, widest), padded_bars, sum(map(sum, batches)), naive_tokens(beside)))
    return render("packing.html", lanes=drawn)


def naive_tokens(padded: Lane) -> int:
    """Return the tokens of batches that are padded to their longest sample."""
    return sum(len(batch) * max(batch, default=0) for batch in padded)


def _bars(batches: Lane, widest: int, *, is_padded: bool = False) -> str:
    """Draw the samples of each micro-batch, the batches in alternating colors; padding follows its sample."""
    gap = _GAP * _WIDTH
    unit = (_WIDTH - gap * max(0, len(batches) - 1)) / widest
    marks, left = [], 0.0
    for number, batch in enumerate(batches):
        longest = max(batch, default=0)
        for index, length in enumerate(batch):
            style = f"block c{2 * (number % 2)}{' alt' if index % 2 else ''}"
            marks.append(f'<rect class="{style}" x="{left:.1f}" y="0" width="{length * unit:.2f}" height="10"/>')
            left += length * unit
            if is_padded and length < longest:
                filler = (longest - length) * unit
                marks.append(f'<rect class="block filler" x="{left:.1f}" y="0" width="{filler:.2f}" height="10"/>')
                left += filler
        left += gap
    name = "with padding" if is_padded else "as it ran"
    return (
        f'<svg class="{"padded" if is_padded else "packed"}" viewBox="0 0 {_WIDTH:.0f} 10" preserveAspectRatio="none" '
        f'role="img" aria-label="{name}">{"".join(marks)}</svg>'
    )
