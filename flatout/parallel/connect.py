"""From the rank and the device to the strategy that joins this process to the others."""

from __future__ import annotations

import torch

from flatout.errors import ResourceError
from flatout.parallel.ddp import DDP
from flatout.parallel.rank import Rank
from flatout.parallel.single import Single
from flatout.parallel.strategy import Strategy


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """`auto`, `cpu` or `cuda` to this rank's device. Raises ResourceError when a GPU is asked for and not there."""
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


def connect(rank: Rank, device: torch.device) -> Strategy:
    """One process alone, or replicas that sum their gradients over NCCL (GPU) or gloo (CPU)."""
    if rank.world == 1:
        return Single(rank)
    return DDP(rank, backend="nccl" if device.type == "cuda" else "gloo")
