"""Samples in order to steps: the one place where ranks and micro-batches are decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.errors import DataError, UsageError
from flatout.plan.cost import CostModel
from flatout.plan.pack import pack
from flatout.plan.partition import partition
from flatout.plan.types import MicroBatch, StepPlan

Integers = NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples in the order they are taken: integer arrays of one shape (n,); `ids` None means 0 to n - 1."""

    lengths: Integers
    num_labels: Integers
    ids: Integers | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, places: NDArray[np.int64]) -> Samples:
        """The samples at these places, in this order."""
        return Samples(self.lengths[places], self.num_labels[places], self.ids_at(places))

    def ids_at(self, places: NDArray[np.int64]) -> Integers:
        return places if self.ids is None else self.ids[places]

    def places_of(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Where these ids stand; only for ascending ids."""
        wanted = np.asarray(ids, dtype=np.int64)
        return wanted if self.ids is None else np.searchsorted(self.ids, wanted)

    def id_list(self) -> list[int]:
        return list(range(len(self))) if self.ids is None else list(self.ids.tolist())


def joined(first: Samples, second: Samples) -> Samples:
    """Both, one after the other."""
    return Samples(
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.num_labels, second.num_labels]),
        np.concatenate([samples.ids_at(np.arange(len(samples))) for samples in (first, second)]),
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """How a step is spread: ranks, which get equal shares of `cost`, and the most tokens of a micro-batch.

    `lockstep` gives all ranks of a step equally many micro-batches, for strategies whose passes need every rank.
    """

    num_ranks: int
    micro_batch_tokens: int
    cost: CostModel
    lockstep: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"the number of ranks is {self.num_ranks}; expected at least 1")


def assemble(
    samples: Samples, samples_per_step: int, layout: Layout, *, epoch: int, first_index: int
) -> Iterator[StepPlan]:
    """Cut samples, already in order, into steps of `samples_per_step` (the last may be smaller) and lay them out."""
    costs = layout.cost.flops(samples.lengths, samples.num_labels).tolist()
    ids, lengths, labels = samples.id_list(), samples.lengths.tolist(), samples.num_labels.tolist()
    for offset, start in enumerate(range(0, len(ids), samples_per_step)):
        part = slice(start, start + samples_per_step)
        group = _Group(ids[part], lengths[part], labels[part])
        yield _step(first_index + offset, epoch, group, costs[part], layout)


def assemble_eval(samples: Samples, layout: Layout) -> StepPlan:
    """All samples as one step without shuffling: consecutive micro-batches under the budget, dealt to ranks by cost."""
    group = _Group(samples.id_list(), samples.lengths.tolist(), samples.num_labels.tolist())
    costs = layout.cost.flops(samples.lengths, samples.num_labels).tolist()
    bins = _consecutive(group.lengths, layout.micro_batch_tokens)
    loads = [sum(costs[item] for item in items) for items in bins]
    dealt = partition(loads, layout.num_ranks)
    ranks = tuple(tuple(group.micro_batch(bins[index]) for index in rank) for rank in dealt)
    if layout.lockstep:
        ranks = group.filled(ranks)
    return group.step(0, 0, ranks, _balance([sum(loads[index] for index in rank) for rank in dealt]))


def cut(
    ids: list[int], lengths: list[int], num_labels: list[int], micro_batch_tokens: int, *, at_least: int = 1
) -> tuple[MicroBatch, ...]:
    """One rank's samples of a step as micro-batches under the budget, largest first (see `flatout.plan.pack`)."""
    group = _Group(ids, lengths, num_labels)
    return tuple(group.micro_batch(items) for items in pack(lengths, micro_batch_tokens, at_least=at_least))


def check_fits(samples: Samples, micro_batch_tokens: int) -> None:
    """Raises UsageError when a sample is longer than a micro-batch may be, DataError for impossible counts."""
    longest, shortest = int(np.argmax(samples.lengths)), int(np.argmin(samples.lengths))
    if samples.lengths[longest] > micro_batch_tokens:
        num_over = int(np.count_nonzero(samples.lengths > micro_batch_tokens))
        raise UsageError(
            f"{_named(samples, longest)} has {int(samples.lengths[longest])} tokens, more than "
            f"batch.micro_batch_tokens={micro_batch_tokens} (too long: {num_over} of {len(samples)}); "
            "raise batch.micro_batch_tokens, or lower data.max_tokens and build the data again"
        )
    if samples.lengths[shortest] < 1:
        raise DataError(f"{_named(samples, shortest)} has no tokens; build the data again")
    wrong = np.flatnonzero((samples.num_labels < 0) | (samples.num_labels > samples.lengths))
    if wrong.size:
        place = int(wrong[0])
        raise DataError(
            f"{_named(samples, place)} has {int(samples.num_labels[place])} label tokens of "
            f"{int(samples.lengths[place])} tokens; build the data again"
        )


def _named(samples: Samples, place: int) -> str:
    return f"sample {int(samples.ids_at(np.array([place]))[0])}"


@dataclass(frozen=True, slots=True)
class _Group:
    """The samples of one step as plain lists, which small loops read faster than arrays."""

    ids: list[int]
    lengths: list[int]
    num_labels: list[int]

    def micro_batch(self, items: Sequence[int]) -> MicroBatch:
        return MicroBatch(
            tuple([self.ids[item] for item in items]),
            sum([self.lengths[item] for item in items]),
            sum([self.num_labels[item] for item in items]),
        )

    def take(self, items: Sequence[int]) -> _Group:
        return _Group(*([values[item] for item in items] for values in (self.ids, self.lengths, self.num_labels)))

    def cut(self, micro_batch_tokens: int, at_least: int = 1) -> tuple[MicroBatch, ...]:
        return cut(self.ids, self.lengths, self.num_labels, micro_batch_tokens, at_least=at_least)

    def filled(self, ranks: Sequence[tuple[MicroBatch, ...]]) -> tuple[tuple[MicroBatch, ...], ...]:
        """Every rank with as many micro-batches as the one that has most: the shortest sample again, without loss."""
        shortest = self.lengths.index(min(self.lengths))
        filler = MicroBatch((self.ids[shortest],), self.lengths[shortest], 0, is_filler=True)
        most = max(map(len, ranks))
        return tuple(batches + (filler,) * (most - len(batches)) for batches in ranks)

    def step(self, index: int, epoch: int, ranks: tuple[tuple[MicroBatch, ...], ...], balance: float) -> StepPlan:
        return StepPlan(index, epoch, tuple(self.ids), sum(self.lengths), sum(self.num_labels), ranks, balance)


def _step(index: int, epoch: int, group: _Group, costs: list[float], layout: Layout) -> StepPlan:
    shares = partition(costs, layout.num_ranks)
    groups = [group.take(share) for share in shares]
    ranks = tuple(part.cut(layout.micro_batch_tokens) for part in groups)
    if layout.lockstep:
        # ranks wait for each other at every micro-batch: smaller ones cost less than fillers
        most = max(map(len, ranks))
        ranks = group.filled([part.cut(layout.micro_batch_tokens, at_least=most) for part in groups])
    return group.step(index, epoch, ranks, _balance([sum([costs[item] for item in share]) for share in shares]))


def _balance(loads: Sequence[float]) -> float:
    return sum(loads) / (len(loads) * max(loads))


def _consecutive(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = -1
    for item, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = budget_tokens
        bins[-1].append(item)
        room -= length
    return bins
