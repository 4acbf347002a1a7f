"""Low-rank adapters of fused experts: two small matrices for each expert, in the layout of PEFT's target_parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from flatout.models.experts.block import experts_modules
from flatout.models.frozen.frozen_experts import FrozenExperts
from flatout.models.lora.starts import AdapterPlace, AdapterStart, cpu_copy, first_values, uniform

# grouped products need 16 bytes
_RANK_MULTIPLE = 8


class ExpertLora(nn.Module):
    """Adds scaling * B_e A_e to each expert's frozen matrix W_e (out, in) of one parameter (arXiv:2106.09685).

    `base` is the experts module, or the ExpertLora of its other parameter, as PEFT nests them. `lora_a` (E r, in) and
    `lora_b` (out, r, E), which PEFT has as (out, r E), are fp32 masters (fp64 over fp64); `lora_b` starts at 0.
    The products stay split, so nothing of the size of the weights is made.
    """

    # a `LoraLinear` has these as well
    magnitude = None
    dropout = 0.0

    def __init__(
        self,
        base: nn.Module,
        parameter: str,
        *,
        rank: int,
        scaling: float,
        generator: torch.Generator,
        start: AdapterStart = uniform,
    ) -> None:
        super().__init__()
        self.base, self.parameter, self.rank, self.scaling = base, parameter, rank, scaling
        weight: Any = getattr(self.experts, parameter)
        self.num_experts, out_features, in_features = weight.shape
        if not isinstance(weight, FrozenExperts) and self.experts.is_transposed:
            out_features, in_features = in_features, out_features
        dtype = torch.promote_types(weight.dtype, torch.float32)
        place = AdapterPlace(self.num_experts * rank, in_features, lambda: cpu_copy(self.dense_weight), rank)
        self.lora_a = nn.Parameter(first_values(start, place, generator, weight.device, dtype))
        zeros = torch.zeros(out_features, rank, self.num_experts, dtype=dtype, device=weight.device)
        self.lora_b = nn.Parameter(zeros)

    @property
    def experts(self) -> Any:
        """The experts module below this and other adapters."""
        return self.base.experts if isinstance(self.base, ExpertLora) else self.base

    @property
    def dense_weight(self) -> Tensor:
        """The frozen weight (E, out, in): a view, or dequantized at each access."""
        stored = getattr(self.experts, self.parameter)
        if isinstance(stored, FrozenExperts):
            return stored.weight
        weight: Tensor = stored.detach()
        return weight.transpose(1, 2) if self.experts.is_transposed else weight

    def forward(self, *args: Any, **adapters: Any) -> Any:
        """Call the experts with this adapter, as transformers calls them."""
        return self.base(*args, **adapters, **{self.parameter: self})

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A (E, r, in) and scaled B (E, out, r) in a dtype, with zeros up to a multiple of 8 for r."""
        a = self.lora_a.view(self.num_experts, self.rank, -1)
        b = (self.scaling * self.lora_b).permute(2, 0, 1)
        more = -self.rank % _RANK_MULTIPLE
        return F.pad(a.to(dtype), (0, 0, 0, more)), F.pad(b.to(dtype), (0, more)).contiguous()

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base weight, computed in the masters' dtype, one expert at a time."""
        a = self.lora_a.view(self.num_experts, self.rank, -1)
        for expert, weight in enumerate(self.dense_weight):
            weight.copy_(weight.to(a.dtype) + self.scaling * (self.lora_b[..., expert] @ a[expert]))

    def extra_repr(self) -> str:
        return f"{self.parameter}, rank={self.rank}, scaling={self.scaling:g}"


def expert_parameters(model: nn.Module) -> dict[str, tuple[str, str, Tensor | FrozenExperts]]:
    """Return the matrices of fused experts by full name: the experts module's name, the parameter's, and its values."""
    parameters: dict[str, tuple[str, str, Tensor | FrozenExperts]] = {}
    for path, experts in experts_modules(model).items():
        for name, parameter in experts.named_parameters(recurse=False):
            if parameter.dim() == 3:
                parameters[f"{plain_name(path)}.{name}"] = (path, name, parameter)
        for name, child in experts.named_children():
            if isinstance(child, FrozenExperts):
                parameters[f"{plain_name(path)}.{name}"] = (path, name, child)
    return parameters


def num_expert_tensors(model: nn.Module) -> int:
    """Count the tensors that hold all experts of a layer, as transformers keeps them; convolutions have no experts."""
    num_tensors = 0
    for module in model.modules():
        parameters = [] if isinstance(module, _ConvNd | ExpertLora) else module.parameters(recurse=False)
        num_tensors += 1 if isinstance(module, FrozenExperts) else sum(parameter.dim() == 3 for parameter in parameters)
    return num_tensors


def plain_name(name: str) -> str:
    """Return the name of an experts module without the levels of its adapters."""
    while name.endswith(".base"):
        name = name.removesuffix(".base")
    return name
