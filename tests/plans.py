"""Plans from arrays, as tests of the planner make them."""

from __future__ import annotations

from typing import Any

from flatout.config.schema import BatchConfig
from flatout.planner.cost import COST_BY_TOKENS, CostModel
from flatout.planner.steps import training_plan
from flatout.planner.steps.step_plan import BatchLayout, StepPlan, assemble_eval
from flatout.planner.steps.training_plan import TrainingPlan, select_samples


def make_plan(
    lengths: Any, num_label_tokens: Any, batch: BatchConfig, *, micro_batch_tokens: int, seed: int, num_ranks: int,
    cost: CostModel = COST_BY_TOKENS, sample_ids: Any = None, row_keys: Any = None, unit_offsets: Any = None,
    parts_units: bool = False, **layout: Any,
) -> TrainingPlan:  # fmt: skip
    own = BatchLayout(num_ranks, micro_batch_tokens, cost, **layout)
    samples = select_samples(lengths, num_label_tokens, sample_ids, own, unit_offsets, parts_units=parts_units)
    return training_plan.make_plan(samples, own, batch, seed, row_keys)


def make_eval_plan(
    lengths: Any, num_label_tokens: Any, sample_ids: Any = None, *, layout: BatchLayout, unit_offsets: Any = None
) -> StepPlan:
    return assemble_eval(select_samples(lengths, num_label_tokens, sample_ids, layout, unit_offsets), layout)
