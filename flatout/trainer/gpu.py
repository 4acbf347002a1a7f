"""The GPU that a run is planned for: this process's own, or the one with the least memory of all ranks'."""

from __future__ import annotations

import socket
from dataclasses import asdict

import torch

from flatout.config.schema import Config
from flatout.errors import Fix, UsageError
from flatout.models.load.model import gpu_features
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.planner.devices import CONTEXT_BYTES, Device, weakest


def gpu_of(config: Config, rank: Rank) -> Device | None:
    """Return the GPU that this process will train on and the bytes it may use; None on the CPU.

    A single process gets the free memory. Several ranks get the total (less the context), as all must plan the same
    micro-batches; so do deterministic runs, whose plan must not depend on other processes. Raises ResourceError as
    `choose_device` does.
    """
    device = choose_device(config.wanted_device, rank)
    if device.type != "cuda":
        return None
    num_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if rank.world > 1 or config.deterministic:
        num_bytes = total_bytes - CONTEXT_BYTES
    return Device(torch.cuda.get_device_name(device), num_bytes, *gpu_features(device))


def weakest_gpu(config: Config, group: ControlGroup) -> Device | None:
    """Return the GPU that all ranks plan for: the one with the least memory. None on the CPU.

    Collective. Raises ResourceError as `gpu_of` does, and UsageError if `model.precision: auto` would resolve
    differently on some.
    """
    gpu = gpu_of(config, group.rank)
    if gpu is None or group.rank.world == 1:
        return gpu
    gathered = group.all_gather((socket.gethostname(), asdict(gpu)))
    gpus = [Device(**values) for _, values in gathered]
    without = [index for index, other in enumerate(gpus) if not other.has_bf16]
    if config.model.precision == "auto" and 0 < len(without) < len(gpus):
        index = without[0]
        raise UsageError(
            f"rank {index} on {gathered[index][0]}: its {gpus[index].name} has no bf16, the others have",
            [*(Fix({"model.precision": one}) for one in ("fp16", "fp32")), Fix({}, "exclude this GPU")],
        )
    return weakest(gpus)
