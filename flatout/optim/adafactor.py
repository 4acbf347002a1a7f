"""Adafactor with the learning rate of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import optimization

from flatout.config.optim import OPTIMIZERS, OptimConfig
from flatout.optim.options import OptimizerOptions, ParamGroups, ShapedOptimizer


class Adafactor(optimization.Adafactor, ShapedOptimizer):  # type: ignore[misc]
    """transformers' Adafactor (arXiv:1804.04235), with a state of tensors that can be saved.

    The second moment of a weight of two or more dimensions is the product of one value per row and one per column.
    Updates are clipped to a root mean square of 1 over the whole weight, and have no first moment.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(self.new_state(parameter))
        super().step(closure)
        for state in self.state.values():
            # of the weight, for steps relative to it, which are off
            state.pop("RMS", None)

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before the first update."""
        shapes = OPTIMIZERS["adafactor"].state_shapes(parameter.shape)
        state = {name: parameter.new_zeros(shape) for name, shape in shapes.items()}
        return {**state, "step": torch.zeros((), dtype=torch.int64)}


def make(groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> Adafactor:
    """Return Adafactor as trainers use it: neither steps nor learning rates are relative to the weights."""
    kind: Any = Adafactor
    optimizer: Adafactor = kind(list(groups), lr=config.lr, scale_parameter=False, relative_step=False)
    return optimizer
