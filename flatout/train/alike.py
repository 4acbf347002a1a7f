"""Do all ranks mean the same run? Ranks that differ would add up other things, or wait for each other for ever."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flatout.config.schema import Config
from flatout.errors import DataError, UsageError
from flatout.parallel.connect import choose_device
from flatout.parallel.group import join_group
from flatout.parallel.messages import Messages
from flatout.parallel.rank import Rank
from flatout.plan.devices import Device, weakest
from flatout.train.memory import gpu_of
from flatout.train.planning import Planned
from flatout.train.resume import config_changes

# where things lie, and how many work on them, may differ from node to node; content is compared by its fingerprint
LOCAL = frozenset({"run_dir", "gpus", "data.root", "data.sources", "data.tokenizer", "data.num_procs"})


def weakest_gpu(config: Config, rank: Rank) -> Device | None:
    """The GPU that all ranks plan for, each on one of its own: the least memory among them. None on the CPU.

    Ranks join for it. Raises ResourceError as `gpu_of` does, and UsageError where `model.precision: auto` would mean
    another precision on some.
    """
    gpu = gpu_of(config, rank)
    if gpu is None or rank.world == 1:
        return gpu
    join_group(rank, choose_device(config.wanted_device, rank))
    told = Messages(rank).exchange({"host": socket.gethostname(), **asdict(gpu)})
    if config.model.precision == "auto":
        refuse_mixed_precision(told)
    return weakest([Device(one["name"], one["memory_bytes"], one["has_bf16"]) for one in told])


def refuse_mixed_precision(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError when some of the ranks' GPUs have bf16 in hardware and some have not."""
    without = [index for index, one in enumerate(told) if not one["has_bf16"]]
    if without and len(without) < len(told):
        one = told[without[0]]
        raise UsageError(
            f"rank {without[0]} on {one['host']} has a {one['name']}, which has no bf16 in hardware, and other ranks' "
            "GPUs have it: set model.precision: fp16 or fp32, or leave that GPU out"
        )


def refuse_unlike(config: Config, planned: Planned, messages: Messages) -> None:
    """Raise, on every rank, when one has other settings (UsageError) or other data (DataError) than the first one.

    Collective. A node may have been started with another file, or have built its data from other rows.
    """
    memory = planned.memory
    cut = [planned.spread.strategy, memory.micro_batch_tokens, memory.recompute, memory.turned_weights]
    mine = {
        "host": socket.gethostname(),
        "config": config.model_dump(mode="json"),
        "data": dict(planned.fingerprints),
        "cut": [*cut, planned.spread.frees_weights],
    }
    first, *others = messages.exchange(mine)
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
