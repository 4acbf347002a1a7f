"""fp32 masters of 16-bit weights: where they start, and the dtype of hidden states between their layers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.config.schema import FullConfig
from flatout.errors import UsageError
from flatout.kernels.rounding import dither_within_rounding
from flatout.models.blocks import decoder_layers
from flatout.models.lora.saved import SavedModule, TrainedRows

NARROW = (torch.bfloat16, torch.float16)


class Dither:
    """Which masters are multiplied in a narrower dtype, by name; tied ones have all of their names.

    fp32 masters of a file in bf16 start in the middle of what rounds to their value, so an update of less than half a
    rounding step changes nothing that the model computes with. Moved to random places within their rounding, their
    16-bit copies are the same to the bit, and an update of a hundredth of a step moves a hundredth of the weights. An
    embedding that is also the head is looked up in fp32, where it differs from the file by at most half a step.

    `compute` is the dtype under torch.autocast, or None; then only modules that LoRA trains in full have masters.
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype | None, seed: int) -> None:
        self._seed = seed
        chosen: dict[nn.Parameter, torch.dtype] = {}
        for module in model.modules():
            if isinstance(module, SavedModule):
                trained = dict(module.trained.named_parameters())
                chosen |= {trained[name]: dtype for name, dtype in module.dtypes.items() if name in trained}
            elif isinstance(module, TrainedRows):
                chosen[module.rows] = module.base.weight.dtype
            elif compute is not None and not isinstance(module, nn.modules.conv._ConvNd):
                own = list(module.parameters(recurse=False))
                is_product = isinstance(module, nn.Linear) or any(parameter.dim() == 3 for parameter in own)  # experts
                chosen |= dict.fromkeys(own if is_product else (), compute)
        self.dtypes = {
            name: chosen[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and chosen.get(parameter) in NARROW
        }

    def apply(self, name: str, master: Tensor, offset: Sequence[int] = ()) -> None:
        """Move one master, or the part of it that begins at `offset`, if it is one of these; in place."""
        if name in self.dtypes and master.dtype == torch.float32:
            seed = zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF)
            dither_within_rounding(master, self.dtypes[name], seed=seed, offset=offset)

    def apply_to(self, model: nn.Module) -> None:
        """Move a model's masters, tied ones once."""
        seen: set[Tensor] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self.dtypes and parameter not in seen:
                seen.add(parameter)
                self.apply(name, parameter.detach())


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
