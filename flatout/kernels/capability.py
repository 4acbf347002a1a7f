"""The compute capability that kernels are chosen by: the GPU's own, or a named one in its place."""

from __future__ import annotations

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
