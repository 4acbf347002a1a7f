"""Pack one rank's samples into few, equal micro-batches within a token budget."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.plan.schedule.partition import level, partition


def bin_pack(lengths: Sequence[int], budget_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """Pack indices of `lengths` into micro-batches of at most `budget_tokens`, ascending in each, largest batch first.

    Makes few, equal micro-batches: 19 k tokens with a budget of 16 k become 2 x 9.5 k, not 16 + 3. Few: each count
    from ceil(sum / budget) up is tried with longest-processing-time-first and exchanges, then with best-fit decreasing
    (Johnson 1974), whose 11/9 bound holds for the result. Equal: within one longest sample of each other. The largest
    comes first, so that a budget too large for memory fails at once. Makes at least `at_least` micro-batches, if there
    are enough lengths.
    Raises ValueError for a length over the budget; `run_plan` checks the whole data set beforehand.
    """
    if not lengths:
        return []
    longest, total = max(lengths), sum(lengths)
    if longest > budget_tokens:
        raise ValueError(f"a sample of {longest} tokens does not fit in {budget_tokens}")
    at_least = min(at_least, len(lengths))
    if total <= budget_tokens and at_least <= 1:
        return [list(range(len(lengths)))]
    fitted: list[list[int]] | None = None
    num_parts = max(at_least, -(-total // budget_tokens))
    while True:
        parts = partition(lengths, num_parts)
        if _heaviest(parts, lengths) <= budget_tokens:
            break
        fitted = fitted or _best_fit_decreasing(lengths, budget_tokens)
        if len(fitted) <= num_parts:
            parts = fitted
            level(parts, lengths)
            break
        num_parts += 1
    for part in parts:
        part.sort()
    return sorted(parts, key=lambda part: (-sum(lengths[item] for item in part), part))


def _heaviest(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[item] for item in part) for part in parts)


def _best_fit_decreasing(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Put each sample, longest first, into the fullest micro-batch that it fits in."""
    parts: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fits = [part for part, left in enumerate(room) if left >= lengths[item]]
        if fits:
            part = min(fits, key=lambda index: (room[index], index))
        else:
            part = len(parts)
            parts.append([])
            room.append(budget_tokens)
        parts[part].append(item)
        room[part] -= lengths[item]
    return parts
