"""From the rank and the device to the strategy that joins this process to the others."""

from __future__ import annotations

import torch

from flatout.config import deepspeed
from flatout.config.schema import Config
from flatout.errors import ResourceError, UsageError
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


def connect(
    rank: Rank,
    device: torch.device,
    config: Config,
    *,
    strategy: str,
    num_replicas: int = 1,
    frees_weights: bool = True,
    compute: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> Strategy:
    """This process's strategy, joined to the other ranks over NCCL (GPU) or gloo (CPU).

    `strategy`, `num_replicas` and `frees_weights` are what was decided; `dtype` is the dtype of the arithmetic, and
    `compute` the same where trained weights are wider. Raises UsageError for a DeepSpeed JSON that contradicts it.
    """
    compress = torch.bfloat16 if config.comm.compress == "bf16" else None
    if strategy == "single":
        return Single(rank)
    if strategy == "ddp":
        return DDP(rank, device, overlap=config.method == "full", compress=compress)
    if strategy == "deepspeed":
        from flatout.parallel.deepspeed import DeepSpeed

        precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        try:
            settings = deepspeed.fill(config.deepspeed, config, num_ranks=rank.world, precision=precision)
        except ValueError as error:
            raise UsageError(f"deepspeed: {error}") from error
        return DeepSpeed(rank, device, settings)
    # importing it takes a second, which one process and replicas need not wait for
    from flatout.parallel.sharded import Cut, Sharded

    cut = Cut(
        num_replicas=num_replicas,
        frees_weights=frees_weights,
        sums_each=strategy != "zero1",
        num_prefetched=config.sharding.prefetch,
        offload=config.sharding.offload,
        compute=compute,
        reduce=compress or (torch.float32 if compute is not None else None),
    )
    return Sharded(rank, device, cut)
