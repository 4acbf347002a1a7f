"""What of each decoder layer is compiled: the layer as one graph, its submodules one by one, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.models.arch_quirks import is_stateful_kind, loops_over_tokens, packed_hybrid
from flatout.models.blocks import decoder_layers

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
