"""The one group of all ranks of a run."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from flatout.parallel.rank import Rank

# the watch finds lost and stuck ranks; the group must outlast whatever one rank does alone, such as a slow save
TIMEOUT = timedelta(hours=12)


def join_group(rank: Rank, device: torch.device) -> None:
    """Join the other ranks, if any, over NCCL (GPU) or gloo (CPU), unless this process has already."""
    if rank.world == 1 or dist.is_initialized():
        return
    on_gpu = device.type == "cuda"
    # bound to its GPU, so that no collective has to guess it
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=rank.index,
        world_size=rank.world,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )


def share_weights(model: nn.Module) -> None:
    """Every rank takes the first one's parameters and buffers; those without memory are left as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            # gloo does not know float8
            data = tensor.detach()
            dist.broadcast(data.view(torch.uint8) if data.itemsize == 1 else data, src=0)


def leave_group() -> None:
    """Part from the other ranks in good order, where that did not happen yet."""
    if dist.is_initialized():
        dist.destroy_process_group()
