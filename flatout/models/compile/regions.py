"""What of each decoder layer is compiled, as one graph or in parts, and how compiled layers compare with eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flatout.models.arch_quirks import is_stateful_kind, loops_over_tokens, packed_hybrid
from flatout.models.blocks import decoder_layers
from flatout.models.load.model import LoadedModel
from flatout.models.packed import PackedBatch

# a layer, its arguments, and whether autocast was on around it: a strategy may turn it off
LayerCall: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any], bool]
Forward: TypeAlias = Callable[[PackedBatch], tuple[torch.Tensor, torch.Tensor]]
# part of the compiler's error for a function that its author has excluded from compilation
_EXCLUDED = "torch.compiler.disable"


class Regions:
    """The layers of a model, and those that are not one graph: `split` and `eager` hold why, by layer.

    Layers of one class and type (`layer_types`) share their code and fall back together. Submodules of a split layer
    may be several graphs, around kernels that exclude themselves, such as those of flash-linear-attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = decoder_layers(model)
        self.split: dict[nn.Module, str] = {}
        self.eager: dict[nn.Module, str] = {}
        self._config = model.config.get_text_config()
        self._types = layer_types(self.layers, model)
        self._loops = loops_over_tokens(self._config)

    def compile(self) -> None:
        """Compile every layer as one graph, except recurrent ones that may be a loop over tokens."""
        if packed_hybrid(self._config)[1]:
            _tell_compile_from_export()
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=True)
        if not self._loops:
            return
        why = "transformers may compute its recurrence by a loop over tokens"
        has_kinds = all(len(kind) > 1 for kind in self._types)
        has_convolution = {layer: _has_convolution(layer) for layer in self.layers}
        for layer, kind in zip(self.layers, self._types, strict=True):
            if has_convolution[layer]:
                self._split(layer, why)
            elif is_stateful_kind(kind[-1]) if has_kinds else not any(has_convolution.values()):
                self.run_eagerly([layer], why)

    def fall_back(self, layer: nn.Module, why: str) -> None:
        """Split all layers of this layer's kind if a kernel excludes itself, otherwise let them run eagerly."""
        layer_type = self._types[self.layers.index(layer)]
        kinds = zip(self.layers, self._types, strict=True)
        same = [other for other, kind in kinds if kind == layer_type and other not in self.eager]
        if layer in self.split or _EXCLUDED not in why:
            self.run_eagerly(same, why)
            return
        for other in same:
            self._split(other, why)

    def run_eagerly(self, layers: Iterable[nn.Module], why: str) -> None:
        for layer in layers:
            layer.compile(disable=True)
            if self.split.pop(layer, None) is not None:
                for part in layer.children():
                    part.compile(disable=True)
            self.eager[layer] = why

    def _split(self, layer: nn.Module, why: str) -> None:
        # torch has no public way back from Module.compile; compile(disable=True) would disable the parts as well
        layer._compiled_call_impl = None
        for part in layer.children():
            if not (self._loops and _has_convolution(part)):
                part.compile(dynamic=True)
        self.split[layer] = why


def layer_types(layers: list[nn.Module], model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return each layer's class and, where the config has one, its entry of `layer_types`."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    entries = [(kind,) for kind in types] if len(types) == len(layers) else [()] * len(layers)
    return [(type(layer).__name__, *kind) for layer, kind in zip(layers, entries, strict=True)]


def ends_of_kinds(layers: list[nn.Module], model: PreTrainedModel) -> set[nn.Module]:
    """Return the first and the last layer of each kind: of the same modules, shapes and type of attention."""
    kinds: dict[Any, list[nn.Module]] = {}
    for layer, layer_type in zip(layers, layer_types(layers, model), strict=True):
        modules = [(name, type(module)) for name, module in layer.named_modules()]
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in layer.named_parameters()]
        kind = (layer_type, tuple(modules), tuple(shapes))
        kinds.setdefault(kind, []).append(layer)
    return {layer for same in kinds.values() for layer in (same[0], same[-1])}


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv1d) for part in module.modules())


def _tell_compile_from_export() -> None:
    """Let `torch.compiler.is_exporting()` be false in compiled code, as newer torch does (pytorch/pytorch#176499).

    In torch 2.11 it is true there, and while it is, transformers calls its own loop over tokens, which ignores
    documents, in place of kernels of other packages. This lasts as long as the process, since layers may be compiled
    again during a run; torch.export in strict mode sees it, too.
    """
    from torch._dynamo.variables import torch as tracing

    states: dict[Any, bool | None] = getattr(tracing, "tracing_state_functions", dict)()
    if torch.compiler.is_exporting in states:
        states[torch.compiler.is_exporting] = False


def record_calls(
    loaded: LoadedModel, layers: Iterable[nn.Module], batch: PackedBatch, wrapper: Forward
) -> list[LayerCall]:
    """Record what each of these layers is called with in one forward pass of the whole model."""
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((layer, args, kwargs, torch.is_autocast_enabled(loaded.model.device.type)))

    with ExitStack() as hooks, torch.no_grad(), loaded.casting():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(record, with_kwargs=True))
        wrapper(batch)
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
