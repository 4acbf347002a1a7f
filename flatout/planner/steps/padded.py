"""Cut samples into micro-batches of rows, each padded to its longest, so that little is padded in few passes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flatout.planner.cost import CostModel

# rows are this multiple of tokens long, so that a run has few sizes, which float8 products also need
ROW_MULTIPLE = 16
# what a pass costs besides its tokens: more padding and fewer passes with a larger value. Chat lengths (lognormal, mean
# of logs 6.0, sigma 0.8), 32 samples on one rank: 128 pads 5 % in 10.8 passes, 280 7.5 % in 8.1, 512 10.9 % in 6.3
PASS_OVERHEAD_TOKENS = 280
# makes every pass as large as the budget allows
FEWEST_PASSES = 1 << 40


Length = TypeVar("Length", int, NDArray[np.int64])


def row_length(longest: Length) -> Length:
    """Return the tokens of a row, with padding, in a micro-batch whose longest sample has `longest` tokens."""
    return -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE


def cut_padded(
    lengths: Sequence[int],
    budget_tokens: int,
    *,
    cost: CostModel,
    pass_overhead_tokens: int,
    at_least: int = 1,
    counts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Cut indices of `lengths` into micro-batches whose padded rows have at most `budget_tokens`, largest first.

    With `counts`, an index stands for so many rows that stay together, of at most its length.

    Minimizes  sum over micro-batches of  count * flops(row_length(longest)) + pass_overhead_tokens * per_token  by
    dynamic programming over the lengths in descending order: some best cut has consecutive lengths in each. Makes
    at least `at_least` micro-batches, if there are enough lengths. Padding may lift a micro-batch of one index over
    the budget, by less than ROW_MULTIPLE a row. Raises ValueError for one over the budget.
    """
    num, counts = len(lengths), counts or [1] * len(lengths)
    if num and (most := max(map(operator.mul, lengths, counts))) > budget_tokens:
        raise ValueError(f"a sample of {most} tokens does not fit in {budget_tokens}")
    order = sorted(range(num), key=lambda index: (-lengths[index], index))
    padded = [row_length(lengths[index]) for index in order]
    row_flops = cost.flops(padded, np.zeros(num)).tolist()
    # least[j]: the cost of the j longest samples; starts[j]: where their last micro-batch starts
    least, starts = np.full(num + 1, np.inf), np.zeros(num + 1, np.int64)
    least[0], before = 0.0, np.cumsum([0, *(counts[index] for index in order)])  # rows before each place
    for start in range(num):
        fits = int(np.searchsorted(before, before[start] + budget_tokens // padded[start], side="right")) - 1
        stop = max(fits, start + 1)
        total = (
            least[start]
            + pass_overhead_tokens * cost.per_token
            + row_flops[start] * (before[start + 1 : stop + 1] - before[start])
        )
        is_less = total < least[start + 1 : stop + 1]
        least[start + 1 : stop + 1][is_less] = total[is_less]
        starts[start + 1 : stop + 1][is_less] = start

    def tokens_of(span: tuple[int, int]) -> int:
        return int(before[span[1]] - before[span[0]]) * padded[span[0]]

    spans, end = [], num
    while end:
        spans.append((int(starts[end]), end))
        end = spans[-1][0]
    while len(spans) < min(at_least, num):
        start, end = max(spans, key=lambda span: (span[1] - span[0] > 1, tokens_of(span)))
        spans.remove((start, end))
        spans += [(start, (start + end) // 2), ((start + end) // 2, end)]
    spans.sort(key=lambda span: (-tokens_of(span), span))
    return [sorted(order[start:end]) for start, end in spans]
