"""The energy that a GPU uses, from the counter of its driver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flatout.errors import ResourceError

# the counter moves about this often on data-center GPUs; benchmarks/joules.py prints the period it finds
COUNTER_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules that one GPU, memory and board included, used in `wall_s` seconds for its share of `num_tokens` tokens.

    `uncertainty` is relative: the counter may lag by its period at both ends of the window.
    """

    joules: float
    wall_s: float
    num_steps: int
    num_tokens: float

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.joules / self.wall_s

    @property
    def uncertainty(self) -> float:
        """The largest relative error that the counter's period causes."""
        return COUNTER_PERIOD_S / self.wall_s

    @property
    def line(self) -> str:
        """One line for the console."""
        return (
            f"energy: {self.joules / self.num_steps:,.1f} J a step, {self.joules / self.num_tokens * 1e3:,.2f} mJ a "
            f"token, {self.watts:,.0f} W on average; {self.joules:,.1f} J in {self.wall_s:.2f} s, within "
            f"{self.uncertainty:.0%}; one GPU, idle power included"
        )


def read_joules() -> float:
    """Return the joules that the current CUDA device has used since its driver was loaded.

    It is NVML's nvmlDeviceGetTotalEnergyConsumption, a counter in mJ that is only read. Raises ResourceError in a
    process without CUDA, without nvidia-ml-py, and where the driver has no such counter: before Volta, and for parts of
    a GPU (MIG).
    """
    if not torch.cuda.is_initialized():
        raise ResourceError("this process uses no CUDA GPU, whose driver counts the energy")
    try:
        import pynvml
    except ImportError as error:
        raise ResourceError("nvidia-ml-py is not installed; install flatout[gpu] to read the energy") from error
    try:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(_handle(torch.cuda.current_device()))) / 1e3
    except pynvml.NVMLError as error:
        raise ResourceError(f"NVML does not give the energy of this GPU: {error}") from error


@cache
def _handle(index: int) -> Any:
    """Return NVML's handle of a CUDA device, by its UUID, as CUDA may number the GPUs otherwise or see fewer."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
