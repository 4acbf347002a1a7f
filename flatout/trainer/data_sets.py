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
from flatout.planner.steps.run_plan import RunPlan, select_samples
from flatout.planner.steps.step_plan import StepPlan, assemble_eval
from flatout.trainer.normalizers import Normalizers


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation data set; `plan` is one pass over its `planned` samples.

    `mismatched` has its prompts with answers to other ones.
    """

    name: str
    store: TokenStore
    planned: PlannedSamples
    plan: StepPlan
    normalizers: Normalizers
    mismatched: EvalSet | None = None

    @property
    def max_documents(self) -> int:
        """The most samples of a micro-batch."""
        return max(len(batch.sample_ids) for batch in self.plan.micro_batches)


def eval_set(name: str, store: TokenStore, planned: PlannedSamples, normalizers: Normalizers) -> EvalSet:
    """Return an evaluation data set with one pass over these samples, in the order of their ids."""
    return EvalSet(name, store, planned, assemble_eval(planned.samples, planned.batch_layout), normalizers)


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
        layout = plan.batch_layout.for_others(int(other.lengths.max()))
        own = PlannedSamples(select_samples(other.lengths, other.num_labels, ids, layout), layout)
        planned.append(replace(each, mismatched=eval_set(each.name, other, own, each.normalizers)))
    return MismatchedSteps(
        stores[id(store)], plan.of_lengths(stores[id(store)].lengths, stores[id(store)].num_labels)
    ), tuple(planned)
