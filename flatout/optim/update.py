"""Update weights asynchronously, skipping a non-finite step on the device, or within the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatout.optim.adamw_8bit import AdamW8bit

LR_RATIO = "lr_ratio"
"""The key of a parameter group that has a multiple of the learning rate."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_RATIO, 1.0)


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer can skip an update by `found_inf`, as torch's fused ones and AdamW8bit can."""
    return isinstance(optimizer, AdamW8bit) or getattr(optimizer, "_step_supports_amp_scaling", False)


def set_found_inf(optimizer: Any, is_bad: Tensor) -> Tensor:
    """Skip this update and all later ones once `is_bad` (0-d bool) is true, without changing weights or state.

    This works as in GradScaler, but the flag stays set until `clear_found_inf`. Returns the flag, 0-d fp32.
    """
    current = getattr(optimizer, "found_inf", None)
    flag: Tensor = is_bad.float() if current is None else torch.maximum(current, is_bad.float())
    optimizer.found_inf = flag
    return flag


def clear_found_inf(optimizer: Any) -> None:
    """Stop skipping updates."""
    optimizer.found_inf = None
    if isinstance(optimizer, AdamW8bit):
        optimizer.recount()


def divide_in_update(optimizer: Any, divisor: Tensor) -> bool:
    """Let an optimizer divide gradients by `divisor` (0-d fp32) while its next update reads them.

    Only torch's fused optimizers can. Returns False for others, which it leaves as they are.
    """
    if isinstance(optimizer, AdamW8bit) or not supports_found_inf(optimizer):
        return False
    optimizer.grad_scale = divisor
    return True


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


class BackwardUpdate:
    """Hooks that update a weight in the backward pass and free its gradient: `full.update: backward`.

    This is LOMO (Lv et al. 2023, arXiv:2306.09782) with any optimizer. The result equals an ordinary update without
    clipping bit for bit: a weight's hook runs once its gradient is complete, including tied uses, and the backward pass
    does not read the weight after that. Use it as

        update.start(lr); loss.backward(); norm = update.finish()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._updated: set[Tensor] = set()
        self._squares: list[Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def start(self, lr: float) -> None:
        """Set the learning rate of a step's updates; call it before the step's backward pass."""
        set_lr(self._optimizer, lr)
        self._squares.clear()
        self._updated.clear()

    def finish(self) -> Tensor:
        """Return the global L2 norm of the gradients, 0-d fp32 (fp64 for fp64 gradients); call it after backward.

        Weights that the backward pass did not reach are updated with a gradient of zero, as in every strategy.
        """
        for parameter in self._parameters:
            if parameter not in self._updated:
                parameter.grad = torch.zeros_like(parameter)
                self._update(parameter)
        return torch.stack(self._squares).sum().sqrt()

    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = torch.promote_types(parameter.grad.dtype, torch.float32)
        self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=wide).square())
        # no other parameter has a gradient now, so step() updates only this one
        self._optimizer.step()
        parameter.grad = None
        self._updated.add(parameter)
