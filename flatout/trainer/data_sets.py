"""The data sets of a run besides that of training: those of evaluation, and KL pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flatout.data.kl_pairs import KLStore, make_kl_store
from flatout.data.token_store import TokenStore
from flatout.objectives.protocol import Objective
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.step_plan import StepPlan, assemble_eval
from flatout.planner.steps.training_plan import TrainingPlan, select_samples
from flatout.trainer.normalizers import Normalizers


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation data set; `step` is one pass over the samples of `plan`, `kl_pairs` has its prompts' KL pairs."""

    name: str
    store: TokenStore
    plan: PlannedSamples
    step: StepPlan
    normalizers: Normalizers
    kl_pairs: EvalSet | None = None

    @property
    def max_documents(self) -> int:
        """The most samples of a micro-batch."""
        return max(len(batch.sample_ids) for batch in self.step.micro_batches)


def make_eval_set(name: str, store: TokenStore, plan: PlannedSamples, normalizers: Normalizers) -> EvalSet:
    """Return an evaluation data set with one pass over these samples, in the order of their ids."""
    return EvalSet(name, store, plan, assemble_eval(plan.samples, plan.batch_layout), normalizers)


class KLPairs(NamedTuple):
    """The steps of a run over KL pairs: its prompts with the answers to other ones."""

    store: KLStore
    plan: TrainingPlan


def plan_kl_pairs(
    objective: Objective, store: TokenStore, plan: TrainingPlan, eval_sets: Sequence[EvalSet]
) -> tuple[KLPairs | None, tuple[EvalSet, ...]]:
    """Plan the same steps and evaluations over KL pairs, if the objective estimates anything.

    Returns None without, and the evaluation sets with theirs.
    """
    if not objective.estimates:
        return None, tuple(eval_sets)
    stores = [store, *(eval_set.store for eval_set in eval_sets)]
    kl_stores = {id(store): make_kl_store(store) for store in stores}
    with_kl_pairs = []
    for eval_set in eval_sets:
        kl_store, ids = kl_stores[id(eval_set.store)], np.sort(eval_set.step.sample_ids)
        layout = plan.batch_layout.for_others(int(kl_store.lengths.max()))
        kl_plan = PlannedSamples(select_samples(kl_store.lengths, kl_store.num_label_tokens, ids, layout), layout)
        own_pairs = make_eval_set(eval_set.name, kl_store, kl_plan, eval_set.normalizers)
        with_kl_pairs.append(replace(eval_set, kl_pairs=own_pairs))
    kl_store = kl_stores[id(store)]
    return KLPairs(kl_store, plan.of_lengths(kl_store.lengths, kl_store.num_label_tokens)), tuple(with_kl_pairs)
