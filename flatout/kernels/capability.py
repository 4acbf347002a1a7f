"""What kernels are chosen by: Triton, and the GPU's compute capability or a named one in its place."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

# architectures by their first capability
AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)

# the named capability, if there is one
_named: list[tuple[int, int]] = []


def choose_kernels_of(named: tuple[int, int] | None) -> None:
    """Choose every kernel of this process as on a GPU of this capability; None: as on the GPU that is there.

    An older capability tests what runs on such GPUs. Kernels of a newer one do not run here.
    """
    _named[:] = [] if named is None else [named]


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (major, minor) to choose kernels by; (0, 0) if the device is no CUDA GPU."""
    if device.type != "cuda":
        return 0, 0
    return _named[0] if _named else torch.cuda.get_device_capability(device)


def has_triton(device: torch.device) -> bool:
    """Whether Triton compiles kernels for a device: a CUDA GPU, on systems that have the package."""
    return device.type == "cuda" and _is_installed("triton")


# asked in every call of an operator
@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
