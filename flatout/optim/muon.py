"""Muon for hidden matrices, and AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.config.optim import OPTIMIZERS, OptimConfig
from flatout.errors import Fix, UsageError
from flatout.optim.adamw_8bit import adam_options
from flatout.optim.options import OptimizerOptions, ParamGroups, ShapedOptimizer


class Muon(ShapedOptimizer):
    """torch's Muon (Jordan 2024; arXiv:2502.16982) for hidden matrices, and its AdamW for all other weights.

    A matrix's momentum is orthogonalized as a whole, in bf16, and scaled by 0.2 sqrt(max(rows, columns)), so that its
    root mean square is that of AdamW's usual update: learning rate and weight decay are AdamW's. The momentum is 0.95
    with Nesterov's step, and the orthogonalization takes five Newton-Schulz steps, as in both sources. State:
    `momentum_buffer` for a hidden matrix, and AdamW's for others. Both optimizers share their groups and state with
    this one.
    """

    def __init__(self, groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> None:
        parts: list[list[dict[str, Any]]] = []
        for of_matrices in (True, False):
            chosen = [[one for one in group["params"] if (one in options.matrices) is of_matrices] for group in groups]
            parts.append([{**group, "params": some} for group, some in zip(groups, chosen, strict=True) if some])
        matrices, others = parts
        self._matrices, self._fused = options.matrices, options.on_gpu
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.lr, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            self._optimizers.append(torch.optim.AdamW(others, fused=options.on_gpu, **adam_options(config)))
        super().__init__([group for one in self._optimizers for group in one.param_groups], {})
        for one in self._optimizers:
            one.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for one in self._optimizers:
            one.step()

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before the first update."""
        is_matrix = parameter in self._matrices
        names = OPTIMIZERS["muon"].state_shapes(parameter.shape, is_matrix=is_matrix)
        step = torch.zeros((), device=parameter.device if self._fused else "cpu")
        return {name: torch.zeros_like(parameter) for name in names} | ({} if is_matrix else {"step": step})


def make(groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> Muon:
    """Return Muon. Raises UsageError where no hidden matrix is trained."""
    if not options.matrices:
        raise UsageError(
            "optim.name: muon updates hidden matrices, but this run trains none", [Fix({"optim.name": "adamw"})]
        )
    return Muon(groups, config, options)
