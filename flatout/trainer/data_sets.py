"""The data sets of a run besides that of training: those of evaluation, and prompts with answers to other ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flatout.data.mismatched import MismatchedStore, mismatched
from flatout.data.token_store import TokenStore
from flatout.objectives.protocol import Objective
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.run_plan import RunPlan, make_eval_plan, select_samples
from flatout.planner.steps.step_plan import BatchLayout, StepPlan
from flatout.trainer.normalizers import Normalizers


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation data set; `plan` is one pass over it. `mismatched` has its prompts with answers to other ones."""

    name: str
    store: TokenStore
    plan: StepPlan
    normalizers: Normalizers
    layout: BatchLayout
    mismatched: EvalSet | None = None

    @property
    def planned(self) -> PlannedSamples:
        """Its samples, which split its passes again."""
        ids, store = np.sort(self.plan.sample_ids), self.store
        samples = select_samples(store.lengths, store.num_labels, ids, self.layout, store.unit_offsets)
        return PlannedSamples(samples, self.layout)

    @property
    def max_documents(self) -> int:
        """The most samples of a micro-batch."""
        return max(len(batch.sample_ids) for rank in self.plan.ranks for batch in rank)


class MismatchedSteps(NamedTuple):
    """The steps of a run, of prompts with answers to other ones."""

    store: MismatchedStore
    plan: RunPlan


def plan_mismatched(
    objective: Objective, store: TokenStore, plan: RunPlan, eval_sets: Sequence[EvalSet]
) -> tuple[MismatchedSteps | None, tuple[EvalSet, ...]]:
    """Plan the same steps and evaluations of prompts with answers to other ones, if the objective estimates anything.

    Returns None without, and the evaluation sets with theirs.
    """
    if not objective.estimates:
        return None, tuple(eval_sets)
    stores = {id(each): mismatched(each) for each in (store, *(each.store for each in eval_sets))}
    planned = []
    for each in eval_sets:
        other, ids = stores[id(each.store)], np.sort(each.plan.sample_ids)
        layout = plan.layout.for_others(int(other.lengths.max()))
        own = make_eval_plan(other.lengths, other.num_labels, ids, layout=layout)
        planned.append(replace(each, mismatched=EvalSet(each.name, other, own, each.normalizers, layout)))
    return MismatchedSteps(
        stores[id(store)], plan.of_lengths(stores[id(store)].lengths, stores[id(store)].num_labels)
    ), tuple(planned)
