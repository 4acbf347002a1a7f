"""Call single decoder layers as the whole model does, and compare compiled layers with eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from flatout.models.load.model import LoadedModel
from flatout.models.packed import PackedBatch

# a layer, its arguments, and whether autocast was on around it: a strategy may turn it off
LayerCall: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any], bool]
Forward: TypeAlias = Callable[[PackedBatch], tuple[torch.Tensor, torch.Tensor]]


def record_calls(
    loaded: LoadedModel, layers: Iterable[nn.Module], batch: PackedBatch, wrapper: Forward
) -> list[LayerCall]:
    """Record what each of these layers is called with in one forward pass of the whole model."""
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((layer, args, kwargs, torch.is_autocast_enabled(loaded.model.device.type)))

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    with torch.no_grad(), autocast_of(loaded, loaded.autocast):
        wrapper(batch)
    for hook in hooks:
        hook.remove()
    return calls


def compare_with_eager(loaded: LoadedModel, trained: list[nn.Parameter], call: LayerCall) -> tuple[float, str]:
    """Compare a compiled layer's output, input gradient and trained gradients with the eager ones.

    Return the smallest cosine, and which tensor it belongs to.

    Each layer is compared on its own real input, as rounding accumulates over many layers until the comparison is
    meaningless. For a sharded layer, each rank compares its shard.
    """
    direction = torch.randn_like(call[1][0])
    with torch.compiler.set_stance("force_eager"):
        eager = _run(loaded, trained, call, direction)
    compiled = _run(loaded, trained, call, direction)
    names = ("the output", "the input's gradient", "the gradient of trained weights")
    # an adapter's B starts at zero, and so does A's gradient
    return min(
        # a comparison with NaN would be false
        (F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).nan_to_num(nan=-1.0).item(), name)
        for name, a, b in zip(names, eager, compiled, strict=True)
        if a.any() or b.any()
    )


def _run(
    loaded: LoadedModel, trained: list[nn.Parameter], call: LayerCall, direction: torch.Tensor
) -> list[torch.Tensor]:
    """Return a layer's output, its input's gradient and its weights' gradients, given `direction` as the output's."""
    layer, args, kwargs, has_autocast = call
    x = args[0].detach().requires_grad_()
    with autocast_of(loaded, has_autocast):
        result = layer(x, *args[1:], **kwargs)
    output = result[0] if isinstance(result, tuple) else result
    x_grad, *grads = gradients(output, [x, *trained], direction.to(output.dtype))
    assert x_grad is not None
    # compared together, as a single tensor's gradient may be pure rounding error
    flat = torch.cat([x_grad.new_zeros(1), *(grad.flatten().to(x.device) for grad in grads if grad is not None)])
    return [output.detach(), x_grad, flat]


def gradients(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], direction: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return the gradients of `inputs` (this rank's shard if sharded), leaving `.grad` empty."""
    if not any(isinstance(tensor, DTensor) for tensor in inputs):
        return list(torch.autograd.grad(output, inputs, direction, allow_unused=True))
    # the graph only contains the gathered copy of a sharded weight; its own gradient comes from the strategy's hooks
    output.backward(direction)
    grads: list[Any] = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def autocast_of(loaded: LoadedModel, enabled: bool) -> torch.autocast:
    """Return autocast to the model's compute dtype, or a context without it."""
    return torch.autocast(loaded.model.device.type, dtype=loaded.dtype, enabled=enabled)
