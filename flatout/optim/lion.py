"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flatout.config.optim import OptimConfig
from flatout.optim.flat import FlatOptimizer
from flatout.optim.options import OptimizerOptions, ParamGroups


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675), with decoupled weight decay. State: `exp_avg`.

    The sign is that of beta1 m + (1 - beta1) g; the momentum m then becomes beta2 m + (1 - beta2) g.
    """

    def __init__(self, groups: ParamGroups, config: OptimConfig) -> None:
        super().__init__(list(groups), {"lr": config.lr, "betas": (config.beta1, config.beta2), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                mean = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(mean.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - beta2)


class FlatLion(FlatOptimizer, Lion):
    """Lion over flat parameters."""


def make(groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> Lion:
    """Return Lion."""
    return (FlatLion if options.is_flat else Lion)(groups, config)
