"""Units: consecutive samples, such as a pair of answers, that a plan counts, permutes and deals, and never parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatout.errors import DataError
from flatout.planner.cost import CostModel
from flatout.planner.steps.packing import row_length

Integers = NDArray[np.integer]


class Item(NamedTuple):
    """One sample: its id, tokens, label tokens and FLOPs, and the number of its unit, None where each is one."""

    sample_id: int
    length: int
    num_label_tokens: int
    cost: float
    unit: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples in training order: integer arrays of the same shape (n,); `ids` None means 0 to n - 1.

    `units` numbers the unit of each, whose samples follow each other; None: each sample is a unit. With `parts_units`,
    steps count and permute units, but ranks and micro-batches may part them. `tower_flops` are those of each sample's
    pictures, float64 (n,); None: no sample has any.
    """

    lengths: Integers
    num_label_tokens: Integers
    ids: Integers | None = None
    units: Integers | None = None
    tower_flops: NDArray[np.float64] | None = None
    parts_units: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: NDArray[np.int64]) -> Samples:
        ids = indices if self.ids is None else self.ids[indices]
        units = None if self.units is None else self.units[indices]
        tower = None if self.tower_flops is None else self.tower_flops[indices]
        return Samples(self.lengths[indices], self.num_label_tokens[indices], ids, units, tower, self.parts_units)

    def tower_flops_of(self, indices: NDArray[np.int64]) -> float:
        """Return the FLOPs of these samples' pictures."""
        return 0.0 if self.tower_flops is None else float(self.tower_flops[indices].sum())

    def indices_of(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the indices of these ids; only if `self.ids` is ascending."""
        wanted_ids = np.asarray(ids, dtype=np.int64)
        return wanted_ids if self.ids is None else np.searchsorted(self.ids, wanted_ids)

    def items(self, cost: CostModel) -> list[Item]:
        """Return the samples as plain Python values, which small loops read faster than arrays.

        Their units are those that stay whole.
        """
        ids = range(len(self)) if self.ids is None else self.ids.tolist()
        units = repeat(None) if self.units is None or self.parts_units else self.units.tolist()
        costs = cost.flops(self.lengths, self.num_label_tokens)
        costs = (costs if self.tower_flops is None else costs + self.tower_flops).tolist()
        return list(map(Item, ids, self.lengths.tolist(), self.num_label_tokens.tolist(), costs, units))

    @property
    def unit_starts(self) -> NDArray[np.int64]:
        """The index at which each unit begins, int64 (U,)."""
        if self.units is None:
            return np.arange(len(self))
        return np.flatnonzero(np.append(True, np.diff(self.units) != 0))

    def unit_tokens(
        self, *, is_padded: bool, prefixes: Integers | None = None, with_padding: bool = True
    ) -> NDArray[np.int64]:
        """Return the tokens that a pass computes for each unit, int64 (U,): its prefix once, or if padded its rows.

        `prefixes` are the tokens that each numbered unit begins with in common. `with_padding` counts that of rows.
        """
        starts = self.unit_starts
        sizes = np.diff(np.append(starts, len(self)))
        if is_padded:
            longest = np.asarray(np.maximum.reduceat(self.lengths, starts), np.int64)
            return sizes * (row_length(longest) if with_padding else longest)
        again = 0 if prefixes is None or self.units is None else (sizes - 1) * prefixes[self.units[starts]]
        return np.asarray(np.add.reduceat(self.lengths, starts, dtype=np.int64) - again)

    def part_tokens(self, **layout: Any) -> NDArray[np.int64]:
        """Return the tokens of each part that stays whole: those of units as `unit_tokens` has them, or of samples."""
        return (replace(self, units=None) if self.parts_units else self).unit_tokens(**layout)


def unit_numbers(unit_offsets: ArrayLike | None, sample_ids: Integers | None) -> Integers | None:
    """Return the number of the unit of each of these samples (all by default); None if each sample is a unit.

    Units begin at `unit_offsets` (U + 1,). Raises DataError if some samples of a unit are not among them.
    """
    if unit_offsets is None:
        return None
    sizes = np.diff(np.asarray(unit_offsets))
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    if sample_ids is not None:
        numbers = numbers[sample_ids]
        counts = np.bincount(numbers, minlength=len(sizes))
        if (parted := np.flatnonzero((counts > 0) & (counts < sizes))).size:
            unit = int(parted[0])
            raise DataError(
                f"{counts[unit]} of the {sizes[unit]} samples of unit {unit + 1} are chosen; a unit is planned whole"
            )
    return numbers
