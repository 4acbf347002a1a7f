"""Cut samples into micro-batches of rows, each padded to its longest, so that little is padded in few passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flatout.planner.cost import CostModel

# rows are this multiple of tokens long, so that a run has few sizes, which float8 products also need
ROW_MULTIPLE = 16
# what a pass costs besides its tokens: more padding and fewer passes with a larger value. Chat lengths (lognormal, mean
# of logs 6.0, sigma 0.8), 32 samples on one rank: 128 pads 5 % in 10.8 passes, 280 7.5 % in 8.1, 512 10.9 % in 6.3
PASS_TOKENS = 280
# makes every pass as large as the budget allows
FEWEST_PASSES = 1 << 40


def row_length(longest: int) -> int:
    """Return the tokens of a row, with padding, in a micro-batch whose longest sample has `longest` tokens."""
    return -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE


def cut_rows(
    lengths: Sequence[int], budget_tokens: int, *, cost: CostModel, pass_tokens: int, at_least: int = 1
) -> list[list[int]]:
    """Cut indices of `lengths` into micro-batches whose padded rows have at most `budget_tokens`, largest first.

    Minimizes  sum over micro-batches of  count * flops(row_length(longest)) + pass_tokens * per_token  by dynamic
    programming over the lengths in descending order: some best cut has consecutive lengths in each micro-batch. Makes
    at least `at_least` micro-batches, if there are enough lengths. Padding may lift a micro-batch of one sample over
    the budget, by less than ROW_MULTIPLE. Raises ValueError for a length over the budget.
    """
    num = len(lengths)
    if num and max(lengths) > budget_tokens:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit in {budget_tokens}")
    order = sorted(range(num), key=lambda index: (-lengths[index], index))
    padded = [row_length(lengths[index]) for index in order]
    row_flops = cost.flops(padded, np.zeros(num)).tolist()
    # least[j]: the cost of the j longest samples; starts[j]: where their last micro-batch starts
    least, starts = np.full(num + 1, np.inf), np.zeros(num + 1, np.int64)
    least[0], counts = 0.0, np.arange(1, num + 1)
    for start in range(num):
        stop = min(num, start + max(1, budget_tokens // padded[start]))
        total = least[start] + pass_tokens * cost.per_token + row_flops[start] * counts[: stop - start]
        is_less = total < least[start + 1 : stop + 1]
        least[start + 1 : stop + 1][is_less] = total[is_less]
        starts[start + 1 : stop + 1][is_less] = start
    spans, end = [], num
    while end:
        spans.append((int(starts[end]), end))
        end = spans[-1][0]
    while len(spans) < min(at_least, num):
        start, end = max(spans, key=lambda span: (span[1] - span[0] > 1, (span[1] - span[0]) * padded[span[0]]))
        spans.remove((start, end))
        spans += [(start, (start + end) // 2), ((start + end) // 2, end)]
    spans.sort(key=lambda span: (-(span[1] - span[0]) * padded[span[0]], span))
    return [sorted(order[start:end]) for start, end in spans]
