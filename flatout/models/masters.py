"""fp32 masters of 16-bit weights: where they start, so that updates smaller than a rounding step are not lost."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatout.kernels.rounding import dither_within_rounding
from flatout.models.lora.saved import SavedModule, TrainedRows

NARROW = (torch.bfloat16, torch.float16)


class Dither:
    """Which masters are multiplied in a narrower dtype, by name; tied ones have all of their names.

    A pretrained file in bf16 has values of bf16 only. fp32 masters that start there all stand in the middle of what
    rounds to their value, so an update of less than half a rounding step changes no weight that the model computes
    with: early in training, little is learnt. At random places within their rounding, the 16-bit copies are the same
    to the bit, and an update of a hundredth of a step moves a hundredth of the weights by a whole step. An embedding
    that is also the head is looked up in fp32: there, it differs from the file by at most half a step.

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
            elif compute is not None and (isinstance(module, nn.Linear) or _is_experts(module)):
                chosen |= dict.fromkeys(module.parameters(recurse=False), compute)
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


def _is_experts(module: nn.Module) -> bool:
    """Whether a module's own parameters are stacks of matrices, one for each expert."""
    parameters = list(module.parameters(recurse=False))
    return not isinstance(module, nn.modules.conv._ConvNd) and any(parameter.dim() == 3 for parameter in parameters)
