"""Turn ordered samples into steps: which rank takes each sample, and in which micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np

from flatout.errors import DataError, Fix, UsageError
from flatout.planner.cost import CostModel
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.planner.steps.packing import bin_pack, cut_padded, partition, row_length
from flatout.planner.steps.prefixes import Bundle, Prefixes, PrefixGroup, UnitPrefixes, make_bundles, tokens_together
from flatout.planner.steps.units import Integers, Item, Samples

# a step of rows is cut into about 1 to 4 micro-batches a rank, with some slack, and the most even cut is taken
ROW_CUTS, ROW_SLACK = (1, 2, 3, 4), 1.05


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank: these samples, in this order, as one flat stream of tokens."""

    sample_ids: tuple[int, ...]
    num_tokens: int
    """Tokens of all samples, without padding, and with a shared prefix in each sample that has it."""
    num_label_tokens: int
    is_filler: bool = False
    """Whether it equalizes the ranks' numbers of micro-batches: its sample is counted elsewhere, so it has no loss."""
    row_length: int | None = None
    """Each sample is a row, padded on the right to so many tokens; None: packed."""
    fill_tokens: int = 0
    """The stream is padded to at least so many tokens, as long as those of other ranks."""
    shared: tuple[tuple[int, int], ...] = ()
    """Prefixes (tokens, samples) that the first samples share, in their order; the pass computes each once."""

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

    @property
    def size(self) -> MicroBatchSize:
        """What the memory model counts of the pass."""
        return MicroBatchSize(self.num_padded_tokens, self.num_label_tokens, len(self.sample_ids))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step over all ranks."""

    index: int
    """Counts steps from 0 over the whole run."""
    epoch: int
    """Counts passes over the data from 0."""
    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    """Those of all ranks, which normalize cross-entropy."""
    by_rank: tuple[tuple[MicroBatch, ...], ...]
    """Each rank's micro-batches; in lockstep as many on each, fillers included, otherwise possibly none."""
    balance: float
    """Mean / max of the ranks' FLOPs without fillers; 1.0 is perfect."""

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Those of all ranks, rank by rank."""
        return tuple(chain.from_iterable(self.by_rank))

    @property
    def num_padded_tokens(self) -> int:
        """The tokens that all passes compute, with padding and without fillers."""
        return sum(batch.num_padded_tokens for batch in self.micro_batches if not batch.is_filler)

    @property
    def num_shared_tokens(self) -> int:
        """The tokens that no pass computes, as samples share them."""
        return sum(batch.num_shared_tokens for batch in self.micro_batches)

    @property
    def num_real_tokens(self) -> int:
        """The tokens that all passes compute, without padding and fillers."""
        return self.num_tokens - self.num_shared_tokens


def padding_share(steps: Sequence[StepPlan]) -> float:
    """Return the share of padding in the tokens that the passes of these steps compute, without fillers."""
    # steps of a round without answers to train have none
    num_padded = sum(step.num_padded_tokens for step in steps)
    return 1.0 - sum(step.num_real_tokens for step in steps) / num_padded if num_padded else 0.0


def shared_flops(batches: Sequence[MicroBatch], cost: CostModel) -> float:
    """Return the FLOPs, by `cost`, that these passes do not compute, as samples share tokens."""
    return sum(
        (count - 1) * float(cost.flops(num_tokens, 0)) for batch in batches for num_tokens, count in batch.shared
    )


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How a step is distributed over ranks and micro-batches."""

    num_ranks: int
    micro_batch_tokens: int
    """The most tokens of a micro-batch."""
    cost: CostModel
    """What ranks are balanced by."""
    lockstep: bool = False
    """Whether all ranks of a step have the same number of micro-batches, as their passes need every rank."""
    pass_overhead_tokens: int | None = None
    """None packs samples; otherwise each is a padded row, and a pass costs so many tokens more."""
    expert_ranks: int = 1
    """Consecutive ranks that exchange tokens in every pass, and so get passes of the same size."""
    prefixes: Prefixes | None = None
    """Finds the prefixes that packed samples share; None: nothing is shared."""

    @property
    def unit_prefixes(self) -> Integers | None:
        """The tokens that each numbered unit begins with in common, and computes once."""
        return self.prefixes.tokens if isinstance(self.prefixes, UnitPrefixes) else None

    def for_others(self, longest: int) -> BatchLayout:
        """Return the layout for other samples, whose prefixes nobody knows, of at most `longest` tokens."""
        return replace(self, prefixes=None, micro_batch_tokens=max(self.micro_batch_tokens, longest))

    @property
    def is_padded(self) -> bool:
        """Whether each sample is a padded row."""
        return self.pass_overhead_tokens is not None

    @property
    def name(self) -> Literal["packed", "rows"]:
        """The name of the layout in settings."""
        return "rows" if self.is_padded else "packed"

    def micro_batches(
        self, items: Sequence[Item], *, at_least: int = 1, max_tokens: int | None = None
    ) -> list[MicroBatch]:
        """Split one rank's units into micro-batches within the budget or `max_tokens`, largest first."""
        budget = max_tokens or self.micro_batch_tokens
        groups = self._groups(items)
        if not groups and not self.is_padded and items and items[0].unit is None:  # most runs: none to bundle
            packed = bin_pack([item.length for item in items], budget, at_least=at_least)
            return [self.micro_batch([items[index] for index in part]) for part in packed]
        bundles = make_bundles(items, groups, budget)
        if self.pass_overhead_tokens is not None:
            longest = [max([items[index].length for index in bundle.members]) for bundle in bundles]
            counts = [len(bundle.members) for bundle in bundles]
            limits: dict[str, Any] = {"cost": self.cost, "pass_overhead_tokens": self.pass_overhead_tokens}
            parts = cut_padded(longest, budget, at_least=at_least, counts=counts, **limits)
        else:
            parts = bin_pack(
                [bundle.num_tokens for bundle in bundles],
                budget,
                at_least=at_least,
                size_of=(lambda part: tokens_together([bundles[index] for index in part])) if groups else None,
            )
        return [self._batch_of(items, groups, [bundles[index] for index in part]) for part in parts]

    def micro_batch(self, items: Sequence[Item]) -> MicroBatch:
        return MicroBatch(
            tuple([item.sample_id for item in items]),
            sum([item.length for item in items]),
            sum([item.num_label_tokens for item in items]),
            row_length=row_length(max([item.length for item in items])) if self.is_padded else None,
        )

    def assign_to_ranks(self, items: Sequence[Item]) -> list[list[Item]]:
        """Assign packed units to ranks, balanced by cost; those with a common prefix stay together if they can.

        No bundle of several units is larger than a rank's share of the tokens.
        """
        if self.num_ranks == 1:
            return [list(items)]
        groups = self._groups(items)
        if not groups and items[0].unit is None:  # most runs: none to bundle
            parts = partition([item.cost for item in items], self.num_ranks)
            return [[items[index] for index in of_rank] for of_rank in parts]
        total = sum([item.length for item in items]) - sum(tokens * (len(members) - 1) for tokens, members in groups)
        bundles = make_bundles(items, groups, total // self.num_ranks)
        costs = [sum([items[index].cost for index in bundle.members]) for bundle in bundles]
        for index, bundle in enumerate(bundles):
            if bundle.prefix_tokens and (num_again := len(bundle.members) - 1) > 0:
                costs[index] -= num_again * float(self.cost.flops(bundle.prefix_tokens, 0))
        shares = [[i for index in part for i in bundles[index].members] for part in partition(costs, self.num_ranks)]
        return [[items[index] for index in sorted(share)] for share in shares]

    def _groups(self, items: Sequence[Item]) -> list[PrefixGroup]:
        return [] if self.prefixes is None else self.prefixes.groups([item.sample_id for item in items])

    def _batch_of(self, items: Sequence[Item], groups: Sequence[PrefixGroup], bundles: Sequence[Bundle]) -> MicroBatch:
        """Return bundles of these samples as one micro-batch: first each group of samples, then samples alone."""
        members: dict[int, list[int]] = {}
        for bundle in bundles:
            members.setdefault(bundle.group, []).extend(bundle.members)
        ungrouped = members.pop(-1, [])
        ungrouped += [group[0] for group in members.values() if len(group) == 1]
        shared = [(groups[number].num_tokens, sorted(group)) for number, group in members.items() if len(group) > 1]
        order = [index for _, group in shared for index in group] + sorted(ungrouped)
        batch = self.micro_batch([items[index] for index in order])
        return replace(batch, shared=tuple((tokens, len(group)) for tokens, group in shared)) if shared else batch

    def cost_of(self, batch: MicroBatch) -> float:
        """Return what a micro-batch of rows costs: FLOPs with padding, and the fixed cost of a pass."""
        assert batch.row_length is not None
        assert self.pass_overhead_tokens is not None
        flops = len(batch.sample_ids) * float(self.cost.flops(batch.row_length, 0))
        return flops + self.cost.per_label * batch.num_label_tokens + self.pass_overhead_tokens * self.cost.per_token

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"the number of ranks is {self.num_ranks}; expected at least 1")


