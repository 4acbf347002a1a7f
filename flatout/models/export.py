"""Adapters in and out in PEFT's format, merging, and plain Hugging Face folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, UsageError
from flatout.models.blocks import replace_module
from flatout.models.lora import LoraLinear, SwapReport, add_lora, lora_layers, lora_scaling
from flatout.models.source import check_safetensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}

# PEFT options that change the maths in ways flatout does not have, with the values that leave it alone
_PLAIN_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(
        (
            "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save", "rank_pattern",
            "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "alora_invocation_tokens",
        ),
        (None, False, {}, []),
    ),
}  # fmt: skip


def adapter_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """PEFT's tensor names to the live adapter tensors (detached views, masters' dtype)."""
    return {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """PEFT's tensor names to the adapter's parameters."""
    return {
        f"{_PREFIX}{name}.{suffix}": getattr(layer, attribute)
        for name, layer in lora_layers(model).items()
        for attribute, suffix in _SUFFIXES.items()
        if getattr(layer, attribute) is not None
    }


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    base_name: str,
    config: LoraConfig,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` so that peft.PeftModel.from_pretrained loads them.

    `state` is what `adapter_state` gives, from elsewhere when the model's own tensors are not whole.
    Raises UsageError when the model has no LoRA layers.
    """
    state = adapter_state(model) if state is None else state
    if not state:
        raise UsageError("this model has no LoRA layers to save")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": _target_modules(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy an adapter's weights, ours or PEFT's, into a model that already has LoRA layers, to train on from there.

    Raises CheckpointError (missing or damaged files) or UsageError naming the setting that does not agree: rank,
    alpha, rslora, dora, targets.
    """
    saved, tensors = _read_adapter(folder)
    problems = _disagreements(lora_layers(model), saved)
    if problems:
        raise UsageError(f"{folder}: {'; '.join(problems)}; make the settings equal to the adapter's")
    for name, tensor in adapter_state(model).items():
        if tensors[name].shape != tensor.shape:
            raise UsageError(
                f"{folder}: {name} has shape {tuple(tensors[name].shape)}, this model needs {tuple(tensor.shape)}; "
                "the adapter belongs to another base model"
            )
        tensor.copy_(tensors[name])


def _disagreements(layers: Mapping[str, LoraLinear], saved: LoraConfig) -> list[str]:
    if not layers:
        return ["this model has no LoRA layers"]
    layer = next(iter(layers.values()))
    scaling = lora_scaling(saved)
    problems = []
    if layer.rank != saved.rank:
        problems.append(f"lora.rank is {layer.rank}, the adapter's is {saved.rank}")
    elif not math.isclose(layer.scaling, scaling):
        problems.append(f"lora.alpha and lora.rslora scale by {layer.scaling:g}, the adapter by {scaling:g}")
    if (layer.magnitude is not None) != saved.dora:
        problems.append(f"lora.dora is {layer.magnitude is not None}, the adapter's is {saved.dora}")
    odd = sorted(set(saved.targets) ^ set(layers))
    if odd:
        problems.append(f"lora.targets and the adapter differ in {len(odd)} layers, such as {odd[0]}")
    return problems


def apply_adapter(model: PreTrainedModel, folder: Path) -> SwapReport:
    """Put an adapter, ours or PEFT's, on a plain model to generate or merge; nothing stays trainable.

    Raises as `load_adapter`.
    """
    saved, _ = _read_adapter(folder)
    report = add_lora(model, saved, seed=0)
    load_adapter(model, folder)
    model.requires_grad_(False)
    return report


@torch.no_grad()
def merge(model: PreTrainedModel) -> int:
    """Add every adapter into its base weight, in fp32 (fp64 over fp64), cast to the base's dtype; returns how many.

    The LoRA layers are replaced by their own base layers, so names and classes are the plain model's again.
    """
    layers = lora_layers(model)
    for name, layer in layers.items():
        layer.base.weight.copy_(layer.merged_weight())
        replace_module(model, name, layer.base)
    return len(layers)


def save_model(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a plain Hugging Face folder: safetensors, config with the dtype stated, generation config, tokenizer.

    `dtype` casts floating weights on the way out (None: as they are). Tied weights are written once and stay tied.
    `tokenizer` None writes none. `state` is the model's whole state, already in `dtype`, when its own tensors are not
    whole. Raises UsageError for a model with LoRA layers (merge first).
    """
    if lora_layers(model):
        raise UsageError("this model still has LoRA layers; merge it, or save the adapter")
    if state is None and (dtype is None or dtype == model.dtype):
        model.save_pretrained(folder)
    else:
        dtype = dtype or model.dtype
        model.save_pretrained(folder, state_dict=dict(state) if state is not None else _cast_state(model, dtype))
        config_file = folder / "config.json"
        content = json.loads(config_file.read_text(encoding="utf-8"))
        content["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _cast_state(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """State in another dtype with tied entries still one tensor."""
    cast: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in cast:
            cast[id(tensor)] = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        state[name] = cast[id(tensor)]
    return state


def _target_modules(model: PreTrainedModel) -> list[str]:
    """Short names when they select exactly the swapped layers, else full ones."""
    layers = lora_layers(model)
    leaves = {name.rpartition(".")[2] for name in layers}
    inner = {f"{name}.base" for name in layers}
    selected = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves and name not in inner}
    return sorted(leaves) if selected == set(layers) else sorted(layers)


def _read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """An adapter folder as a LoraConfig with full module names as targets, and its tensors by PEFT's names."""
    config_file, weights_file = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    for file in (config_file, weights_file):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; give a folder with an adapter in PEFT's format")
    check_safetensors(weights_file)
    tensors = load_file(weights_file)
    tail = "." + _SUFFIXES["lora_a"]
    names = [name.removeprefix(_PREFIX).removesuffix(tail) for name in tensors if name.endswith(tail)]
    config = _read_adapter_config(config_file, names)
    suffixes = [suffix for attribute, suffix in _SUFFIXES.items() if config.dora or attribute != "magnitude"]
    odd = {f"{_PREFIX}{name}.{suffix}" for name in names for suffix in suffixes} ^ set(tensors)
    if odd:
        raise CheckpointError(f"{weights_file}: {len(odd)} tensors are missing or unknown, such as {min(odd)}")
    return config, tensors


def _read_adapter_config(file: Path, names: list[str]) -> LoraConfig:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind = content.get("peft_type")
        odd = {
            key: content[key] for key, plain in _PLAIN_OPTIONS.items() if key in content and content[key] not in plain
        }
        if kind != "LORA" or odd:
            found = f"peft_type is {kind!r}" if kind != "LORA" else f"{odd} is not supported"
            raise UsageError(f"{file}: {found}; only plain LoRA adapters can be read")
        return LoraConfig(
            rank=content["r"],
            alpha=content["lora_alpha"],
            dropout=content.get("lora_dropout", 0.0),
            targets=names,
            rslora=content.get("use_rslora", False),
            dora=content.get("use_dora", False),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r}); copy the adapter again") from error
