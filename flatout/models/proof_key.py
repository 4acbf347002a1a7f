"""Everything that the checks of a loaded model depend on: an equal key means that they would find the same."""

from __future__ import annotations

import json
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flatout.environment import numeric_environment
from flatout.io.kept_facts import code_identity, hashes_of
from flatout.models.load.model import LoadedModel

_DRIVER = Path("/proc/driver/nvidia/version")


def proof_key(loaded: LoadedModel, device: torch.device) -> dict[str, Any]:
    """Return the key of a model without adapters: its code and settings, the packages, the device, torch's settings.

    Weights are not in it. `device` is the run's, even if weights are still on the host. The model's own source files
    count by content, as they are the ones that people edit.
    """
    model = loaded.model
    modules = {type(module).__module__ for module in model.modules()} - {"torch"}
    sources = {name: Path(file) for name in modules if (file := getattr(sys.modules.get(name), "__file__", None))}
    return {
        **process_key(device),
        "sources": hashes_of({name: path for name, path in sources.items() if not name.startswith("torch.")}),
        # as text: a configuration can hold infinity and dtypes, which JSON does not have
        "model": json.dumps(model.config.to_dict(), default=str, sort_keys=True),
        "attention": loaded.attention,
        "layout": "rows" if loaded.is_padded else "packed",
        "dtype": [str(loaded.dtype), str(model.dtype), loaded.autocast],
    }


def process_key(device: torch.device) -> dict[str, Any]:
    """Return the part of `proof_key` that does not depend on the model."""
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
    """Return the name, capability, size and driver of a GPU, or the instruction set of a CPU."""
    if device.type != "cuda":
        return [device.type, platform.machine(), torch.backends.cpu.get_cpu_capability()]
    properties, driver = torch.cuda.get_device_properties(device), ""
    with suppress(OSError):
        driver = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    capability = [properties.major, properties.minor, properties.multi_processor_count, properties.total_memory]
    return [properties.name, *capability, driver, torch.backends.cudnn.version()]
