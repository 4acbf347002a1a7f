"""Hidden states in the compute dtype between decoder layers whose weights are fp32 masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import FullConfig
from flatout.errors import UsageError
from flatout.models.blocks import decoder_layers


def narrow_hidden_states(model: PreTrainedModel, full: FullConfig, dtype: torch.dtype) -> str | None:
    """Apply `full.hidden_states`: cast what the first decoder layer gets, and what each returns, to `dtype`.

    Returns a line for the console, None if the setting has its default. Raises UsageError for fp16, whose range is too
    small for hidden states of models that were trained in bf16.
    """
    if full.hidden_states == "fp32":
        return None
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float16:
        raise UsageError("full.hidden_states: model needs model.precision bf16; got fp16, where they may overflow")
    if model.dtype == dtype:
        return f"full.hidden_states: model has no effect, as the weights are {name} too"

    def narrow(states: Any) -> Any:
        return (states[0].to(dtype), *states[1:]) if isinstance(states, tuple) else states.to(dtype)

    def cast_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (narrow(args), kwargs) if args else (args, kwargs | {"hidden_states": kwargs["hidden_states"].to(dtype)})

    def cast_output(_: nn.Module, args: Any, output: Any) -> Any:
        return narrow(output)

    layers = decoder_layers(model)
    layers[0].register_forward_pre_hook(cast_input, with_kwargs=True)
    for layer in layers:
        # some return fp32: those with experts, or with a norm after attention or MLP
        layer.register_forward_hook(cast_output)
    return f"hidden states between layers are {name}"
