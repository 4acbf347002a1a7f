"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused on CUDA."""

from __future__ import annotations

import torch

from flatout.config.optim import OptimConfig
from flatout.optim.adamw_8bit import AdamW8bit, adam_options
from flatout.optim.flat import FlatOptimizer
from flatout.optim.how import How, ParamGroups


class FlatAdamW(FlatOptimizer, torch.optim.AdamW):
    """torch's AdamW over flat parameters."""


def make(groups: ParamGroups, config: OptimConfig, how: How) -> torch.optim.Optimizer:
    """Return torch's AdamW, or for bf16 weights one that rounds stochastically."""
    if how.is_bf16:
        return AdamW8bit(groups, eight_bit=False, seed=how.seed, offset_of=how.offset_of, **adam_options(config))
    return (FlatAdamW if how.is_flat else torch.optim.AdamW)(list(groups), fused=how.on_gpu, **adam_options(config))
