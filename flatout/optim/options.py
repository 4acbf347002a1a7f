"""What a run decides of its optimizer, besides the settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

ParamGroups: TypeAlias = Sequence[dict[str, Any]]
"""Groups of parameters as torch's optimizers take them, each with its weight decay."""


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """What a run decides of its optimizer."""

    seed: int
    """Seed of random rounding."""
    is_bf16: bool
    """Whether some weights are bf16, without fp32 masters."""
    is_flat: bool
    """Whether parameters are flat, see `flatten`."""
    on_gpu: bool
    """Whether all parameters are on a GPU."""
    offset_of: Callable[[Tensor], int]
    """Returns the offset of a shard in its global tensor, in elements."""
    matrices: Collection[Tensor] = ()
    """The hidden matrices, see `hidden_matrices`."""


class ShapedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state differs from weight to weight, in names or shapes."""

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before the first update, sharded as the parameter is."""
        raise NotImplementedError
