"""The GPU that all ranks plan for, and a check that they have the same config, data and plan.

A mismatch would corrupt sums or hang.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from flatout.checkpoint.compatibility import config_changes
from flatout.config.schema import Config
from flatout.errors import DataError, UsageError
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.plan.devices import CONTEXT_BYTES, Device, weakest
from flatout.train.planning import PlannedRun

# paths and process counts may differ between nodes; content is compared by fingerprint
LOCAL = frozenset({"run_dir", "gpus", "data.root", "data.sources", "data.tokenizer", "data.num_procs"})


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
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(torch.cuda.get_device_name(device), num_bytes, has_bf16)


def weakest_gpu(config: Config, rank: Rank, meet: Callable[[], ControlGroup]) -> Device | None:
    """Return the GPU that all ranks plan for: the one with the least memory. None on the CPU.

    Several ranks connect with `meet` to exchange theirs. Raises ResourceError as `gpu_of` does, and UsageError if
    `model.precision: auto` would resolve differently on some.
    """
    gpu = gpu_of(config, rank)
    if gpu is None or rank.world == 1:
        return gpu
    told = meet().all_gather({"host": socket.gethostname(), **asdict(gpu)})
    if config.model.precision == "auto":
        refuse_mixed_precision(told)
    return weakest([Device(one["name"], one["memory_bytes"], one["has_bf16"]) for one in told])


def refuse_mixed_precision(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError if only some of the ranks' GPUs have bf16 in hardware."""
    without = [index for index, one in enumerate(told) if not one["has_bf16"]]
    if without and len(without) < len(told):
        one = told[without[0]]
        raise UsageError(
            f"rank {without[0]} on {one['host']} has a {one['name']}, which has no bf16 in hardware, and other ranks' "
            "GPUs have it: set model.precision: fp16 or fp32, or leave that GPU out"
        )


def require_same_run(config: Config, planned: PlannedRun, group: ControlGroup) -> None:
    """Raise on every rank if one has other settings (UsageError) or other data (DataError) than rank 0.

    Collective. For example, a node was started with another config file, or built its data from other rows.
    """
    memory = planned.memory
    cut = [planned.parallel_layout.strategy, memory.micro_batch_tokens, memory.recompute, memory.transposed_weights]
    mine = {
        "host": socket.gethostname(),
        "config": config.model_dump(mode="json"),
        "data": dict(planned.fingerprints),
        "cut": [*cut, planned.parallel_layout.reshard_after_forward],
    }
    first, *others = group.all_gather(mine)
    for index, other in enumerate(others, start=1):
        who = f"rank {index} on {other['host']}"
        changes = [change for change in config_changes(first["config"], other["config"]) if change.key not in LOCAL]
        if changes:
            said = "; ".join(f"{change.key} is {change.now!r}, on rank 0 {change.saved!r}" for change in changes)
            raise UsageError(f"{who} was started with other settings: {said}; start every node with the same ones")
        if other["data"] != first["data"]:
            raise DataError(
                f"{who} has other data than rank 0 on {first['host']}: {other['data']}, not {first['data']}; build it "
                "once, in a folder that all nodes see, or copy the built one"
            )
        if other["cut"] != first["cut"]:
            raise UsageError(
                f"{who} cuts the same steps otherwise: {other['cut']}, rank 0 on {first['host']} {first['cut']}; "
                "install the same flatout on every node"
            )