def assemble(
    samples: Samples, units_per_step: int, layout: BatchLayout, *, epoch: int, first_index: int
) -> Iterator[StepPlan]:
    """Yield steps of `units_per_step` ordered units (the last may have fewer), distributed over the ranks."""
    items, starts = samples.items(layout.cost), samples.unit_starts[::units_per_step].tolist()
    flops = () if samples.tower_flops is None else samples.tower_flops.tolist()
    tower = {item.sample_id: sample_flops for item, sample_flops in zip(items, flops, strict=bool(flops))}
    for offset, (start, stop) in enumerate(pairwise([*starts, len(items)])):
        group = items[start:stop]
        if not layout.is_padded:
            of_ranks = layout.assign_to_ranks(group)
            by_rank = [layout.micro_batches(of_rank) for of_rank in of_ranks]
            saved = [shared_flops(batches, layout.cost) for batches in by_rank]
            loads = [sum([item.cost for item in of_rank]) - less for of_rank, less in zip(of_ranks, saved, strict=True)]
        else:
            by_rank, loads = _assign_rows(group, layout, tower)
        if layout.lockstep:
            # equalize the ranks' counts by smaller micro-batches, which cost less than fillers
            most, by_id = max(map(len, by_rank)), {item.sample_id: item for item in group}
            of_ranks = [[by_id[sample_id] for batch in rank for sample_id in batch.sample_ids] for rank in by_rank]
            by_rank = [layout.micro_batches(of_rank, at_least=most) for of_rank in of_ranks]
        yield _step(first_index + offset, epoch, group, by_rank, loads, layout)


