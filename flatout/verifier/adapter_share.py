"""How much of what adapters change reaches their layers' outputs, in the run's own precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.models.blocks import hidden_states
from flatout.models.lora.layer import LoraLinear, lora_layers
from flatout.models.probe import evaluating
from flatout.planner.steps.step_plan import StepPlan
from flatout.trainer.state import TrainingRun
from flatout.verifier.compare import Comparison

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
