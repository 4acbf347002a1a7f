"""Turn ordered samples into steps: which rank takes each sample, and in which micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatout.errors import DataError, UsageError
from flatout.planner.cost import CostModel
from flatout.planner.steps.partition import bin_pack, partition
from flatout.planner.steps.prefixes import Bundle, PrefixIndex, make_bundles, tokens_together
from flatout.planner.steps.rows import cut_rows, row_length

# a step of rows is cut into about 1 to 4 micro-batches a rank, with some slack, and the most even cut is taken
ROW_CUTS, ROW_SLACK = (1, 2, 3, 4), 1.05


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank: these samples, in this order, as one flat stream of tokens.

    With `row_length`, each sample is a row, padded on the right to that many tokens. `num_tokens` are the real ones.
    A filler equalizes the number of micro-batches across ranks; its labels are masked because
    its sample is already counted. The stream is padded to at least `fill_tokens`, as long as those of other ranks.
    `shared` are prefixes (tokens, samples) that the first samples share, in their order; `num_tokens` counts them for
    each sample, though the pass computes them once.
    """

    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    is_filler: bool = False
    row_length: int | None = None
    fill_tokens: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def num_shared_tokens(self) -> int:
        """The tokens that the pass does not compute again, as samples share them."""
        return sum(num_tokens * (count - 1) for num_tokens, count in self.shared)

    @property
    def num_padded_tokens(self) -> int:
        """The tokens that the pass computes, with the padding of its rows."""
        if self.row_length is None:
            return max(self.num_tokens - self.num_shared_tokens, self.fill_tokens)
        return len(self.sample_ids) * self.row_length


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

    @property
    def num_padded_tokens(self) -> int:
        """The tokens that all passes compute, with padding and without fillers."""
        return sum(batch.num_padded_tokens for rank in self.ranks for batch in rank if not batch.is_filler)

    @property
    def num_shared_tokens(self) -> int:
        """The tokens that no pass computes, as samples share them."""
        return sum(batch.num_shared_tokens for rank in self.ranks for batch in rank)

    @property
    def num_real_tokens(self) -> int:
        """The tokens that all passes compute, without padding and fillers."""
        return self.num_tokens - self.num_shared_tokens

    def shared_flops(self, cost: CostModel) -> float:
        """Return the FLOPs, by `cost`, that no pass computes, as samples share tokens."""
        return sum(shared_flops(batch, cost) for rank in self.ranks for batch in rank)


def padding_share(steps: Sequence[StepPlan]) -> float:
    """Return the share of padding in the tokens that the passes of these steps compute, without fillers."""
    return 1.0 - sum(step.num_real_tokens for step in steps) / sum(step.num_padded_tokens for step in steps)