def _assign_rows(
    group: Sequence[Item], layout: BatchLayout, tower: Mapping[int, float]
) -> tuple[list[list[MicroBatch]], list[float]]:
    """Cut a step into micro-batches of similar lengths, and assign these to ranks; also return the ranks' loads.

    `tower` has the FLOPs of each sample's pictures, if any sample has some.
    """

    def cost_of(batch: MicroBatch) -> float:
        return layout.cost_of(batch) + (sum(tower[sample_id] for sample_id in batch.sample_ids) if tower else 0.0)

    if layout.num_ranks == 1:
        micro_batches = layout.micro_batches(group)
        return [micro_batches], [sum(map(cost_of, micro_batches))]
    units = [[group[index].length for index in bundle.members] for bundle in make_bundles(group)]
    longest = max([len(lengths) * row_length(max(lengths)) for lengths in units])
    total = sum(item.length for item in group)
    assignments: list[tuple[list[list[MicroBatch]], list[float]]] = []
    for cuts in ROW_CUTS:
        even = max(longest, int(ROW_SLACK * total / (cuts * layout.num_ranks)))
        batches = layout.micro_batches(group, max_tokens=min(layout.micro_batch_tokens, even))
        assignments.append(_assign(batches, [cost_of(batch) for batch in batches], layout.num_ranks))
    return min(assignments, key=lambda assigned: max(assigned[1]))


def _assign(
    batches: Sequence[MicroBatch], loads: Sequence[float], num_ranks: int
) -> tuple[list[list[MicroBatch]], list[float]]:
    """Assign micro-batches of these loads to ranks; also return the ranks' loads."""
    indices_by_rank = partition(loads, num_ranks)
    by_rank = [[batches[index] for index in of_rank] for of_rank in indices_by_rank]
    return by_rank, [sum([loads[index] for index in of_rank]) for of_rank in indices_by_rank]


def assemble_eval(samples: Samples, layout: BatchLayout) -> StepPlan:
    """Return all samples as one unshuffled step: micro-batches within the budget, balanced by cost.

    They hold consecutive units, or as rows units of similar lengths.
    """
    items = samples.items(layout.cost)
    if layout.is_padded:
        rows = layout.micro_batches(items)
        return _step(0, 0, items, *_assign(rows, [layout.cost_of(batch) for batch in rows], layout.num_ranks), layout)
    bins: list[list[Item]] = []
    room = -1
    for bundle in make_bundles(items):
        if bundle.num_tokens > room:
            bins.append([])
            room = layout.micro_batch_tokens
        bins[-1] += [items[index] for index in bundle.members]
        room -= bundle.num_tokens
    costs = [sum([item.cost for item in batch]) for batch in bins]
    return _step(0, 0, items, *_assign([layout.micro_batch(batch) for batch in bins], costs, layout.num_ranks), layout)


