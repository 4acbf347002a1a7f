"""Unsloth's `distributed_utils`: this process among the ranks of a launcher, and tensors over them.

Ranks are read from the environment that torchrun sets, so they are right before and after `trainer.train()`, which
joins the ranks and leaves them. Functions that communicate join them again and must be called on every rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from flatout.environment import environment
from flatout.errors import UsageError
from flatout.launch.launch_mode import slurm_rank
from flatout.parallel.process_group import choose_device, join_group, leave_group
from flatout.parallel.rank import Rank


def this_rank() -> Rank:
    """Return this process's rank, as torchrun or srun set it. Raises UsageError for a part of the variables."""
    env = environment()
    return Rank.from_env({**env, **(slurm_rank(env) or {})})


def is_distributed_available() -> bool:
    """Whether a launcher started several processes, or this machine has several GPUs."""
    return this_rank().world > 1 or torch.cuda.device_count() > 1


def is_distributed_initialized() -> bool:
    """Whether this process is in a process group now."""
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
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
    """Join the other ranks, if any; return distributed, world_size, rank, local_rank and backend.

    The backend is NCCL on GPUs and gloo on CPUs. Raises UsageError for another one, and PeerLostError if a rank has not
    joined after `timeout_minutes`. Training joins and leaves by itself: no script needs this call.
    """
    rank = this_rank()
    if rank.world == 1:
        return {"distributed": False, "world_size": 1, "rank": 0, "local_rank": 0}
    device = choose_device("auto", rank)
    if init_method not in (None, "env://"):
        raise UsageError(f"init_method is {init_method!r}; ranks meet at MASTER_ADDR and MASTER_PORT: remove it")
    if backend not in ("nccl", "gloo") or (backend == "gloo" and device.type == "cuda"):
        raise UsageError(f"backend is {backend!r}; ranks talk over nccl on GPUs and gloo on CPUs: remove it")
    if not is_distributed_initialized():
        join_group(rank, device, join_s=60.0 * timeout_minutes)
        if rank.is_first:
            print(f"Unsloth: Initialized distributed training with {rank.world} GPUs")  # noqa: T201  (documented)
            print(f"Unsloth: Using backend: {dist.get_backend()}")  # noqa: T201  (documented)
    own = {"world_size": rank.world, "rank": rank.index, "local_rank": rank.local_index}
    return {"distributed": True, **own, "backend": dist.get_backend()}


def cleanup_distributed_training() -> None:
    """Leave the process group."""
    leave_group()


def wait_for_everyone() -> None:
    """Wait until every rank has called this."""
    if setup_distributed_training()["distributed"]:
        dist.barrier()


def get_device_map_for_distributed(
    model_name: str, world_size: int | None = None, rank: int | None = None
) -> str | dict[str, str]:
    """Return "auto" for one process, else a map of the whole model to this rank's device, whatever the model."""
    own = this_rank()
    if (own.world if world_size is None else world_size) == 1:
        return "auto"
    index = own.local_index if rank is None else rank % (own.local_world or own.world)
    return {"": f"cuda:{index}" if torch.cuda.is_available() else "cpu"}


def get_optimal_device_map(model_config: Any, available_gpus: int | None = None) -> str:
    """Return "balanced" for several GPUs, else "auto"; training takes both as one rank per GPU, whatever the model."""
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
    rank, line = this_rank(), "=" * 50
    if rank.is_first:
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else "none"
        facts = {
            "Distributed Available": is_distributed_available(), "Distributed Initialized": is_distributed_initialized(),
            "World Size": rank.world, "Current Rank": rank.index, "Local Rank": rank.local_index,
            "CUDA Device Count": torch.cuda.device_count(), "Current CUDA Device": gpu,
        }  # fmt: skip
        told = [line, "Unsloth Distributed Training Information", line, *(f"{k}: {v}" for k, v in facts.items()), line]
        print("\n".join(told))  # noqa: T201  (documented)


def reduce_tensor_across_gpus(tensor: torch.Tensor, average: bool = True) -> torch.Tensor:
    """Return the mean (or sum) of the ranks' tensors [...], the same on every rank; `tensor` itself stays."""
    world = setup_distributed_training()["world_size"]
    reduced = tensor.clone()
    if world > 1:
        dist.all_reduce(reduced)
    return reduced / world if average else reduced


def gather_tensor_across_gpus(tensor: torch.Tensor) -> torch.Tensor:
    """Return the ranks' tensors [n, ...], of one shape, joined to [world * n, ...] on every rank."""
    if not setup_distributed_training()["distributed"]:
        return tensor
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.cat(gathered)


def sync_gradients_across_gpus(model: torch.nn.Module) -> None:
    """Average the gradients of a module of your own over ranks; `trainer.train()` sums its own exactly."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce_tensor_across_gpus(gradient)
