"""The reference in `flatout verify`: plain transformers computes it, and a model that equals it earns no reward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flatout.config.objective import REFERENCE
from flatout.config.schema import Config
from flatout.data.reference_column import add_kept
from flatout.io.durable_io import DurableIO
from flatout.parallel.rank import Rank
from flatout.planner.steps.step_plan import StepPlan
from flatout.trainer.passes import why_kernels_differ
from flatout.trainer.planned_run import EvalSet, PlannedRun
from flatout.trainer.reference_logprobs import compute_step, reference_key
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import accumulate_gradients
from flatout.verifier.compare import LOGPROBS, Comparison, plan_quietly, set_up_quietly
from flatout.verifier.plain_loop import PlainModel, plain_model
from flatout.verifier.plain_objective import plain_logprobs

# relative, of a sample's log-probability: it may have been computed in another packing
KEPT_LIMITS, KEPT_LIMIT_16_BITS = {torch.float64: 1e-9, torch.float32: 1e-4}, 0.02
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")


def with_plain_reference(plain: PlainModel, config: Config, planned: PlannedRun, step: StepPlan) -> PlannedRun:
    """Return the plan with what plain transformers finds for one step's samples, without the adapter that is trained.

    All later plans of this folder have it too. A run whose objective has no reference stays as it is.
    """
    if REFERENCE not in planned.objective.columns:
        return planned
    adapter = config.objective.reference.adapter or config.lora.continue_from
    if adapter is not None:
        plain = plain_model(config, next(plain.model.parameters()).device, adapter)
    model: Any = plain.model
    rows = []
    with torch.no_grad(), model.disable_adapter() if adapter is None and config.method == "lora" else nullcontext():
        for store in (planned.store, *([] if planned.kl_pairs is None else [planned.kl_pairs.store])):
            samples = plain.read(store, step.sample_ids)
            rows.append([plain_logprobs(plain, sample)[0].double().sum().item() for sample in samples])
    DurableIO().write_json(config.folder / LOGPROBS, {"ids": list(step.sample_ids), "logprobs": rows})
    return plan_quietly(config, Rank())


def reference_rows(config: Config, step_index: int) -> Iterator[Comparison]:
    """Yield rows for the run's model at step 0 in its own precision, if its objective has a reference.

    One compares what an earlier run has kept for this step, which training reads, with the reference computed anew. The
    other computes the rewards of an objective that has them. All its differences are the largest reward, which must be
    0: the reference is computed by the same passes. If it is computed by other kernels, rewards are 0 only up to
    rounding, and the row is left out. There is none if the settings name another model as the reference.
    """
    planned = plan_quietly(config, Rank())
    names = planned.objective.sum_names
    places = [names.index(name) for name in REWARDS if name in names]
    differs = config.objective.reference.adapter is not None
    if REFERENCE not in planned.objective.columns:
        return
    with set_up_quietly(config, planned, Rank(), config.folder) as run:
        step = run.plan.step(step_index)
        compute_step(run, step)
        yield from _kept_rows(run, step)
        if not places or differs:
            return
        case = "rewards before the first update"
        if (why := why_kernels_differ(run)) is not None:
            yield Comparison(
                case, verdict="left out", note=f"not 0 to the bit: {why}, so the reference takes other kernels"
            )
            return
        largest = float(accumulate_gradients(run, step)[places].abs().max())
    row = Comparison(case, loss_difference=largest, worst_difference=largest)
    yield replace(row, norm_difference=largest).judged(0.0)


def _kept_rows(run: TrainingRun, step: StepPlan) -> Iterator[Comparison]:
    """Yield a row for the step's samples whose reference an earlier run has kept; none if it has kept none of them."""
    worst, where = -1.0, ""
    for data_set, loader in zip(run.planned.data_sets, run.loaders, strict=True):
        if isinstance(data_set, EvalSet):
            continue
        kept = np.full(loader.store.num_samples, np.nan)
        add_kept(kept, loader.store, reference_key(run, loader.store))
        for sample_id in (one for one in step.sample_ids if not np.isnan(kept[one])):
            own = float(loader.store.extra[REFERENCE][sample_id])
            if not (error := abs(float(kept[sample_id]) - own) / max(1.0, abs(own))) <= worst:
                worst, where = error, str(loader.store.origin(sample_id))
    if where:
        limit = KEPT_LIMITS.get(run.dtype, KEPT_LIMIT_16_BITS)
        row = Comparison("the reference that a run has kept", loss_difference=worst, worst_difference=worst)
        yield replace(row, norm_difference=worst, worst_parameter=where).judged(limit)
