"""How much of the time a GPU computes, and its power, as its driver counts them; the counters are only read."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from flatout.errors import ResourceError, install

# a reading takes the host up to a millisecond
MIN_PERIOD_S = 1.0


class GpuUse:
    """This process's GPU, read at most once in MIN_PERIOD_S. Nothing is known of a CPU, nor where NVML does not answer.

    `read` returns the joules so far and the share of time, from 0 to 1, with a kernel running.
    """

    def __init__(self, device: torch.device, read: Callable[[], tuple[float, float]] | None = None) -> None:
        self._read = read or (_joules_and_use if device.type == "cuda" else None)
        self._last: tuple[float, float] | None = None
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """Return the mean power since the reading before, and the last reading's share; empty if not known."""
        now_s = time.monotonic()
        if self._read is None or (self._last is not None and now_s - self._last[0] < MIN_PERIOD_S):
            return self._figures
        try:
            joules, use = self._read()
        except ResourceError:
            # it will not answer later either
            self._read, self._figures = None, {}
            return self._figures
        if self._last is not None:
            self._figures = {"gpu_watts": (joules - self._last[1]) / (now_s - self._last[0]), "gpu_use": use}
        self._last = now_s, joules
        return self._figures


def _joules_and_use() -> tuple[float, float]:
    return read_joules(), _ask("use", lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)


def read_joules() -> float:
    """Return the joules that the current CUDA device has used since its driver was loaded.

    It is NVML's nvmlDeviceGetTotalEnergyConsumption, a counter in mJ that is only read. Raises ResourceError in a
    process without CUDA, without nvidia-ml-py, and where the driver has no such counter: before Volta, and for parts of
    a GPU (MIG).
    """
    return _ask("energy", lambda nvml, handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3)


def _ask(what: str, question: Callable[[Any, Any], float]) -> float:
    if not torch.cuda.is_initialized():
        raise ResourceError(f"this process uses no CUDA GPU, whose driver counts the {what}")
    try:
        import pynvml
    except ImportError as error:
        raise ResourceError(f"nvidia-ml-py, which reads the {what}, is not installed; {install('gpu')}") from error
    try:
        return question(pynvml, _handle(torch.cuda.current_device()))
    except pynvml.NVMLError as error:
        raise ResourceError(f"NVML does not give the {what} of this GPU: {error}") from error


@cache
def _handle(index: int) -> Any:
    """Return NVML's handle of a CUDA device, by its UUID, as CUDA may number the GPUs otherwise or see fewer."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
