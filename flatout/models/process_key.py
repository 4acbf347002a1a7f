"""What a process computes with: an equal key means that what one has measured holds for another."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flatout.environment import numeric_environment
from flatout.io.kept_facts import code_identity

_DRIVER = Path("/proc/driver/nvidia/version")


def process_key(device: torch.device) -> dict[str, Any]:
    """Return flatout's own code, the packages, the device, torch's settings and the environment."""
    return {
        **code_identity(),
        "device": _device(device),
        "torch": [
            torch.__version__,
            str(torch.version.cuda),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cudnn.allow_tf32,
        ],
        "environment": numeric_environment(),
    }


def _device(device: torch.device) -> list[Any]:
    if device.type != "cuda":
        return [device.type, platform.machine(), torch.backends.cpu.get_cpu_capability()]
    properties, driver = torch.cuda.get_device_properties(device), ""
    with suppress(OSError):
        driver = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    capability = [properties.major, properties.minor, properties.multi_processor_count, properties.total_memory]
    return [properties.name, *capability, driver, torch.backends.cudnn.version()]
