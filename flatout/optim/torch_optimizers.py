"""torch's own optimizers: AdamW, fused on CUDA, and stochastic gradient descent."""

from __future__ import annotations

import torch

from flatout.config.optim import OptimConfig
from flatout.optim.adamw_8bit import AdamW8bit, adam_options
from flatout.optim.flat import FlatOptimizer
from flatout.optim.options import OptimizerOptions, ParamGroups


class FlatAdamW(FlatOptimizer, torch.optim.AdamW):
    """torch's AdamW over flat parameters."""


class FlatSGD(FlatOptimizer, torch.optim.SGD):
    """torch's SGD over flat parameters."""


def adamw(groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Return torch's AdamW (arXiv:1711.05101), or for bf16 weights one that rounds stochastically."""
    if options.is_bf16:
        return AdamW8bit(
            groups, eight_bit=False, seed=options.seed, offset_of=options.offset_of, **adam_options(config)
        )
    kind = FlatAdamW if options.is_flat else torch.optim.AdamW
    return kind(list(groups), fused=options.on_gpu, **adam_options(config))


def sgd(groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Return torch's SGD; `beta1` is its momentum."""
    return (FlatSGD if options.is_flat else torch.optim.SGD)(list(groups), lr=config.lr, momentum=config.beta1)
