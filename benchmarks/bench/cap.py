"""A small GPU pretended on a large one: what this process may allocate, and what it is told that the GPU has.

Arithmetic and bandwidth stay those of the GPU. The capability of flatout's kernels is FLATOUT_CAPABILITY's. Other
trainers keep the GPU's own: a compiler that was told another one would make kernels that do not run here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from flatout.planner.devices import CONTEXT_BYTES, find_device

# what the message of a process that ran out of memory holds, be it ours (a plan's refusal too), torch's or another's
_NO_MEMORY = re.compile(
    r"out of (GPU )?memory|OutOfMemoryError|need about [\d.,]+ GiB|enough GPU RAM|CUBLAS_STATUS_ALLOC_FAILED"
)


def total_bytes(name: str) -> int:
    """The memory that the driver of such a GPU reports: a name or a size, as of `flatout plan --device`.

    Raises UsageError for an unknown one.
    """
    return find_device(name).memory_bytes + CONTEXT_BYTES


def allowed_fraction(cap_bytes: int, real_bytes: int) -> float:
    """The share of the real GPU's memory that the caching allocator may take: the cap's, less a CUDA context."""
    return min(1.0, (cap_bytes - CONTEXT_BYTES) / real_bytes)


def capped_memory(cap_bytes: int, reserved_bytes: int, free_bytes: int, real_bytes: int) -> tuple[int, int]:
    """Free and total memory as the driver of the small GPU would report them to a process that reserved so much."""
    left = cap_bytes - CONTEXT_BYTES - reserved_bytes
    return max(0, min(free_bytes, left)), min(real_bytes, cap_bytes)


def capped_properties(real: Any, cap_bytes: int) -> SimpleNamespace:
    """The properties of a GPU with the cap's memory; all others are the GPU's."""
    names = [name for name in dir(real) if not name.startswith("_")]
    values = {name: getattr(real, name) for name in names}
    return SimpleNamespace(**{**values, "total_memory": min(real.total_memory, cap_bytes)})


def apply(cap_bytes: int | None) -> None:
    """Cap this process's GPU, before it allocates anything there; without a cap, nothing changes."""
    if cap_bytes is None:
        return
    import torch

    cuda, index = torch.cuda, int(os.environ.get("LOCAL_RANK", "0"))
    memory_of, properties_of = cuda.mem_get_info, cuda.get_device_properties
    cuda.set_per_process_memory_fraction(allowed_fraction(cap_bytes, memory_of(index)[1]), index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return capped_memory(cap_bytes, cuda.memory_reserved(device), *memory_of(device))

    # some kernels ask in every call
    @cache
    def properties_by(device: Any) -> SimpleNamespace:
        return capped_properties(properties_of(device), cap_bytes)

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return properties_by(cuda.current_device() if device is None else device)

    cuda.mem_get_info = cuda.memory.mem_get_info = mem_get_info
    cuda.get_device_properties = get_device_properties


def ran_out(log: str) -> bool:
    """Whether a process that failed says at the end of its log that memory was not enough."""
    return bool(_NO_MEMORY.search(log))


def used_share(run: Mapping[str, Any], cap_bytes: int) -> float:
    """The share of the small GPU that a run had in use at its peak: what was reserved, and a CUDA context."""
    return float((run["peak_reserved_gib"] * 2**30 + CONTEXT_BYTES) / cap_bytes)
