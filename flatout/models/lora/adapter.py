"""Read and write adapters in PEFT's format, and check that PEFT reads them as trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, UsageError, reason_of
from flatout.io.json_file import read_json
from flatout.models.blocks import replace_module
from flatout.models.load.source import check_safetensors
from flatout.models.lora.layer import LoraLinear, add_lora, lora_layers, lora_scaling

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PEFT_NAMES = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
# PEFT stores the frozen weight of an adapted head with the adapter
_BASE_SUFFIXES = (".base_layer.weight", ".base_layer.bias")
# relative tolerance between PEFT's logits and ours, for the median token: both add the same terms in another order
LOGIT_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}

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
        f"{_PREFIX}{name}.{suffix}": getattr(layer, attribute)
        for name, layer in lora_layers(model).items()
        for attribute, suffix in _SUFFIXES.items()
        if getattr(layer, attribute) is not None
    }


def adapter_config(
    model: PreTrainedModel, config: LoraConfig, *, base_name: str, state: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Return the adapter_config.json with which PEFT adapts exactly the layers that are adapted here.

    In many mixture-of-experts models, PEFT takes names such as gate_proj for the fused experts, and drops adapters of
    dense layers and shared experts. Those are listed as `target_parameters` instead, which PEFT does not convert; it
    then requires dropout 0 in the file. Only the shapes of `state` (None: the live adapter) are read.
    Raises UsageError with a layer's name if PEFT can read neither form.
    """
    # importing PEFT takes half a second, and reading an adapter does not need it
    from flatout.models.lora.peft_reading import misread_layers, peft_version

    state = adapter_state(model) if state is None else state
    layers = lora_layers(model)
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": _target_names(model, layers),
        "target_parameters": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    misread = misread_layers(model, content, state)
    if not misread:
        return content
    content |= {
        "lora_dropout": 0.0,
        "target_modules": _target_names(model, layers.keys() - misread),
        "target_parameters": sorted(f"{name}.weight" for name in layers.keys() & misread),
    }
    # target_parameters do not support DoRA
    if not config.dora:
        misread = misread_layers(model, content, state)
        if not misread:
            return content
    leaves = sorted({name.rpartition(".")[2] for name in layers.keys() & misread})
    remedy = "lora.dora: false, or " if config.dora else ""
    raise UsageError(
        f"lora.targets: PEFT {peft_version()} cannot read adapters of {min(misread)} ({len(misread)} layers) in model "
        f"type {model.config.model_type}; set {remedy}lora.targets to what leaves these {', '.join(leaves)} out"
    )


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    base_name: str,
    config: LoraConfig,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` so that peft.PeftModel.from_pretrained loads them.

    `state` is like `adapter_state`'s result, gathered if the model's own tensors are sharded.
    Raises UsageError if the model has no LoRA layers, and like `adapter_config`.
    """
    state = adapter_state(model) if state is None else state
    if not state:
        raise UsageError("this model has no LoRA layers to save")
    content = adapter_config(model, config, base_name=base_name, state=state)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_back(
    model: PreTrainedModel, folder: Path, *, config: LoraConfig, state: Mapping[str, torch.Tensor] | None = None
) -> str:
    """Check that PEFT reads the adapter in `folder` as the one that was trained; return a line for the console.

    PEFT loads the files. Its tensors must have the names and shapes of `state` (None: the live adapter), and its scale
    must be that of `config`. If the base weights are available (unsharded, 16 bits or more), values must also be equal,
    and PEFT's logits on 16 tokens must equal those of our layers within LOGIT_TOLERANCES. The base weights are used in
    place, so this only needs memory for the adapter and 16 tokens. Raises CheckpointError.
    """
    from flatout.models.lora import peft_reading as peft

    state = adapter_state(model) if state is None else state
    plain = peft.plain_copy(model)
    ours = None
    if peft.borrow_weights(plain, _base_tensors(model)):
        apply_adapter(plain, folder)
        logits = peft.logits_of_short_text(plain.eval())
        for name, layer in lora_layers(plain).items():
            replace_module(plain, name, layer.base)
        ours = logits if bool(logits.isfinite().all()) else None
    wrapped = peft.read_by_peft(plain, folder)
    read = peft.peft_state(wrapped)
    problems = [
        f"{name} is {'missing' if name not in read else 'unknown' if name not in state else 'different'}"
        for name in sorted(read.keys() | state.keys())
        if name not in read or name not in state or not _same(read[name], state[name])
    ]
    if peft.peft_scalings(wrapped) != {lora_scaling(config)}:
        problems.append(f"the scale is {peft.peft_scalings(wrapped)}, not {lora_scaling(config):g}")
    proved = "names, shapes, scale"
    if ours is not None and not problems:
        theirs, limit = peft.logits_of_short_text(wrapped), LOGIT_TOLERANCES[model.dtype]
        error = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
        if error > limit:
            problems.append(f"logits differ by {error:.1e} (limit {limit:.0e})")
        proved = f"logits within {error:.0e}"
    if problems:
        raise CheckpointError(
            f"{folder}: PEFT {peft.peft_version()} reads another adapter: {problems[0]} ({len(problems)} such); the "
            "trained weights are in the run's checkpoints; report this"
        )
    return f"PEFT {peft.peft_version()} reads the same adapter: {len(lora_layers(model))} layers, {proved}"


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy an adapter's weights, ours or PEFT's, into a model that already has LoRA layers, to continue training.

    Raises CheckpointError (missing or damaged files) or UsageError with the setting that differs: rank, alpha, rslora,
    dora, targets.
    """
    saved, tensors = _read_adapter(folder)
    layers = lora_layers(model)
    problems = _disagreements(layers, saved)
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
        path, _, leaf = name.removeprefix(_PREFIX).partition(".base_layer.")
        if leaf and not _same(tensor, getattr(layers[path].base, leaf)):
            raise UsageError(
                f"{folder}: {name} is not the base model's own {path}.{leaf}, and only the adapter is read; merge the "
                "adapter with PEFT and train on from the merged model"
            )


def _disagreements(layers: Mapping[str, LoraLinear], saved: LoraConfig) -> list[str]:
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


def apply_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter, ours or PEFT's, to a plain model for generation or merging; all parameters are frozen.

    Raises like `load_adapter`.
    """
    saved, _ = _read_adapter(folder)
    add_lora(model, saved, seed=0)
    load_adapter(model, folder)
    model.requires_grad_(False)


def _base_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers by the names that they have without adapters."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in lora_layers(model):
        for leaf in ("weight", "bias"):
            if (tensor := tensors.get(f"{name}.base.{leaf}")) is not None:
                tensors[f"{name}.{leaf}"] = tensor
    return tensors


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes; for meta tensors, whether their shapes are."""
    if left.shape != right.shape or left.is_meta or right.is_meta:
        return left.shape == right.shape
    narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(left.to(right.device, narrow), right.to(narrow))


def _target_names(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return short names if they select exactly these layers, otherwise full ones."""
    wanted = set(layers)
    leaves = {name.rpartition(".")[2] for name in wanted}
    inner = {f"{name}.base" for name in lora_layers(model)}
    selected = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves and name not in inner}
    return sorted(leaves) if selected == wanted else sorted(wanted)


def _read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter folder as a LoraConfig with full module names as targets, and its tensors by PEFT's names."""
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
    allowed = {f"{_PREFIX}{name}{suffix}" for name in names for suffix in _BASE_SUFFIXES}
    odd = {f"{_PREFIX}{name}.{suffix}" for name in names for suffix in suffixes} ^ (tensors.keys() - allowed)
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
        return LoraConfig(
            rank=content["r"],
            alpha=content["lora_alpha"],
            dropout=content.get("lora_dropout", 0.0),
            targets=names,
            rslora=content.get("use_rslora", False),
            dora=content.get("use_dora", False),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = _PEFT_NAMES.get(str(first["loc"][0]), first["loc"][0])
        raise CheckpointError(f"{file}: {field}: {first['msg']}; copy the adapter again") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {reason_of(error)}; copy the adapter again") from error
