"""Split weighted items into parts of nearly equal weight, such as a step's samples over ranks."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

# parts this close in weight are level enough; finer exchanges cost planning time and gain nothing
LEVEL_TOLERANCE = 0.002
MAX_EXCHANGES_PER_PART = 8


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
    level(parts, weights)
    for items in parts:
        items.sort()
    return parts


def level(parts: list[list[int]], weights: Sequence[float]) -> None:
    """Move or swap items between the heaviest and the lightest part, in place, while that reduces their gap."""
    loads = [sum(weights[item] for item in part) for part in parts]
    close_enough = LEVEL_TOLERANCE * sum(loads) / len(loads)
    for _ in range(MAX_EXCHANGES_PER_PART * len(parts) + len(weights)):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[low]
        if gap <= close_enough:
            return
        given, taken = _best_exchange(parts[high], parts[low], weights, gap)
        if given is None:
            return
        parts[high].remove(given)
        parts[low].append(given)
        if taken is not None:
            parts[low].remove(taken)
            parts[high].append(taken)
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
        wanted = weights[item] - half
        if abs(wanted) < best_distance:
            best_distance, best = abs(wanted), (item, None)
        place = bisect_left(candidate_weights, wanted)
        for index in range(max(0, place - 1), min(place + 1, len(candidates))):
            distance = abs(wanted - candidate_weights[index])
            if distance < best_distance:
                best_distance, best = distance, (item, candidates[index])
    return best