def shared_flops(batch: MicroBatch, cost: CostModel) -> float:
    """Return the FLOPs, by `cost`, of the tokens that a pass does not compute again."""
    return sum((count - 1) * float(cost.flops(num_tokens, 0)) for num_tokens, count in batch.shared)


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

    `pass_tokens` None packs samples; otherwise each is a padded row, and a pass costs as much as that many tokens more.
    `lockstep` gives all ranks of a step the same number of micro-batches, for strategies whose passes need every rank.
    `expert_ranks` consecutive ranks, which exchange tokens in every pass, also get passes of the same size. `prefixes`
    finds the prefixes that packed samples share; None: nothing is shared.
    """

    num_ranks: int
    micro_batch_tokens: int
    cost: CostModel
    lockstep: bool = False
    pass_tokens: int | None = None
    expert_ranks: int = 1
    prefixes: PrefixIndex | None = None

    @property
    def name(self) -> Literal["packed", "rows"]:
        """The name of the layout in settings."""
        return "packed" if self.pass_tokens is None else "rows"

    def micro_batches(
        self, items: Sequence[Item], *, at_least: int = 1, max_tokens: int | None = None
    ) -> list[MicroBatch]:
        """Split one rank's samples into micro-batches within the budget or `max_tokens`, largest first."""
        lengths, budget = [item.length for item in items], max_tokens or self.micro_batch_tokens
        if self.prefixes is not None:
            return self._shared_batches(items, budget, at_least)
        if self.pass_tokens is None:
            parts = bin_pack(lengths, budget, at_least=at_least)
        else:
            parts = cut_rows(lengths, budget, cost=self.cost, pass_tokens=self.pass_tokens, at_least=at_least)
        return [self.micro_batch([items[index] for index in part]) for part in parts]

    def micro_batch(self, items: Sequence[Item]) -> MicroBatch:
        """Return these samples as one micro-batch."""
        return MicroBatch(
            tuple([item.sample_id for item in items]),
            sum([item.length for item in items]),
            sum([item.num_labels for item in items]),
            row_length=None if self.pass_tokens is None else row_length(max([item.length for item in items])),
        )

    def deal(self, items: Sequence[Item]) -> list[list[Item]]:
        """Deal packed samples to the ranks, balanced by cost; samples with a common prefix stay together if they can.

        No bundle is larger than a rank's share of the tokens.
        """
        if self.num_ranks == 1:
            return [list(items)]
        groups = [] if self.prefixes is None else self.prefixes.groups([item.sample_id for item in items])
        if not groups:
            alone = partition([item.cost for item in items], self.num_ranks)
            return [[items[index] for index in share] for share in alone]
        total = sum([item.length for item in items]) - sum(each * (len(own) - 1) for each, own in groups)
        bundles = make_bundles(groups, [item.length for item in items], total // self.num_ranks)
        costs = [sum([items[index].cost for index in bundle.members]) for bundle in bundles]
        for index, bundle in enumerate(bundles):
            if (num_again := len(bundle.members) - 1) > 0:
                costs[index] -= num_again * float(self.cost.flops(bundle.prefix_tokens, 0))
        shares = [[bundles[index] for index in share] for share in partition(costs, self.num_ranks)]
        return [[items[index] for index in sorted(i for own in share for i in own.members)] for share in shares]

    def _shared_batches(self, items: Sequence[Item], budget: int, at_least: int) -> list[MicroBatch]:
        """Split one rank's samples into micro-batches within the budget, in which common prefixes count once."""
        assert self.prefixes is not None
        groups = self.prefixes.groups([item.sample_id for item in items])
        bundles = make_bundles(groups, [item.length for item in items], budget)
        sizes = [bundle.num_tokens for bundle in bundles]
        parts = bin_pack(
            sizes,
            budget,
            at_least=at_least,
            size_of=lambda part: tokens_together([bundles[index] for index in part]),
        )
        return [self._shared_batch(items, [bundles[index] for index in part]) for part in parts]

    def _shared_batch(self, items: Sequence[Item], bundles: Sequence[Bundle]) -> MicroBatch:
        """Return bundles of these samples as one micro-batch: first each group of samples, then samples alone."""
        groups: dict[int, tuple[int, list[int]]] = {}
        alone = [index for bundle in bundles if bundle.group < 0 for index in bundle.members]
        for bundle in bundles:
            if bundle.group >= 0:
                groups.setdefault(bundle.group, (bundle.prefix_tokens, []))[1].extend(bundle.members)
        alone += [own[0] for _, own in groups.values() if len(own) == 1]
        kept = [(prefix_tokens, sorted(own)) for prefix_tokens, own in groups.values() if len(own) > 1]
        order = [index for _, own in kept for index in own] + sorted(alone)
        batch = self.micro_batch([items[index] for index in order])
        return replace(batch, shared=tuple((prefix_tokens, len(own)) for prefix_tokens, own in kept))

    def load(self, batch: MicroBatch) -> float:
        """Return what a micro-batch of rows costs: FLOPs with padding, and the fixed cost of a pass."""
        assert batch.row_length is not None
        assert self.pass_tokens is not None
        flops = len(batch.sample_ids) * float(self.cost.flops(batch.row_length, 0))
        return flops + self.cost.per_label * batch.num_label_tokens + self.pass_tokens * self.cost.per_token

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
        if layout.pass_tokens is None:
            shares = layout.deal(group)
            ranks = [layout.micro_batches(share) for share in shares]
            saved = [sum(shared_flops(batch, layout.cost) for batch in rank) for rank in ranks]
            loads = [sum([item.cost for item in share]) - less for share, less in zip(shares, saved, strict=True)]
        else:
            ranks, loads = _deal_rows(group, layout)
        if layout.lockstep:
            # equalize the ranks' counts by smaller micro-batches, which cost less than fillers
            most, by_id = max(map(len, ranks)), {item.sample_id: item for item in group}
            shares = [[by_id[sample_id] for batch in rank for sample_id in batch.sample_ids] for rank in ranks]
            ranks = [layout.micro_batches(share, at_least=most) for share in shares]
        yield _step(first_index + offset, epoch, group, ranks, loads, layout)


def _deal_rows(group: Sequence[Item], layout: BatchLayout) -> tuple[list[list[MicroBatch]], list[float]]:
    """Cut a step into micro-batches of similar lengths, and deal these to the ranks; also return the ranks' loads."""
    if layout.num_ranks == 1:
        whole = layout.micro_batches(group)
        return [whole], [sum(map(layout.load, whole))]
    longest, total = max(item.length for item in group), sum(item.length for item in group)
    found: list[tuple[list[list[MicroBatch]], list[float]]] = []
    for cuts in ROW_CUTS:
        even = max(row_length(longest), int(ROW_SLACK * total / (cuts * layout.num_ranks)))
        batches = layout.micro_batches(group, max_tokens=min(layout.micro_batch_tokens, even))
        found.append(_deal(batches, [layout.load(batch) for batch in batches], layout.num_ranks))
    return min(found, key=lambda dealt: max(dealt[1]))


def _deal(
    batches: Sequence[MicroBatch], loads: Sequence[float], num_ranks: int
) -> tuple[list[list[MicroBatch]], list[float]]:
    """Deal micro-batches of these loads to ranks; also return the ranks' loads."""
    dealt = partition(loads, num_ranks)
    ranks = [[batches[index] for index in share] for share in dealt]
    return ranks, [sum([loads[index] for index in share]) for share in dealt]


def assemble_eval(samples: Samples, layout: BatchLayout) -> StepPlan:
    """Return all samples as one unshuffled step: micro-batches within the budget, balanced by cost.

    They hold consecutive samples, or as rows samples of similar lengths.
    """
    items = samples.items(layout.cost)
    if layout.pass_tokens is not None:
        rows = layout.micro_batches(items)
        return _step(0, 0, items, *_deal(rows, [layout.load(batch) for batch in rows], layout.num_ranks), layout)
    bins: list[list[Item]] = []
    room = -1
    for item in items:
        if item.length > room:
            bins.append([])
            room = layout.micro_batch_tokens
        bins[-1].append(item)
        room -= item.length
    costs = [sum([item.cost for item in batch]) for batch in bins]
    return _step(0, 0, items, *_deal([layout.micro_batch(each) for each in bins], costs, layout.num_ranks), layout)


def _equal_sizes(ranks: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
    """Return the ranks' micro-batches, as many on each, padded to the longest of those that run together."""
    together = [max(batch.num_padded_tokens for batch in batches) for batches in zip(*ranks, strict=True)]
    return [
        [replace(batch, fill_tokens=most) for batch, most in zip(batches, together, strict=True)] for batches in ranks
    ]


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


def _step(
    index: int,
    epoch: int,
    items: Sequence[Item],
    ranks: Sequence[Sequence[MicroBatch]],
    loads: Sequence[float],
    layout: BatchLayout,
) -> StepPlan:
    """Make a step whose ranks have `loads` FLOPs; in lockstep, pad every rank to the same number of micro-batches.

    Fillers repeat the shortest sample, without loss.
    """
    if layout.lockstep:
        shortest = min(items, key=lambda item: item.length)
        filler = replace(layout.micro_batch([shortest]), num_label_tokens=0, is_filler=True)
        most = max(map(len, ranks))
        ranks = [[*batches, *[filler] * (most - len(batches))] for batches in ranks]
    if layout.expert_ranks > 1:
        groups = range(0, len(ranks), layout.expert_ranks)
        ranks = [batches for start in groups for batches in _equal_sizes(ranks[start : start + layout.expert_ranks])]
    whole, by_rank = layout.micro_batch(items), tuple(map(tuple, ranks))
    balance = sum(loads) / (len(loads) * max(loads))
    return StepPlan(index, epoch, whole.sample_ids, whole.num_tokens, whole.num_label_tokens, by_rank, balance)
