"""Asynchronous updates: a non-finite step is skipped on the device and reported one step later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.optim.adamw_8bit import LowBitAdamW


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer can skip an update by `found_inf`, as torch's fused ones and LowBitAdamW can."""
    return isinstance(optimizer, LowBitAdamW) or getattr(optimizer, "_step_supports_amp_scaling", False)


def set_found_inf(optimizer: Any, is_bad: Tensor) -> None:
    """Skip this update and all later ones once `is_bad` (0-d bool) is true, without changing weights or state.

    This works as in GradScaler, but the flag stays set until `clear_found_inf`.
    """
    held = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = is_bad.float() if held is None else torch.maximum(held, is_bad.float())


def clear_found_inf(optimizer: Any) -> None:
    """Stop skipping updates."""
    optimizer.found_inf = None
    if isinstance(optimizer, LowBitAdamW):
        optimizer.recount()


def copy_to_host_async(values: Tensor) -> tuple[Callable[[], list[float]], torch.cuda.Event | float]:
    """Start copying a small 1-d tensor to the host; return a function that reads it, and when the copy ended.

    The function waits for the copy, but not for later work. The end is a CUDA event; on a CPU, where the work is
    already done, it is the time of `time.perf_counter` in seconds.
    """
    if not values.is_cuda:
        return values.tolist, time.perf_counter()
    copied = values.to("cpu", non_blocking=True)
    ended = torch.cuda.Event(enable_timing=True)
    ended.record(torch.cuda.current_stream(values.device))

    def read() -> list[float]:
        ended.synchronize()
        return copied.tolist()

    return read, ended
