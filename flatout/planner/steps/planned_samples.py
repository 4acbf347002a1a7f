"""Samples with the layout of their micro-batches: what it takes to split a rank's passes again, into smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flatout.planner.steps.step_plan import BatchLayout, MicroBatch, StepPlan, shared_flops
from flatout.planner.steps.units import Samples


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
        """Return the tokens of the largest unit in these micro-batches, as rows with their padding: none is smaller."""
        indices = self.samples.indices_of([sample_id for batch in micro_batches for sample_id in batch.sample_ids])
        if self.unit_offsets is not None:
            indices = np.searchsorted(self.unit_offsets, indices, side="right") - 1
        return int(self.unit_tokens[indices].max())
