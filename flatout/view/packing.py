"""The first steps of a run: packed micro-batches, and what a padding loader would have computed, as lanes of a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from flatout.view.page import render

MAX_LANES = 24

Lane = Sequence[Sequence[int]]
Steps = Sequence[Sequence[Lane]]


def packing_lanes(packing: Steps, padded: Steps) -> str:
    """Return a lane for each step and rank of `packing`, above the batches of a padding loader if there are any.

    Both are, for each step, for each rank, for each batch the lengths of its samples. The page's script draws the bars.
    """
    lanes = [
        (step, rank, len(ranks), batches, beside, sum(map(sum, batches)), naive_tokens(beside))
        for step, (ranks, all_beside) in enumerate(zip_longest(packing, padded, fillvalue=()), start=1)
        for rank, (batches, beside) in enumerate(zip_longest(ranks, all_beside, fillvalue=()))
    ][:MAX_LANES]
    if not lanes:
        return ""
    return render("packing.html", lanes=lanes, widest=max(max(lane[5:]) for lane in lanes) or 1)


def naive_tokens(padded: Lane) -> int:
    """Return the tokens of batches that are padded to their longest sample."""
    return sum(len(batch) * max(batch, default=0) for batch in padded)
