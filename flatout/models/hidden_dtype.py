"""Hidden states in the compute dtype between decoder layers whose weights are fp32 masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.models.blocks import decoder_layers, hidden_states, text_decoder
from flatout.models.packed import PackedBatch


def narrow_hidden_states(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Cast what the decoder's embeddings return to `dtype`; return a line for the console.

    Under torch.autocast, layers compute their products in it and add them to what they get, so it stays this dtype.
    """

    def cast(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(dtype)

    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    for module in text_decoder(model).modules():
        if isinstance(module, nn.Embedding) and module not in inside:
            module.register_forward_hook(cast)
    return f"hidden states between layers are {str(dtype).removeprefix('torch.')}"


def check_hidden_states(model: PreTrainedModel, batch: PackedBatch, dtype: torch.dtype) -> None:
    """Run one pass under autocast. Raises UsageError if a decoder layer gets hidden states in another dtype."""
    found: list[torch.dtype] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).dtype)

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in decoder_layers(model)]
    try:
        hidden_states(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if wrong := [index for index, own in enumerate(found) if own != dtype]:
        raise UsageError(
            f"full.hidden_states: model type {model.config.model_type} computes those of layer {wrong[0]} in "
            f"{str(found[wrong[0]]).removeprefix('torch.')}; set fp32"
        )
