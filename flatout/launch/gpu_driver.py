"""The GPU driver, called without torch, so that it works while torch is imported, or instead of importing torch."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Thread

from flatout.environment import environment, set_environment
from flatout.io.no_gpu import DRIVER

LAZY_LOADING = "CUDA_MODULE_LOADING"


def count_gpus() -> int:
    """Return how many GPUs the driver shows this process (CUDA_VISIBLE_DEVICES). Raises OSError without the driver."""
    cuda, count = ctypes.CDLL(DRIVER), ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def open_gpu(index: int, driver: str = DRIVER) -> Thread:
    """Make the context of the GPU with this index on a thread: the one that torch will use, its primary context.

    Other threads run meanwhile. Without the driver or the GPU nothing happens, as torch reports that later. Kernels are
    loaded when they are first called, as torch asks for, too.
    """
    if LAZY_LOADING not in environment():
        set_environment({LAZY_LOADING: "LAZY"})

    def open_it() -> None:
        with suppress(OSError, AttributeError):
            # calls through ctypes.CDLL release the interpreter's lock
            cuda = ctypes.CDLL(driver)
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
                cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    thread = Thread(target=open_it, name="flatout-gpu", daemon=True)
    thread.start()
    return thread
