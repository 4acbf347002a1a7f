"""Unsloth's `distributed_utils`: this process among the ranks of a launcher, and tensors over them.

Ranks are read from the environment, so they are right before and after `train()`, which joins and leaves the others.
Functions that communicate join them again; every rank must call them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from flatout import UsageError
from flatout.api.ranks import join_ranks, leave_ranks, this_rank

is_distributed_initialized = dist.is_initialized
cleanup_distributed_training = leave_ranks


def is_distributed_available() -> bool:
    """Whether a launcher started several processes, or this machine has several GPUs."""
    return this_rank().world > 1 or torch.cuda.device_count() > 1


def get_world_size() -> int:
    """Return the number of processes that a launcher started; 1 without one."""
    return this_rank().world


def get_rank() -> int:
    """Return this process's rank."""
    return this_rank().index


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    return this_rank().local_index


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return this_rank().is_first


def setup_distributed_training(
    backend: str = "nccl", timeout_minutes: int = 30, init_method: str | None = None
) -> dict[str, Any]:
    """Join the other ranks, if any, over NCCL (GPU) or gloo (CPU); return this rank's numbers. No script needs it.

    Raises UsageError for another way to join, and PeerLostError if a rank has not joined after `timeout_minutes`.
    """
    rank = this_rank()
    if rank.world > 1 and not is_distributed_initialized():
        if backend not in ("nccl", "gloo") or init_method not in (None, "env://"):
            raise UsageError(f"ranks join by nccl or gloo at MASTER_ADDR; got {backend!r}, {init_method!r}: remove it")
        join_ranks(60.0 * timeout_minutes)
        if rank.is_first:
            lines = f"Initialized distributed training with {rank.world} GPUs", f"Using backend: {dist.get_backend()}"
            print("\n".join(f"Unsloth: {line}" for line in lines))
    backends = {"backend": dist.get_backend()} if rank.world > 1 else {}
    own = {"world_size": rank.world, "rank": rank.index, "local_rank": rank.local_index}
    return {"distributed": rank.world > 1, **own, **backends}


def wait_for_everyone() -> None:
    """Wait until every rank has called this."""
    if setup_distributed_training()["distributed"]:
        dist.barrier()


def get_device_map_for_distributed(
    model_name: str, world_size: int | None = None, rank: int | None = None
) -> str | dict[str, str]:
    """Return "auto" for one process, else a map of all of a model, whatever its name, to the rank's device."""
    own = this_rank()
    if (own.world if world_size is None else world_size) == 1:
        return "auto"
    index = own.local_index if rank is None else rank % (own.local_world or own.world)
    return {"": f"cuda:{index}" if torch.cuda.is_available() else "cpu"}


def get_optimal_device_map(model_config: Any, available_gpus: int | None = None) -> str:
    """Return "balanced" for several GPUs, else "auto", whatever the model."""
    return "balanced" if (torch.cuda.device_count() if available_gpus is None else available_gpus) > 1 else "auto"


def validate_distributed_environment() -> bool:
    """Whether RANK, WORLD_SIZE and LOCAL_RANK are set together and fit; warns with the reason if not."""
    try:
        return this_rank().world >= 1
    except UsageError as error:
        warnings.warn(str(error), stacklevel=2)
        return False


def print_distributed_info() -> None:
    """Print, on rank 0, what the functions of this module return."""
    rank, num_gpus, line = this_rank(), torch.cuda.device_count(), "=" * 50
    facts = (
        f"Distributed Available: {is_distributed_available()}",
        f"Distributed Initialized: {is_distributed_initialized()}",
        f"World Size: {rank.world}", f"Current Rank: {rank.index}", f"Local Rank: {rank.local_index}",
        f"CUDA Device Count: {num_gpus}", f"Current CUDA Device: {torch.cuda.current_device() if num_gpus else 'none'}",
    )  # fmt: skip
    if rank.is_first:
        print("\n".join([line, "Unsloth Distributed Training Information", line, *facts, line]))


def reduce_tensor_across_gpus(tensor: torch.Tensor, average: bool = True) -> torch.Tensor:
    """Return the mean (or sum) of the ranks' tensors, the same on every rank; `tensor` is not changed."""
    world, reduced = setup_distributed_training()["world_size"], tensor.clone()
    if world > 1:
        dist.all_reduce(reduced)
    return reduced / world if average else reduced


def gather_tensor_across_gpus(tensor: torch.Tensor) -> torch.Tensor:
    """Return the ranks' tensors [n, ...], of one shape, joined to [world * n, ...] on every rank."""
    gathered = [torch.empty_like(tensor) for _ in range(setup_distributed_training()["world_size"])]
    if len(gathered) > 1:
        dist.all_gather(gathered, tensor.contiguous())
    return torch.cat(gathered) if len(gathered) > 1 else tensor


def sync_gradients_across_gpus(model: torch.nn.Module) -> None:
    """Average the gradients of a module of your own; `train()` needs no such call, it sums exactly."""
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = reduce_tensor_across_gpus(gradient)
