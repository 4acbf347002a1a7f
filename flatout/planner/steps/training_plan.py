"""The plan of a whole run, computed lazily from the length arrays: any step, or all steps from a given one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatout.config.schema import BatchConfig
from flatout.errors import DataError, Fix, UsageError, counted
from flatout.planner.cost import CostModel
from flatout.planner.steps.order import Families, permute
from flatout.planner.steps.step_plan import (
    BatchLayout,
    MicroBatch,
    StepPlan,
    assemble,
    check_fits,
    padding_share,
    shared_flops,
)
from flatout.planner.steps.units import Integers, Samples, unit_numbers

# part of every fingerprint: raise one when the order or the split into steps changes. A plan of single samples is what
# it was before there were units, so that older checkpoints go on
PLAN_VERSION, UNIT_PLAN_VERSION = 1, 2
# samples read from the arrays at once when iterating over steps
BLOCK_SAMPLES = 1 << 14
# steps, evenly spaced over the run, that the share of shared tokens is estimated from
NUM_SHARED_STEPS = 128
# steps, evenly spaced over the run, that its largest pass is looked for in
NUM_STEPS_SEEN = 500


@dataclass(frozen=True, eq=False)
class PlannedSamples:
    """The samples of a run or an evaluation, by ascending id, and how they are laid out in micro-batches."""

    samples: Samples
    batch_layout: BatchLayout

    @cached_property
    def unit_offsets(self) -> NDArray[np.int64] | None:
        """Where units begin among the samples, and their number, int64 (U + 1,); None: each sample is a unit."""
        return None if self.samples.units is None else np.append(self.samples.unit_starts, len(self.samples))

    @cached_property
    def unit_tokens(self) -> NDArray[np.int64]:
        """Tokens that a pass computes for each unit, int64 (U,): its prefix once, or its rows with padding."""
        return self.samples.unit_tokens(is_padded=self.batch_layout.is_padded, prefixes=self.batch_layout.unit_prefixes)

    @cached_property
    def part_tokens(self) -> NDArray[np.int64]:
        """As `unit_tokens`, of what a pass takes whole: units, or samples of units that may be parted."""
        return self.samples.part_tokens(is_padded=self.batch_layout.is_padded, prefixes=self.batch_layout.unit_prefixes)

    def flops(self, step: StepPlan) -> float:
        """Return the FLOPs of one step by the cost model, with those of padding."""
        indices = self.samples.indices_of(step.sample_ids)
        cost, lengths = self.batch_layout.cost, self.samples.lengths[indices]
        if self.batch_layout.is_padded:
            batches = [batch for batch in step.micro_batches if not batch.is_filler]
            lengths = np.concatenate([[batch.row_length] * len(batch.sample_ids) for batch in batches])
        flops = float(cost.flops(lengths, 0).sum()) + cost.per_label * step.num_label_tokens
        return flops + self.samples.tower_flops_of(indices) - shared_flops(step.micro_batches, cost)

    def forward_flops(self, step: StepPlan) -> float:
        """Return the FLOPs of passes without gradients over a step."""
        cost = self.batch_layout.cost.forward or self.batch_layout.cost
        return replace(self, batch_layout=replace(self.batch_layout, cost=cost)).flops(step)

    def resplit(self, step: StepPlan, rank: int, micro_batch_tokens: int) -> tuple[MicroBatch, ...]:
        """Split one rank's samples of a step into smaller micro-batches, as a plan with this token budget would.

        Samples, ranks and label counts do not change, units stay whole, and fillers are left out. Raises ValueError for
        a unit over the budget.
        """
        position = {sample_id: index for index, sample_id in enumerate(step.sample_ids)}
        real = [batch for batch in step.by_rank[rank] if not batch.is_filler]
        ids = sorted((i for batch in real for i in batch.sample_ids), key=position.__getitem__)
        samples = self.samples.take(self.samples.indices_of(ids))
        return tuple(
            self.batch_layout.micro_batches(samples.items(self.batch_layout.cost), max_tokens=micro_batch_tokens)
        )

    def largest_unit(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Return the tokens of the largest part in these micro-batches, as rows with their padding: none is smaller.

        A part is a unit, or a sample of units that may be parted.
        """
        indices = self.samples.indices_of([sample_id for batch in micro_batches for sample_id in batch.sample_ids])
        if self.unit_offsets is not None and not self.samples.parts_units:
            indices = np.searchsorted(self.unit_offsets, indices, side="right") - 1
        return int(self.part_tokens[indices].max())


