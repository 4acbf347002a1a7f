"""Turn ordered samples into steps: which rank takes each sample, and in which micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatout.errors import DataError, UsageError
from flatout.planner.cost import CostModel
from flatout.planner.steps.partition import bin_pack, partition


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank: these samples, in this order, as one flat stream of tokens.

    A filler equalizes the number of micro-batches across ranks; its labels are masked because
    its sample is already counted.
    """

    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    is_filler: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step over all ranks.

    `index` counts steps from 0 over the whole run, `epoch` counts passes from 0. `num_label_tokens` is the divisor of
    the summed loss, on every rank. `ranks[r]` are rank r's micro-batches (may be empty if there are fewer samples than
    ranks; in lockstep all ranks have the same number, including fillers). `balance` is mean / max of the ranks' FLOPs
    without fillers (1.0 is perfect).
    """

    index: int
    epoch: int
    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    balance: float


Integers = NDArray[np.integer]


class Item(NamedTuple):
    """One sample: its id, tokens, label tokens and FLOPs."""

    sample_id: int
    length: int
    num_labels: int
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples in training order: integer arrays of the same shape (n,); `ids` None means 0 to n - 1."""

    lengths: Integers
    num_labels: Integers
    ids: Integers | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at these indices, in this order."""
        ids = indices if self.ids is None else self.ids[indices]
        return Samples(self.lengths[indices], self.num_labels[indices], ids)

    def indices_of(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the indices of these ids; only if `self.ids` is ascending."""
        wanted = np.asarray(ids, dtype=np.int64)
        return wanted if self.ids is None else np.searchsorted(self.ids, wanted)

    def items(self, cost: CostModel) -> list[Item]:
        """Return the samples as plain Python values, which small loops read faster than arrays."""
        ids = range(len(self)) if self.ids is None else self.ids.tolist()
        costs = cost.flops(self.lengths, self.num_labels).tolist()
        return list(map(Item, ids, self.lengths.tolist(), self.num_labels.tolist(), costs))


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How a step is distributed: over ranks balanced by `cost`, in micro-batches of at most `micro_batch_tokens`.

    `lockstep` gives all ranks of a step the same number of micro-batches, for strategies whose passes need every rank.
    """

    num_ranks: int
    micro_batch_tokens: int
    cost: CostModel
    lockstep: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"the number of ranks is {self.num_ranks}; expected at least 1")


def assemble(
    samples: Samples, samples_per_step: int, layout: BatchLayout, *, epoch: int, first_index: int
) -> Iterator[StepPlan]:
    """Yield steps of `samples_per_step` ordered samples (the last may have fewer), distributed over the ranks."""
    items = samples.items(layout.cost)
    for offset, start in enumerate(range(0, len(items), samples_per_step)):
        group = items[start : start + samples_per_step]
        dealt = partition([item.cost for item in group], layout.num_ranks)
        shares = [[group[index] for index in share] for share in dealt]
        ranks = [pack_micro_batches(share, layout.micro_batch_tokens) for share in shares]
        if layout.lockstep:
            # equalize the ranks' counts by smaller micro-batches, which cost less than fillers
            most = max(map(len, ranks))
            ranks = [pack_micro_batches(share, layout.micro_batch_tokens, at_least=most) for share in shares]
        loads = [sum([item.cost for item in share]) for share in shares]
        yield _step(first_index + offset, epoch, group, ranks, loads, layout)


def assemble_eval(samples: Samples, layout: BatchLayout) -> StepPlan:
    """Return all samples as one unshuffled step: consecutive micro-batches within the budget, balanced by cost."""
    items = samples.items(layout.cost)
    bins: list[list[Item]] = []
    room = -1
    for item in items:
        if item.length > room:
            bins.append([])
            room = layout.micro_batch_tokens
        bins[-1].append(item)
        room -= item.length
    costs = [sum([item.cost for item in batch]) for batch in bins]
    dealt = partition(costs, layout.num_ranks)
    ranks = [tuple([_micro_batch(bins[index]) for index in share]) for share in dealt]
    return _step(0, 0, items, ranks, [sum([costs[index] for index in share]) for share in dealt], layout)


def pack_micro_batches(items: Sequence[Item], micro_batch_tokens: int, *, at_least: int = 1) -> tuple[MicroBatch, ...]:
    """Split one rank's samples of a step into micro-batches within the budget, largest first (see `bin_pack`)."""
    parts = bin_pack([item.length for item in items], micro_batch_tokens, at_least=at_least)
    return tuple([_micro_batch([items[index] for index in part]) for part in parts])


def check_fits(samples: Samples, micro_batch_tokens: int) -> None:
    """Raise UsageError if a sample is longer than a micro-batch may be, and DataError for impossible counts."""

    def named(index: int) -> str:
        return f"sample {index if samples.ids is None else samples.ids[index]}"

    longest, shortest = int(np.argmax(samples.lengths)), int(np.argmin(samples.lengths))
    if samples.lengths[longest] > micro_batch_tokens:
        num_over = int(np.count_nonzero(samples.lengths > micro_batch_tokens))
        raise UsageError(
            f"{named(longest)} has {int(samples.lengths[longest])} tokens, more than "
            f"batch.micro_batch_tokens={micro_batch_tokens} (too long: {num_over} of {len(samples)}); "
            "raise batch.micro_batch_tokens, or lower data.max_tokens and rebuild the data"
        )
    if samples.lengths[shortest] < 1:
        raise DataError(f"{named(shortest)} has no tokens; rebuild the data")
    wrong = np.flatnonzero((samples.num_labels < 0) | (samples.num_labels > samples.lengths))
    if wrong.size:
        first = int(wrong[0])
        raise DataError(
            f"{named(first)} has {int(samples.num_labels[first])} label tokens of "
            f"{int(samples.lengths[first])} tokens; rebuild the data"
        )


def _micro_batch(items: Sequence[Item]) -> MicroBatch:
    return MicroBatch(
        tuple([item.sample_id for item in items]),
        sum([item.length for item in items]),
        sum([item.num_labels for item in items]),
    )


def _step(
    index: int,
    epoch: int,
    items: Sequence[Item],
    ranks: Sequence[tuple[MicroBatch, ...]],
    loads: Sequence[float],
    layout: BatchLayout,
) -> StepPlan:
    """Make a step whose ranks have `loads` FLOPs; in lockstep, pad every rank to the same number of micro-batches.

    Fillers repeat the shortest sample, without loss.
    """
    if layout.lockstep:
        shortest = min(items, key=lambda item: item.length)
        filler = MicroBatch((shortest.sample_id,), shortest.length, 0, is_filler=True)
        most = max(map(len, ranks))
        ranks = [batches + (filler,) * (most - len(batches)) for batches in ranks]
    whole = _micro_batch(items)
    balance = sum(loads) / (len(loads) * max(loads))
    return StepPlan(index, epoch, whole.sample_ids, whole.num_tokens, whole.num_label_tokens, tuple(ranks), balance)
