"""Stochastic gradient descent; `beta1` is its momentum."""

from __future__ import annotations

import torch

from flatout.config.optim import OptimConfig
from flatout.optim.flat import FlatOptimizer
from flatout.optim.how import How, ParamGroups


class FlatSGD(FlatOptimizer, torch.optim.SGD):
    """torch's SGD over flat parameters."""


def make(groups: ParamGroups, config: OptimConfig, how: How) -> torch.optim.Optimizer:
    """Return torch's SGD."""
    return (FlatSGD if how.is_flat else torch.optim.SGD)(list(groups), lr=config.lr, momentum=config.beta1)