@dataclass(frozen=True, eq=False)
class TrainingPlan(PlannedSamples):
    """All steps of a run as a pure function; holds the length arrays and nothing per step.

    Step i takes `batch.samples_per_step` units of epoch i // `steps_per_epoch`, and the last step of an epoch takes
    the remainder; no step spans two epochs. Which samples a step holds depends on the data, `batch` and `seed`, never
    on `num_ranks`, the token budget or the cost model. Most data has units of one sample. `families` are consecutive
    units. Make it with `make_plan`.
    """

    batch: BatchConfig
    seed: int
    num_steps: int
    families: Families | None = None
    why_empty: str = "no label tokens"
    """Why a step that trains nothing does not."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return len(self.samples)

    @property
    def num_units(self) -> int:
        """Units of one epoch."""
        return self.num_samples if self.unit_offsets is None else len(self.unit_offsets) - 1

    @property
    def most_samples_per_step(self) -> int:
        """An upper bound on the samples of a step."""
        largest = 1 if self.unit_offsets is None else int(np.diff(self.unit_offsets).max())
        return min(self.batch.samples_per_step * largest, self.num_samples)

    @property
    def shares_prefixes(self) -> bool:
        """Whether samples of a micro-batch share their common prefixes."""
        return self.batch_layout.prefixes is not None

    @property
    def batch_bounds(self) -> dict[str, int]:
        """Upper bounds on what a micro-batch holds: `max_documents` samples, and `max_prefixes` that they share."""
        if self.shares_prefixes:
            num_samples = self.most_samples_per_step
            # two samples at least have each
            return {"max_documents": num_samples, "max_prefixes": num_samples // 2}
        most = self.batch_layout.micro_batch_tokens // int(self.samples.lengths.min())
        return {"max_documents": min(self.most_samples_per_step, most), "max_prefixes": 0}

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_units // self.batch.samples_per_step)

    @property
    def numbers(self) -> range:
        """The steps of the run that it has: all, or those of a round."""
        return range(self.num_steps)

    def step(self, index: int) -> StepPlan:
        """Return the plan of one step. Raises IndexError outside [0, num_steps)."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of a run of {self.num_steps} steps")
        return next(self._block(index, index + 1))

    def steps(self, start: int = 0) -> Iterator[StepPlan]:
        """Yield all steps from `start` (the resume position) to the end, in order."""
        steps_per_block = max(1, BLOCK_SAMPLES // self.batch.samples_per_step)
        index = start
        while index < self.num_steps:
            epoch_end = (index // self.steps_per_epoch + 1) * self.steps_per_epoch
            stop = min(index + steps_per_block, epoch_end, self.num_steps)
            yield from self._block(index, stop)
            index = stop

    def sampled_steps(self, max_steps: int) -> Iterator[StepPlan]:
        """Yield at most `max_steps` steps, evenly spaced from the first to the last."""
        count = min(max_steps, len(self.numbers))
        for index in range(count):
            yield self.step(self.numbers[index * (len(self.numbers) - 1) // max(1, count - 1)])

    def epoch_after(self, step: StepPlan) -> float:
        """Return the passes over the data, counted in units, completed after this step."""
        done = (step.index % self.steps_per_epoch + 1) * self.batch.samples_per_step
        return step.epoch + min(1.0, done / self.num_units)

    def naive_tokens(self, step: StepPlan) -> int:
        """Return the tokens, with padding, that a padding loader would compute for this step:

        sum over batches of  count * longest,   count * longest <= micro_batch_tokens
        """
        return sum(len(batch) * max(batch) for rank in self.naive_batches(step) for batch in rank)

    def naive_batches(self, step: StepPlan) -> list[list[list[int]]]:
        """Return the batches of a padding loader for this step: for each rank, for each batch the samples' lengths.

        Each rank takes an equal number (within one) of consecutive samples, splits them into batches that fit the same
        budget when padded, and pads each batch to its longest sample.
        """
        lengths = self.samples.lengths[self.samples.indices_of(step.sample_ids)].tolist()
        num_ranks, ranks = self.batch_layout.num_ranks, []
        for rank in range(num_ranks):
            batches: list[list[int]] = []
            longest = 0
            for length in lengths[rank * len(lengths) // num_ranks : (rank + 1) * len(lengths) // num_ranks]:
                longest = max(longest, length)
                if not batches or (len(batches[-1]) + 1) * longest > self.batch_layout.micro_batch_tokens:
                    batches.append([])
                    longest = length
                batches[-1].append(length)
            ranks.append(batches)
        return ranks

    def padding_avoided(self, steps: Sequence[StepPlan]) -> float:
        """Return the share of a padding loader's tokens that are padding and not computed; 0 if steps compute more."""
        without = sum(step.num_padded_tokens + step.num_shared_tokens for step in steps)
        naive = sum(map(self.naive_tokens, steps))  # 0 for steps of a round without samples
        return max(0.0, 1.0 - without / naive) if naive else 0.0

    @property
    def shared_share(self) -> float:
        """The share of the samples' tokens that no pass computes, as samples share them; from sampled steps."""
        if not self.shares_prefixes:
            return 0.0
        steps = list(self.sampled_steps(NUM_SHARED_STEPS))
        return sum(step.num_shared_tokens for step in steps) / sum(step.num_tokens for step in steps)

    def with_layout(
        self, micro_batch_tokens: int, cost: CostModel, *, lockstep: bool = False, expert_ranks: int = 1
    ) -> TrainingPlan:
        """Return the same steps with another token budget and cost. Raises UsageError for a sample over the budget."""
        layout = replace(self.batch_layout, micro_batch_tokens=micro_batch_tokens, cost=cost, lockstep=lockstep)
        check_fits(self.samples, layout)
        return replace(self, batch_layout=replace(layout, expert_ranks=expert_ranks))

    def of_lengths(self, lengths: Integers, num_label_tokens: Integers) -> TrainingPlan:
        """Return the same steps for another sample of each id; arrays as for `make_plan`. Nothing is shared."""
        ids = np.arange(len(lengths)) if self.samples.ids is None else self.samples.ids
        samples = replace(self.samples, lengths=lengths[ids], num_label_tokens=num_label_tokens[ids])
        return replace(self, samples=samples, batch_layout=self.batch_layout.for_others(int(samples.lengths.max())))

    def describe(self, ranks_per_group: int = 1) -> str:
        """Describe the plan in one line; balance and padding come from a sample of its steps.

        If `ranks_per_group` ranks share each micro-batch, a group of them is one rank of the plan.
        """
        steps = list(self.sampled_steps(32))
        balance = sum(step.balance for step in steps) / len(steps)
        padding = padding_share(steps)
        epochs = self.epoch_after(self.step(self.num_steps - 1))
        num_groups = self.batch_layout.num_ranks
        ranks = counted(num_groups, "rank") if ranks_per_group == 1 else counted(num_groups, "group")
        ranks += "" if ranks_per_group == 1 else f" of {ranks_per_group} ranks"
        unit, samples = ("samples", "") if self.unit_offsets is None else ("units", f" ({self.num_samples:,} samples)")
        return (
            f"{counted(self.num_steps, 'step')} of {self.batch.samples_per_step} {unit}, "
            f"{counted(epochs, 'epoch', '.4g')} of {self.num_units:,}{samples}; {ranks}, balance {balance:.3f}, "
            f"{self.padding_avoided(steps):.0%} padding avoided{f', {padding:.1%} padding' if padding else ''}"
        )

    @cached_property
    def largest_pass(self) -> tuple[StepPlan, int, MicroBatch] | None:
        """A step with the largest micro-batch of `NUM_STEPS_SEEN`, its rank and itself; None without labels."""
        steps = (step for step in self.sampled_steps(NUM_STEPS_SEEN) if step.num_label_tokens)
        passes = ((step, rank, batch) for step in steps for rank, taken in enumerate(step.by_rank) for batch in taken)
        return max(passes, key=lambda item: item[2].num_padded_tokens, default=None)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of what decides which samples a step holds: ids, lengths, label counts, batch size, order, seed.

        It does not depend on the run's length, so that runs can be extended, nor on ranks or the token budget.
        """
        version = PLAN_VERSION if self.unit_offsets is None else UNIT_PLAN_VERSION
        facts = [version, self.seed, self.batch.samples_per_step, self.batch.shuffle, self.num_samples]
        digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
        samples, families = self.samples, self.families.starts if self.families and self.batch.shuffle else None
        for array in (samples.lengths, samples.num_label_tokens, samples.ids, families, self.unit_offsets):
            if array is None:
                continue
            for start in range(0, len(array), BLOCK_SAMPLES):
                digest.update(np.ascontiguousarray(array[start : start + BLOCK_SAMPLES], dtype="<i8").tobytes())
        return digest.hexdigest()

    def _block(self, first: int, stop: int) -> Iterator[StepPlan]:
        """Yield the steps [first, stop), which are all in one epoch."""
        epoch, first_in_epoch = divmod(first, self.steps_per_epoch)
        per_step, offsets = self.batch.samples_per_step, self.unit_offsets
        start = first_in_epoch * per_step
        positions = np.arange(start, min(start + (stop - first) * per_step, self.num_units))
        if self.batch.shuffle and self.families is not None:
            positions = self.families.permute(positions, seed=self.seed, epoch=epoch)
        elif self.batch.shuffle:
            positions = permute(positions, self.num_units, seed=self.seed, epoch=epoch)
        if offsets is not None:
            sizes = np.diff(offsets)[positions]
            first_of = np.repeat(offsets[positions] - (np.cumsum(sizes) - sizes), sizes)
            positions = first_of + np.arange(len(first_of))
        return assemble(self.samples.take(positions), per_step, self.batch_layout, epoch=epoch, first_index=first)


def make_plan(
    samples: Samples, layout: BatchLayout, batch: BatchConfig, seed: int, row_keys: ArrayLike | None = None
) -> TrainingPlan:
    """Plan a run of samples from `select_samples`, by a layout with any token budget that all of them fit in.

    With `row_keys` (n,) of all samples of the data set, neighbours of one row follow each other in every epoch.
    `batch.max_steps` overrides `batch.epochs`; a fraction of an epoch is rounded up to whole steps. A single step
    without label tokens is planned; the run skips it.
    """
    families = None
    if row_keys is not None:
        keys = np.asarray(row_keys)
        keys = keys if samples.ids is None else keys[samples.ids]
        families = Families.of(keys if samples.units is None else keys[samples.unit_starts])
    epoch = TrainingPlan(samples, layout, batch, seed, num_steps=0, families=families)
    # exact: in floating point, 1.1 epochs of 10 steps are 11.000000000000002, which would round up to 12
    num_steps = batch.max_steps or -int(-Fraction(str(batch.epochs)) * epoch.steps_per_epoch // 1)
    return replace(epoch, num_steps=num_steps)


def split_held_out(
    row_keys: ArrayLike,
    fraction: float,
    seed: int,
    hashes: ArrayLike | None = None,
    unit_offsets: ArrayLike | None = None,
    prompts: ArrayLike | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split samples deterministically into sorted (train_ids, eval_ids): disjoint, covering all, neither empty.

    `row_keys` (n,) gives the row that each sample comes from, `hashes` (n,) its content, `prompts` (n,) its prompt.
    Samples of one row (its copies in a weighted mix, the windows of a long text), samples of one unit, and rows with
    equal samples or prompts go to the same side; rows with more copies than all of the evaluation should have go to
    training. Raises UsageError for a fraction outside (0, 1), DataError for fewer than two different rows.
    """
    if not 0.0 < fraction < 1.0:
        raise UsageError(f"eval.fraction is {fraction}; expected a share between 0 and 1")
    keys = np.asarray(row_keys)
    rows = np.unique(keys, return_inverse=True)[1]
    # each group is named by its first sample
    labelings = [rows] if hashes is None else [rows, np.unique(np.asarray(hashes), return_inverse=True)[1]]
    if (units := unit_numbers(unit_offsets, None)) is not None:
        labelings.append(np.asarray(units, np.int64))
    if prompts is not None:
        labelings.append(np.asarray(prompts, np.int64))
    group = _joined(labelings)
    groups, group_of, sizes = np.unique(group, return_inverse=True, return_counts=True)
    num_groups = len(groups)
    if num_groups < 2:
        what = f"rows have one {'content' if prompts is None else 'prompt'} and" if len(np.unique(rows)) > 1 else "row"
        fixes = [Fix({"eval.split_by": "row"})] * (prompts is not None) + [Fix({"eval.fraction": 0}, "no evaluation")]
        raise DataError(f"{len(np.unique(rows))} {what} cannot be split into training and evaluation", fixes)
    num_eval = min(max(1, round(num_groups * fraction)), num_groups - 1)
    order = permute(np.arange(num_groups), num_groups, seed=seed, epoch=0, purpose="held-out")
    num_rows = np.bincount(group_of[np.unique(rows, return_index=True)[1]], minlength=num_groups)
    is_huge = (num_rows > 1) & (sizes > max(1, round(len(keys) * fraction)))
    order = np.concatenate([order[~is_huge[order]], order[is_huge[order]]])
    is_held_out = np.zeros(num_groups, bool)
    is_held_out[order[:num_eval]] = True
    return np.flatnonzero(~is_held_out[group_of]), np.flatnonzero(is_held_out[group_of])


def _joined(labelings: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the first sample of each sample's group (n,); samples with a common label in any labeling are one."""
    group = np.arange(len(labelings[0]))
    while True:
        before = group
        for labels in labelings:
            first = np.full(labels.max(initial=-1) + 1, len(labels))
            np.minimum.at(first, labels, group)
            group = first[labels]
        if (group == before).all():
            return group


def select_samples(
    lengths: ArrayLike,
    num_label_tokens: ArrayLike,
    sample_ids: ArrayLike | None,
    layout: BatchLayout,
    unit_offsets: ArrayLike | None = None,
    *,
    parts_units: bool = False,
) -> Samples:
    """Select a plan's samples from integer arrays (n,), tokens and label tokens of each; mapped ones stay on disk.

    `sample_ids` (ascending, unique) restricts them. Units begin at `unit_offsets` (U + 1,); by default each sample is
    one. With `parts_units`, micro-batches may part them, so that only samples have to fit. Raises UsageError for a
    sample or unit longer than a micro-batch of `layout`, and DataError for invalid ids, empty or damaged data, a part
    of a unit, and data without label tokens.
    """
    lengths, num_label_tokens = np.asanyarray(lengths), np.asanyarray(num_label_tokens)
    if lengths.ndim != 1 or lengths.shape != num_label_tokens.shape:
        raise DataError(f"lengths {lengths.shape} and label counts {num_label_tokens.shape} must be equal 1-d shapes")
    samples = Samples(lengths, num_label_tokens, units=unit_numbers(unit_offsets, None), parts_units=parts_units)
    if sample_ids is not None:
        ids = np.asarray(sample_ids, dtype=np.int64)
        if ids.ndim != 1 or (ids.size and (ids[0] < 0 or ids[-1] >= len(lengths))) or (np.diff(ids) <= 0).any():
            raise DataError(f"sample ids must be ascending and unique, from 0 to {len(lengths) - 1}")
        # giving all ids is the same as giving none
        if len(ids) != len(lengths):
            units = unit_numbers(unit_offsets, ids)
            samples = Samples(lengths[ids], num_label_tokens[ids], ids, units, parts_units=parts_units)
    if not len(samples):
        raise DataError("the data set is empty; add rows")
    check_fits(samples, layout)
    if not samples.num_label_tokens.any():
        raise DataError(f"none of the {len(samples)} samples has a label token, so there is no loss to compute")
    return samples
