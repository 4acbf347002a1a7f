"""Inference with one model on several devices: transformers' device map, by name or from a file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.io.json_file import read_json
from flatout.models.blocks import decoder_layers
from flatout.models.load.quantized import empty_model

NAMED = ("auto", "balanced", "sequential")
MAX_FILE_BYTES = 1 << 20


def read_device_map(wanted: str, model_config: Any) -> str | dict[str, str | int]:
    """Read and check a device map: one of NAMED, or a JSON file of module names to "cpu", a GPU index or "cuda:1".

    `model_config` is transformers' configuration of the model. Raises UsageError with the wrong entry: an unknown
    module, a part of a decoder layer, a missing GPU, or weights that no entry covers.
    """
    if wanted in NAMED:
        return wanted
    path = Path(wanted)
    if not path.is_file():
        raise UsageError(f"--device-map: {path} is no file, and none of {', '.join(NAMED)}")
    entries = read_json(path, UsageError, max_bytes=MAX_FILE_BYTES)
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f'--device-map: {path} must be an object such as {{"model.layers.0": 0}}')
    model = empty_model(model_config, {})
    modules, layers = dict(model.named_modules()), {id(layer) for layer in decoder_layers(model)}
    example = next((name for name in modules if name.endswith(".layers.0")), next(iter(modules)) or "model")
    for name in entries:
        if name not in modules:
            raise UsageError(f"{path}: {name!r} is no module of this model; names look like {example}")
        parts = name.split(".")
        if any(id(modules[".".join(parts[:end])]) in layers for end in range(1, len(parts))):
            raise UsageError(f"{path}: {name!r} is a part of a decoder layer; map whole layers, such as {example}")
    checked = {name: _device(device, f"{path}: {name!r}") for name, device in entries.items()}
    prefixes = tuple(f"{entry}." if entry else "" for entry in checked)
    uncovered = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    if uncovered:
        raise UsageError(f"{path}: no entry covers {uncovered[0]} ({len(uncovered)} weights in all); add its module")
    return checked


def _device(device: Any, where: str) -> str | int:
    if device == "cpu":
        return "cpu"
    index = device
    if isinstance(device, str) and (match := re.fullmatch(r"cuda:(\d+)", device)):
        index = int(match[1])
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise UsageError(f"{where} is on {device!r}; expected cpu, a GPU's index, or cuda:INDEX")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_gpus:
        raise UsageError(f"{where} is on GPU {index}, {num_gpus} visible")
    return index


def describe_devices(model: PreTrainedModel) -> str:
    """Describe how many modules are on each device, such as `cuda:0: 19 modules, cuda:1: 18 modules`."""
    places = getattr(model, "hf_device_map", {"": model.device})
    counts = Counter(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places.values())
    return ", ".join(f"{device}: {count} module{'s' if count > 1 else ''}" for device, count in sorted(counts.items()))
