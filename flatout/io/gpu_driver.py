"""The GPU driver, called without torch: how many GPUs there are, why there is none, one opened while torch loads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from threading import Thread

from flatout.environment import environment, set_environment
from flatout.errors import Fix, ResourceError

DRIVER = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LAZY_LOADING = "CUDA_MODULE_LOADING"
_NO_DEVICE = 100


def certain_reason(env: Mapping[str, str], torch_version: str, cuda: str | None, driver: str = DRIVER) -> str | None:
    """Return why no process here can have a GPU, and what to do, without starting the driver; None if one may have.

    `cuda` is the version that torch is built for, None for a CPU build.
    """
    if cuda is None:
        return f"torch {torch_version} is a build for CPUs; install one for CUDA, as pytorch.org says"
    if (shown := env.get(VISIBLE)) is not None and (not shown.strip() or shown.strip().startswith("-1")):
        return f"{VISIBLE}={shown} hides all GPUs; unset it"
    try:
        ctypes.CDLL(driver)
    except OSError:
        return "there is no NVIDIA driver; install it, or start the container with --gpus all"
    return None


def reason(env: Mapping[str, str], torch_version: str, cuda: str | None, driver: str = DRIVER) -> str:
    """Return why this process sees no GPU, as `certain_reason`, or as the driver says."""
    if why := certain_reason(env, torch_version, cuda, driver):
        return why
    error = int(ctypes.CDLL(driver).cuInit(0))
    if error == _NO_DEVICE:
        shown = env.get(VISIBLE)
        return "the NVIDIA driver finds no GPU" + (f" (with {VISIBLE}={shown}); correct it" if shown else "")
    if error:
        return f"the NVIDIA driver does not start (error {error}); see nvidia-smi"
    return f"the NVIDIA driver is too old for this torch (CUDA {cuda}); update it, or install torch for an older CUDA"


def no_gpu_error(who: str, why: str | None = None) -> ResourceError:
    """Return the error of `who`, such as a setting, that needs a GPU where this process has none."""
    why = why or reason(environment(), *_torch_build())
    setting = "--device" if who.startswith("--") else "device"
    on_cpu = Fix({setting: "cpu", **({"gpus": None} if who == "gpus" else {})}, "on the CPU")
    return ResourceError(f"{who.lstrip('-')} needs a GPU, but {why}", [on_cpu])


def require_gpu_driver(who: str) -> None:
    """Raise ResourceError, before ranks are started, if none of them can have a GPU."""
    if why := certain_reason(environment(), *_torch_build()):
        raise no_gpu_error(who, why)


def _torch_build() -> tuple[str, str | None]:
    """Return torch's version and the version of CUDA that it is built for; without importing it, any if not known."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.__version__, torch.version.cuda
    version = metadata.version("torch")
    return version, None if "+cpu" in version or sys.platform == "darwin" else "of its version"


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
