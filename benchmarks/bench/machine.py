"""What a measurement was made on: the GPU and the versions of packages; and the memory it took."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "torchao",
    "nvidia-cudnn-frontend",
    "deepspeed",
    "trl",
    "unsloth",
    "unsloth_zoo",
    "liger-kernel",
    "bitsandbytes",
)
_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu", "memory.total")


def gpu_memory() -> dict[str, float]:
    """Peak GiB that this process allocated and reserved on its GPU, and how often it freed its cache to go on.

    Empty without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def gpu_header() -> dict[str, str]:
    """The first GPU as nvidia-smi tells it (clocks in MHz, watts, degrees C); the processor where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {"name": platform.processor() or platform.machine()}
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return dict(zip(_GPU_FIELDS, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a measurement."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
