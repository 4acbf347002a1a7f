"""Updates that the host does not wait for: a bad step holds itself back on the device and is told one step later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.train.optim_lean import LeanAdamW


def can_hold_back(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update can be left out by a flag on the device: torch's fused optimizers and ours read `found_inf`."""
    return isinstance(optimizer, LeanAdamW) or getattr(optimizer, "_step_supports_amp_scaling", False)


def hold_back(optimizer: Any, is_bad: Tensor) -> None:
    """From the first update for which `is_bad` (0-d bool) is true, this and all later ones change no weight or state.

    That is what GradScaler does for a gradient that overflowed, here without ever going on.
    """
    held = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = is_bad.float() if held is None else torch.maximum(held, is_bad.float())


def let_go(optimizer: Any) -> None:
    """Updates count again."""
    optimizer.found_inf = None
    if isinstance(optimizer, LeanAdamW):
        optimizer.recount()


def read_later(values: Tensor) -> tuple[Callable[[], list[float]], torch.cuda.Event | None]:
    """Start copying a small 1-d tensor to the host.

    The function returned waits for that, not for what comes after; the event (None on a CPU) says when it was done.
    """
    if not values.is_cuda:
        return values.tolist, None
    copied = values.to("cpu", non_blocking=True)
    ended = torch.cuda.Event(enable_timing=True)
    ended.record(torch.cuda.current_stream(values.device))

    def read() -> list[float]:
        ended.synchronize()
        return copied.tolist()

    return read, ended