def check_fits(samples: Samples, layout: BatchLayout) -> None:
    """Raise UsageError if a sample is longer than a micro-batch may be, and DataError for impossible counts."""
    micro_batch_tokens = layout.micro_batch_tokens

    def named(index: int) -> str:
        return f"sample {index if samples.ids is None else samples.ids[index]}"

    longest, shortest = int(np.argmax(samples.lengths)), int(np.argmin(samples.lengths))
    if (num_tokens := int(samples.lengths[longest])) > micro_batch_tokens:
        num_over = int(np.count_nonzero(samples.lengths > micro_batch_tokens))
        raise UsageError(
            f"{named(longest)} has {num_tokens} tokens, more than "
            f"batch.micro_batch_tokens={micro_batch_tokens} (too long: {num_over} of {len(samples)})",
            [Fix({"batch.micro_batch_tokens": num_tokens}), Fix({"data.max_tokens": micro_batch_tokens})],
        )
    _check_units(samples, layout, named)
    if samples.lengths[shortest] < 1:
        raise DataError(f"{named(shortest)} has no tokens; rebuild the data")
    wrong = np.flatnonzero((samples.num_label_tokens < 0) | (samples.num_label_tokens > samples.lengths))
    if wrong.size:
        first = int(wrong[0])
        raise DataError(
            f"{named(first)} has {int(samples.num_label_tokens[first])} label tokens of "
            f"{int(samples.lengths[first])} tokens; rebuild the data"
        )


def _check_units(samples: Samples, layout: BatchLayout, named: Callable[[int], str]) -> None:
    """Raise UsageError if a unit of several samples has more tokens than a micro-batch may have."""
    if samples.units is None or samples.parts_units:
        return
    starts = samples.unit_starts
    # padding may lift a unit over the budget
    sizes = samples.unit_tokens(is_padded=layout.is_padded, prefixes=layout.unit_prefixes, with_padding=False)
    largest, budget = int(np.argmax(sizes)), layout.micro_batch_tokens
    if sizes[largest] > budget:
        raise UsageError(
            f"the unit of {named(int(starts[largest]))} has {int(sizes[largest])} tokens, more than "
            f"batch.micro_batch_tokens={budget} (too large: {np.count_nonzero(sizes > budget)} of {len(sizes)})",
            [Fix({"batch.micro_batch_tokens": int(sizes[largest])}, "or lower data.max_tokens")],
        )


def _step(
    index: int,
    epoch: int,
    items: Sequence[Item],
    by_rank: Sequence[Sequence[MicroBatch]],
    loads: Sequence[float],
    layout: BatchLayout,
) -> StepPlan:
    """Make a step whose ranks have `loads` FLOPs; in lockstep, pad every rank to the same number of micro-batches.

    Fillers repeat the shortest unit, without loss.
    """
    if layout.lockstep:
        shortest = min(make_bundles(items), key=lambda bundle: bundle.num_tokens)
        repeated = layout.micro_batch([items[index] for index in shortest.members])
        filler = replace(repeated, num_label_tokens=0, is_filler=True)
        most = max(map(len, by_rank))
        by_rank = [[*batches, *[filler] * (most - len(batches))] for batches in by_rank]
    if layout.expert_ranks > 1:
        # passes that run together are padded to the longest of them
        filled: list[list[MicroBatch]] = []
        for start in range(0, len(by_rank), layout.expert_ranks):
            group = by_rank[start : start + layout.expert_ranks]
            together = [max(batch.num_padded_tokens for batch in batches) for batches in zip(*group, strict=True)]
            for batches in group:
                longest = zip(batches, together, strict=True)
                filled.append([replace(batch, fill_tokens=num_tokens) for batch, num_tokens in longest])
        by_rank = filled
    merged = layout.micro_batch(items)
    balance = sum(loads) / (len(loads) * max(loads))
    return StepPlan(
        index, epoch, merged.sample_ids, merged.num_tokens, merged.num_label_tokens, tuple(map(tuple, by_rank)), balance
    )
