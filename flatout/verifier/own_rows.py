"""Rows of `flatout verify` in the run's own precision: what arrives of adapters' changes, and the reference.

Plain transformers computes the reference, and a model that equals it earns no reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.config.objective import REFERENCE
from flatout.config.schema import Config
from flatout.data.reference_column import add_kept
from flatout.io.durable_io import DurableIO
from flatout.models.blocks import hidden_states
from flatout.models.lora.layer import LoraLinear, lora_layers
from flatout.models.probe import evaluating
from flatout.parallel.rank import Rank
from flatout.planner.steps.step_plan import StepPlan
from flatout.trainer.passes import why_kernels_differ
from flatout.trainer.planned_run import EvalSet, PlannedRun
from flatout.trainer.reference_logprobs import compute_step, reference_key
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import accumulate_gradients
from flatout.verifier.compare import LOGPROBS, Comparison, plan_quietly, set_up_quietly
from flatout.verifier.plain_loop import PlainModel, plain_logprobs, plain_model

# a layer may lose this much of the change, beyond what rounding hides in so few tokens
LIMIT = 0.1
# tokens of each layer that are looked at
MAX_TOKENS = 2048


class _Share(NamedTuple):
    """The share of a layer's change that is in its output, and its standard error from rounding."""

    value: float
    error: float


def adapter_rows(run: TrainingRun, step: StepPlan, *, has_adapter: bool) -> Iterator[Comparison]:
    """Yield how much of the adapters' change arrives after a first update and, if it has one, of the run's adapter.

    The first update of AdamW moves every value of B from 0 by the learning rate. A layer's share is the projection of
    its output's difference from the frozen product, computed in fp32 from the same input, on the change in fp32.
    """
    layers = {name: layer for name, layer in lora_layers(run.model).items() if isinstance(layer, LoraLinear)}
    if not layers:
        return
    if has_adapter:
        yield _row(run, step, layers, "adapter's change that arrives")
    saved_b = {name: layer.lora_b.detach().clone() for name, layer in layers.items()}
    generator = torch.Generator().manual_seed(run.config.seed)
    with torch.no_grad():
        for layer in layers.values():
            signs = torch.randint(2, layer.lora_b.shape, generator=generator) * 2 - 1
            layer.lora_b.copy_(signs * run.config.optim.lr)
    yield _row(run, step, layers, "first update's change that arrives")
    with torch.no_grad():
        for name, layer in layers.items():
            layer.lora_b.copy_(saved_b[name])


@torch.no_grad()
def _row(run: TrainingRun, step: StepPlan, layers: dict[str, LoraLinear], case: str) -> Comparison:
    estimates: dict[str, _Share] = {}

    def record(name: str, layer: LoraLinear, args: tuple[Any, ...], output: Tensor) -> None:
        x, y = (rows.flatten(0, -2)[:MAX_TOKENS].float() for rows in (args[0], output))
        # the same token in the first layer is rounded the same way: it says nothing new
        places = x.unique(dim=0, return_inverse=True)[1]
        x, y = (rows.new_empty(int(places.max()) + 1, rows.shape[1]).index_copy(0, places, rows) for rows in (x, y))
        frozen = x @ layer.weight.float().T
        change = layer.change(x, frozen)
        error = y - frozen if layer.bias is None else y - layer.bias.float() - frozen
        if size := float(change.double().square().sum()):
            noise = float(((error - change) * change).double().square().sum()) ** 0.5
            estimates[name] = _Share(float((error * change).double().sum()) / size, noise / size)

    hooks = [
        layer.register_forward_hook(lambda layer, args, output, name=name: record(name, layer, args, output))
        for name, layer in layers.items()
    ]
    run.fused_lora.refresh()
    try:
        with torch.compiler.set_stance("force_eager"), evaluating(run.model):
            hidden_states(run.model, next(iter(run.loader.batches(step.by_rank[0][:1]))))
    finally:
        for hook in hooks:
            hook.remove()
    if not estimates:
        return Comparison(case, verdict="left out", note="no adapter changes anything yet")
    # a layer without noise, such as in fp32, counts as one with very little
    weights = {name: 1 / max(estimate.error, 1e-6) ** 2 for name, estimate in estimates.items()}
    mean = math.fsum(weights[name] * estimate.value for name, estimate in estimates.items()) / math.fsum(
        weights.values()
    )
    lost = {name: abs(1 - estimate.value) - 4 * estimate.error for name, estimate in estimates.items()}
    worst = max(lost, key=lambda name: lost[name])
    difference = max(lost[worst], abs(1 - mean))
    row = Comparison(case, share=mean, worst_difference=difference, worst_parameter=worst, limit=LIMIT)
    return row.judged(LIMIT)


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
