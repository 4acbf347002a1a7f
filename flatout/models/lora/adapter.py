"""Read adapters in PEFT's format, ours or PEFT's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, UsageError, reason_of
from flatout.io.json_file import read_json
from flatout.models.load.source import check_safetensors
from flatout.models.lora.layer import add_lora, lora_layers, lora_scaling

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# fields of adapter_config.json for those of LoraConfig
PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora", "dora": "use_dora"}
_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}

# PEFT options that change the numerics in ways flatout does not support, with the values that do not
_PLAIN_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(
        (
            "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save", "rank_pattern",
            "trainable_token_indices", "use_bdlora", "use_qalora", "alora_invocation_tokens",
        ),
        (None, False, {}, []),
    ),
}  # fmt: skip


def adapter_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the live adapter tensors (detached views, masters' dtype) by PEFT's tensor names."""
    return {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by PEFT's tensor names."""
    return {
        f"{PREFIX}{name}.{suffix}": getattr(layer, attribute)
        for name, layer in lora_layers(model).items()
        for attribute, suffix in _SUFFIXES.items()
        if getattr(layer, attribute) is not None
    }


def apply_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter, ours or PEFT's, to a plain model for generation or merging; all parameters are frozen.

    Raises like `load_adapter`.
    """
    saved, _ = _read_adapter(folder)
    add_lora(model, saved, seed=0)
    load_adapter(model, folder)
    model.requires_grad_(False)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy an adapter's weights, ours or PEFT's, into a model that already has LoRA layers, to continue training.

    Raises CheckpointError (missing or damaged files) or UsageError with the setting that differs: rank, alpha, rslora,
    dora, targets.
    """
    saved, tensors = _read_adapter(folder)
    layers = lora_layers(model)
    problems = _disagreements(model, saved)
    if problems:
        raise UsageError(f"{folder}: {'; '.join(problems)}; make the settings equal to the adapter's")
    for name, tensor in adapter_state(model).items():
        if tensors[name].shape != tensor.shape:
            raise UsageError(
                f"{folder}: {name} has shape {tuple(tensors[name].shape)}, this model needs {tuple(tensor.shape)}; "
                "the adapter belongs to another base model"
            )
        tensor.copy_(tensors[name])
    for name, tensor in tensors.items():
        path, _, leaf = name.removeprefix(PREFIX).partition(".base_layer.")
        if leaf and not equal_as_stored(tensor, getattr(layers[path].base, leaf)):
            raise UsageError(
                f"{folder}: {name} is not the base model's own {path}.{leaf}, and only the adapter is read; merge the "
                "adapter with PEFT and train on from the merged model"
            )


def equal_as_stored(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes; for meta tensors, whether their shapes are."""
    if left.shape != right.shape or left.is_meta or right.is_meta:
        return left.shape == right.shape
    narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(left.to(right.device, narrow), right.to(narrow))


def _disagreements(model: PreTrainedModel, saved: LoraConfig) -> list[str]:
    layers = lora_layers(model)
    if not layers:
        return ["this model has no LoRA layers"]
    layer, scaling = next(iter(layers.values())), lora_scaling(saved)
    problems = []
    if layer.rank != saved.rank:
        problems.append(f"lora.rank is {layer.rank}, the adapter's is {saved.rank}")
    elif not math.isclose(layer.scaling, scaling):
        problems.append(f"lora.alpha and lora.rslora scale by {layer.scaling:g}, the adapter by {scaling:g}")
    if (layer.magnitude is not None) != saved.dora:
        problems.append(f"lora.dora is {layer.magnitude is not None}, the adapter's is {saved.dora}")
    if odd := sorted(set(saved.targets) ^ set(layers)):
        problems.append(f"lora.targets and the adapter differ in {len(odd)} layers, such as {odd[0]}")
    return problems


def _read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter folder as a LoraConfig with full module names as targets, and its tensors by PEFT's names."""
    config_file, weights_file = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    for file in (config_file, weights_file):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; give a folder with an adapter in PEFT's format")
    check_safetensors(weights_file)
    tensors = load_file(weights_file)
    tail = "." + _SUFFIXES["lora_a"]
    names = [name.removeprefix(PREFIX).removesuffix(tail) for name in tensors if name.endswith(tail)]
    config = _read_adapter_config(config_file, names)
    suffixes = [suffix for attribute, suffix in _SUFFIXES.items() if config.dora or attribute != "magnitude"]
    # PEFT stores the frozen weight of an adapted head with the adapter
    suffixes_of_base = ("base_layer.weight", "base_layer.bias")
    allowed = {f"{PREFIX}{name}.{suffix}" for name in names for suffix in suffixes_of_base}
    odd = {f"{PREFIX}{name}.{suffix}" for name in names for suffix in suffixes} ^ (tensors.keys() - allowed)
    if odd:
        raise CheckpointError(f"{weights_file}: {len(odd)} tensors are missing or unknown, such as {min(odd)}")
    return config, tensors


def _read_adapter_config(file: Path, names: list[str]) -> LoraConfig:
    content = read_json(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no JSON object; copy the adapter again")
    try:
        kind = content.get("peft_type")
        odd = {
            key: content[key] for key, plain in _PLAIN_OPTIONS.items() if key in content and content[key] not in plain
        }
        # the `.weight` of a linear layer is equivalent to targeting its module; anything else is fused experts
        if other := [name for name in content.get("target_parameters") or () if not name.endswith(".weight")]:
            odd["target_parameters"] = other
        targets = content.get("target_modules") or content.get("target_parameters")
        if not targets or not isinstance(targets, str | list):
            raise CheckpointError(f"{file}: target_modules is {targets!r:.100}; copy the adapter again")
        if kind != "LORA" or odd:
            found = f"peft_type is {kind!r}" if kind != "LORA" else f"{odd} is not supported"
            raise UsageError(f"{file}: {found}; only plain LoRA adapters of linear layers can be read")
        content = {"lora_dropout": 0.0, "use_rslora": False, "use_dora": False, **content}
        return LoraConfig(targets=names, **{ours: content[theirs] for ours, theirs in PEFT_NAMES.items()})
    except ValidationError as error:
        first = error.errors()[0]
        field = PEFT_NAMES.get(str(first["loc"][0]), first["loc"][0])
        raise CheckpointError(f"{file}: {field}: {first['msg']}; copy the adapter again") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {reason_of(error)}; copy the adapter again") from error
