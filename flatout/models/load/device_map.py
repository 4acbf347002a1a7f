"""Inference with one model on several devices: transformers' device map, by name or from a file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from flatout.errors import UsageError
from flatout.io.json_file import read_json
from flatout.models.blocks import decoder_layers

NAMED = ("auto", "balanced", "sequential")
MAX_FILE_BYTES = 1 << 20
_CUDA = re.compile(r"cuda:(\d+)")

DeviceMap = Literal["auto", "balanced", "sequential"] | dict[str, str | int]


def read_device_map(wanted: str, model_config: Any) -> DeviceMap:
    """Read and check a device map: one of NAMED, or a JSON file of module names to "cpu", a GPU index or "cuda:1".

    `model_config` is transformers' configuration of the model. Raises UsageError with the wrong entry: an unknown
    module, a part of a decoder layer, a missing GPU, or weights that no entry covers.
    """
    if wanted in NAMED:
        return wanted  # type: ignore[return-value]  # one of the literals
    path = Path(wanted)
    if not path.is_file():
        raise UsageError(f"--device-map: {path} is no file, and none of {', '.join(NAMED)}")
    entries = read_json(path, UsageError, max_bytes=MAX_FILE_BYTES)
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f'--device-map: {path} must be an object such as {{"model.layers.0": 0}}')
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    checked: dict[str, str | int] = {}
    modules, layers = dict(model.named_modules()), {id(layer) for layer in decoder_layers(model)}
    for name, device in entries.items():
        where = f"{path}: {name!r}"
        if name not in modules:
            raise UsageError(f"{where} is no module of this model; names look like {_example(modules)}")
        parts = name.split(".")
        if any(id(modules[".".join(parts[:end])]) in layers for end in range(1, len(parts))):
            raise UsageError(f"{where} is a part of a decoder layer; map whole layers, such as {_example(modules)}")
        checked[name] = _device(device, where)
    prefixes = tuple(f"{entry}." if entry else "" for entry in checked)
    uncovered = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    if uncovered:
        raise UsageError(f"{path}: no entry covers {uncovered[0]} ({len(uncovered)} weights in all); add its module")
    return checked


def describe_devices(model: PreTrainedModel) -> str:
    """Describe how many modules are on each device, such as `cuda:0: 19 modules, cuda:1: 18 modules`."""
    places = getattr(model, "hf_device_map", {"": model.device})
    counts = Counter(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places.values())
    return ", ".join(f"{device}: {count} module{'s' if count > 1 else ''}" for device, count in sorted(counts.items()))


def waits_elsewhere(model: nn.Module) -> bool:
    """Whether some weights are offloaded, and copied to the device that computes with them in each pass."""
    return any(parameter.is_meta for parameter in model.parameters())


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that the model expects its input tokens on."""
    device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return torch.device(device)
    gpus = [place for place in model.hf_device_map.values() if place not in ("cpu", "disk")]
    return torch.device("cuda", gpus[0]) if isinstance(gpus[0], int) else torch.device(gpus[0])


def _device(device: Any, where: str) -> str | int:
    index = device
    if isinstance(device, str) and (match := _CUDA.fullmatch(device)):
        index = int(match[1])
    if device == "cpu":
        return "cpu"
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise UsageError(f"{where} is on {device!r}; expected cpu, a GPU's index, or cuda:INDEX")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_gpus:
        raise UsageError(f"{where} is on GPU {index}, {num_gpus} visible")
    return index


def _example(modules: dict[str, nn.Module]) -> str:
    return next((name for name in modules if name.endswith(".layers.0")), next(iter(modules)) or "model")
