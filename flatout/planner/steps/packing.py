"""Split weighted items: samples over ranks of nearly equal weight, and a rank's samples into micro-batches."""

from __future__ import annotations

import heapq
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flatout.planner.cost import CostModel

# parts this close in weight are level enough; finer exchanges cost planning time and gain nothing
LEVEL_TOLERANCE = 0.002
MAX_EXCHANGES_PER_PART = 8
# rows are this multiple of tokens long, so that a run has few sizes, which float8 products also need
ROW_MULTIPLE = 16
# what a pass costs besides its tokens: more padding and fewer passes with a larger value. Chat lengths (lognormal, mean
# of logs 6.0, sigma 0.8), 32 samples on one rank: 128 pads 5 % in 10.8 passes, 280 7.5 % in 8.1, 512 10.9 % in 6.3
PASS_OVERHEAD_TOKENS = 280
# makes every pass as large as the budget allows
FEWEST_PASSES = 1 << 40
Length = TypeVar("Length", int, NDArray[np.int64])


def partition(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split the indices of `weights` into `num_parts` lists of nearly equal sum, ascending in each; deterministic.

    Longest processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies": the fullest part is at
    most 4/3 of the optimum), then exchanges between the heaviest and the lightest part. Ties go to the lower index. The
    heaviest and lightest parts end up within one largest item of each other; with fewer items than parts, the last
    parts stay empty.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; expected at least 1")
    if num_parts == 1:
        return [list(range(len(weights)))]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap: list[tuple[float, int]] = [(0.0, part) for part in range(num_parts)]
    for item in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        load, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + weights[item], part))
    rebalance(parts, weights)
    for items in parts:
        items.sort()
    return parts


def rebalance(parts: list[list[int]], weights: Sequence[float]) -> None:
    """Move or swap items between the heaviest and the lightest part, in place, while that reduces their gap."""
    loads = [sum(weights[item] for item in part) for part in parts]
    close_enough = LEVEL_TOLERANCE * sum(loads) / len(loads)
    for _ in range(MAX_EXCHANGES_PER_PART * len(parts) + len(weights)):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[low]
        if gap <= close_enough:
            return
        moved, returned = _best_exchange(parts[high], parts[low], weights, gap)
        if moved is None:
            return
        parts[high].remove(moved)
        parts[low].append(moved)
        if returned is not None:
            parts[low].remove(returned)
            parts[high].append(returned)
        for part in (high, low):
            loads[part] = sum(weights[item] for item in parts[part])


def _best_exchange(
    high: Sequence[int], low: Sequence[int], weights: Sequence[float], gap: float
) -> tuple[int | None, int | None]:
    """Return the item to move from high to low, and the one to move back (or None), that come closest to half the gap.

    (None, None) when no exchange would reduce the gap.
    """
    half = gap / 2
    candidates = sorted(low, key=lambda item: (weights[item], item))
    candidate_weights = [weights[item] for item in candidates]
    # a smaller gain is rounding error, and could make the exchanges cycle
    best_distance = half * (1 - 1e-9)
    best: tuple[int | None, int | None] = (None, None)
    for item in sorted(high):
        target = weights[item] - half
        if abs(target) < best_distance:
            best_distance, best = abs(target), (item, None)
        nearest = bisect_left(candidate_weights, target)
        for index in range(max(0, nearest - 1), min(nearest + 1, len(candidates))):
            distance = abs(target - candidate_weights[index])
            if distance < best_distance:
                best_distance, best = distance, (item, candidates[index])
    return best


def bin_pack(
    lengths: Sequence[int],
    budget_tokens: int,
    *,
    at_least: int = 1,
    size_of: Callable[[list[int]], int] | None = None,
) -> list[list[int]]:
    """Pack indices of `lengths` into micro-batches of at most `budget_tokens`, ascending in each, largest batch first.

    Makes few, equal micro-batches: 19 k tokens with a budget of 16 k become 2 x 9.5 k, not 16 + 3. Few: each count
    from ceil(sum / budget) up is tried with longest-processing-time-first and exchanges, then with best-fit decreasing
    (Johnson 1974), whose 11/9 bound holds for the result. Equal: within one longest sample of each other. The largest
    comes first, so that a budget too large for memory fails at once. Makes at least `at_least` micro-batches, if there
    are enough lengths. `size_of` returns the tokens of a micro-batch, at most the sum of its lengths, if that is not
    the sum.
    Raises ValueError for a length over the budget; `training_plan` checks the whole data set beforehand.
    """
    if not lengths:
        return []
    size_of = size_of or (lambda part: sum(lengths[item] for item in part))
    longest, total = max(lengths), size_of(list(range(len(lengths))))
    if longest > budget_tokens:
        raise ValueError(f"a sample of {longest} tokens does not fit in {budget_tokens}")
    at_least = min(at_least, len(lengths))
    if total <= budget_tokens and at_least <= 1:
        return [list(range(len(lengths)))]
    fitted: list[list[int]] | None = None
    num_parts = max(at_least, -(-total // budget_tokens))
    while True:
        parts = partition(lengths, num_parts)
        if max(map(size_of, parts)) <= budget_tokens:
            break
        fitted = fitted or _best_fit_decreasing(lengths, budget_tokens)
        if len(fitted) <= num_parts:
            parts = fitted
            rebalance(parts, lengths)
            break
        num_parts += 1
    for part in parts:
        part.sort()
    return sorted(parts, key=lambda part: (-size_of(part), part))


def _best_fit_decreasing(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Put each sample, longest first, into the fullest micro-batch that it fits in."""
    parts: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fits = [part for part, num_free in enumerate(room) if num_free >= lengths[item]]
        if fits:
            part = min(fits, key=lambda index: (room[index], index))
        else:
            part = len(parts)
            parts.append([])
            room.append(budget_tokens)
        parts[part].append(item)
        room[part] -= lengths[item]
    return parts


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
