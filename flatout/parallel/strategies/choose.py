"""Choose this rank's device, and create its strategy."""

from __future__ import annotations

from importlib import import_module

import torch

from flatout.config.parallel import STRATEGIES, StrategyName
from flatout.config.schema import Config
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Strategy, StrategyOptions


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """Return this rank's device for `auto`, `cpu` or `cuda`. Raises ResourceError if it needs a GPU and has none."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if rank.local_index >= num_gpus:
        raise ResourceError(
            f"rank {rank.index} needs GPU {rank.local_index}, {num_gpus} visible; start fewer processes"
        )
    device = torch.device("cuda", rank.local_index)
    torch.cuda.set_device(device)
    return device


def connect(
    rank: Rank,
    device: torch.device,
    config: Config,
    *,
    strategy: StrategyName,
    num_replicas: int = 1,
    reshard_after_forward: bool = True,
    compute: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> Strategy:
    """Create this process's strategy and join the other ranks over NCCL (GPU) or gloo (CPU).

    `strategy`, `num_replicas` and `reshard_after_forward` are the plan's decisions. `dtype` is the compute dtype, and
    `compute` the same if the trained weights are wider. Raises UsageError for a DeepSpeed JSON that contradicts them.
    """
    # imported here because DTensor and DeepSpeed take seconds to import, and not every strategy needs them
    module = import_module(f"flatout.parallel.strategies.{STRATEGIES[strategy].module}")
    options = StrategyOptions(STRATEGIES[strategy], num_replicas, reshard_after_forward, compute, dtype)
    connected: Strategy = module.make(rank, device, config, options)
    return connected
