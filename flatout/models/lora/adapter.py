"""Write and load adapters in PEFT's format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, Fix, UsageError
from flatout.models.blocks import PARTS
from flatout.models.experts.lora import ExpertLora, expert_parameters, plain_name
from flatout.models.load.auto_class import is_scoring
from flatout.models.lora.adapter_file import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FIELDS,
    OF_BASE,
    PREFIX,
    ROWS,
    SUFFIXES,
    SavedAdapter,
    read_adapter,
)
from flatout.models.lora.layer import (
    LoraLinear,
    adapted_modules,
    add_lora,
    lora_layers,
    lora_scaling,
    target_name,
)
from flatout.models.lora.plain import EXPERT_NAME, misread_layers
from flatout.models.lora.saved import SavedModule, TrainedRows, grow_vocabulary, saved_modules, ties_ends


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the live adapter tensors (detached views, masters' dtype) by PEFT's tensor names, in its shapes."""
    return in_peft_shapes({name: parameter.detach() for name, parameter in adapter_parameters(model).items()})


def in_peft_shapes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of adapter tensors in PEFT's shapes: B of experts (out, r, E) as (out, r E)."""
    suffix = SUFFIXES["lora_b"]
    return {name: tensor.flatten(1) if name.endswith(suffix) else tensor for name, tensor in state.items()}


def _saved_parameters(model: PreTrainedModel) -> dict[str, tuple[nn.Parameter, torch.dtype]]:
    """Return what is trained beside LoRA by PEFT's tensor names, with the base's dtype."""
    parameters: dict[str, tuple[nn.Parameter, torch.dtype]] = {}
    for name, saved in saved_modules(model).items():
        if isinstance(saved, SavedModule):
            trained = saved.trained.named_parameters()
            parameters |= {f"{PREFIX}{name}.{leaf}": (parameter, saved.dtypes[leaf]) for leaf, parameter in trained}
        elif not saved.is_tied:
            parameters[f"{PREFIX}{name}{ROWS}"] = (saved.rows, saved.base.weight.dtype)
    return parameters


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by PEFT's tensor names."""
    return {
        f"{PREFIX}{_peft_name(name, layer)}.{suffix}": getattr(layer, attribute)
        for name, layer in lora_layers(model).items()
        for attribute, suffix in SUFFIXES.items()
        if getattr(layer, attribute) is not None
    } | {name: parameter for name, (parameter, _) in _saved_parameters(model).items()}


def adapter_config(
    model: PreTrainedModel, config: LoraConfig, *, base_name: str, state: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return the adapter_config.json with which PEFT adapts exactly the layers that are adapted here.

    In many mixture-of-experts models, PEFT takes names such as gate_proj for the fused experts, and drops adapters of
    dense layers and shared experts. Those are listed as `target_parameters` instead, which PEFT does not convert; it
    then requires dropout 0 in the file. Only the shapes of `state` (None: the live adapter) are read.
    Raises UsageError with a layer's name if PEFT can read neither form.
    """
    # importing PEFT takes half a second, and reading an adapter does not need it
    import peft

    state = adapter_state(model) if state is None else state
    layers = {name: layer for name, layer in lora_layers(model).items() if isinstance(layer, LoraLinear)}
    experts = _expert_targets(model)
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scoring(model.config) else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "target_modules": _target_names(model, layers),
        "target_parameters": experts or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        **_saved_config(model, config),
    }
    saved = _saved_parameters(model)
    misread = misread_layers(model, content, state, saved)
    if not misread.layers:
        return content
    candidates = [misread.layers, {name for name in layers if EXPERT_NAME.search(name)}]
    # target_parameters do not support DoRA
    for chosen in () if config.dora else sorted(candidates, key=len):
        spelled = content | {
            "lora_dropout": 0.0,
            "target_modules": _target_names(model, layers.keys() - chosen),
            "target_parameters": sorted([*experts, *(f"{name}.weight" for name in layers.keys() & chosen)]),
        }
        if not misread_layers(model, spelled, state, saved).layers:
            return spelled
    leaves = sorted({name.rpartition(".")[2] for name in misread.layers})
    if misread.reason:
        # one kind of layers can make PEFT refuse all
        leaves = next(([leaf] for leaf in leaves if _reads_without(leaf, model, content, state, saved)), leaves)
    raise UsageError(
        f"lora.targets: PEFT {peft.__version__} cannot read adapters of {min(misread.layers)} ({len(misread.layers)} "
        f"layers) in model type {model.config.model_type}{misread.reason}; exclude {', '.join(leaves)} there",
        [Fix({"lora.dora": False})] if config.dora else [],
    )


def _reads_without(leaf: str, model: PreTrainedModel, content: Mapping[str, Any], *rest: Any) -> bool:
    state, saved = rest
    layers = {name: layer for name, layer in lora_layers(model).items() if not name.endswith(f".{leaf}")}
    modules = [name for name, layer in layers.items() if isinstance(layer, LoraLinear)]
    tensors = {name: tensor for name, tensor in state.items() if f".{leaf}." not in name}
    return not misread_layers(model, {**content, "target_modules": modules}, tensors, saved).layers


def _peft_name(name: str, layer: nn.Module) -> str:
    depth = name.removeprefix(plain_name(name)).count(".base") if isinstance(layer, ExpertLora) else 0
    return plain_name(name) + depth * ".base_layer" if depth else name


def _expert_targets(model: PreTrainedModel) -> list[str]:
    """Return the names of adapted expert matrices for PEFT's target_parameters: endings if they select only these."""
    adapted = {target_name(name, layer) for name, layer in lora_layers(model).items() if isinstance(layer, ExpertLora)}
    endings = {".".join(name.split(".")[-3:]) for name in adapted}
    selected = {name for name in expert_parameters(model) if name.endswith(tuple(f".{ending}" for ending in endings))}
    return sorted(endings if selected == adapted else adapted)


def _saved_config(model: PreTrainedModel, config: LoraConfig) -> dict[str, Any]:
    """Return PEFT's fields for ranks and alphas of single layers, and for what is trained beside LoRA."""
    saved = saved_modules(model)
    masters = [next(module.trained.parameters()) for module in saved.values() if isinstance(module, SavedModule)]
    return {
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "modules_to_save": [name for name, module in saved.items() if isinstance(module, SavedModule)] or None,
        "ensure_weight_tying": len(set(map(id, masters))) < len(masters),
        "trainable_token_indices": _rows_of(model) or None,
    }


def as_written(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's tensors as its file holds them: what is trained beside LoRA in the precision of the base.

    Those are copies, as tied ones share memory, which safetensors refuses.
    """
    saved = _saved_parameters(model)
    return {
        name: tensor.to(saved[name][1], copy=True) if name in saved else tensor.contiguous()
        for name, tensor in state.items()
    }


def _rows_of(model: PreTrainedModel) -> dict[str, list[int]]:
    rows = {name: module for name, module in saved_modules(model).items() if isinstance(module, TrainedRows)}
    return {name: module.listed_ids for name, module in rows.items() if not module.is_tied}


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    base_name: str,
    config: LoraConfig,
    live: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` so that peft.PeftModel.from_pretrained loads them.

    `live` is like `adapter_parameters`' result, gathered if the model's own tensors are sharded.
    Raises UsageError if the model has no LoRA layers, and like `adapter_config`.
    """
    state = adapter_state(model) if live is None else in_peft_shapes(live)
    if not state:
        raise UsageError("this model has no LoRA layers to save")
    content = adapter_config(model, config, base_name=base_name, state=state)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(as_written(model, state), folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def apply_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter to a plain model, all parameters frozen, for generation or merging; see `load_adapter`."""
    saved = read_adapter(folder)
    _grow_for(model, saved)
    add_lora(model, saved.config, seed=0, rows=saved.rows, parts=PARTS)
    _copy_into(model, folder, saved)
    model.requires_grad_(False)


def _grow_for(model: PreTrainedModel, saved: SavedAdapter) -> None:
    """Give a plain model rows for the tokens that an adapter's user had added; the adapter holds their values."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    keys = [f"{PREFIX}{name}.weight" for name, module in model.named_modules() if module in ends]
    sizes = [len(saved.tensors[key]) for key in keys if key in saved.tensors]
    grow_vocabulary(model, max([0, *sizes, *(token_id + 1 for ids in saved.rows.values() for token_id in ids)]))


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy an adapter's weights, ours or PEFT's, into a model that already has LoRA layers, to continue training.

    Raises CheckpointError (missing or damaged files) or UsageError with the setting that differs: rank, alpha, rslora,
    dora, targets, modules_to_save, new tokens.
    """
    _copy_into(model, folder, read_adapter(folder))


def _copy_into(model: PreTrainedModel, folder: Path, saved: SavedAdapter) -> None:
    layers, tensors = lora_layers(model), saved.tensors
    if problems := _disagreements(model, saved.config, saved.rows):
        raise UsageError(f"{folder}: {'; '.join(problems)}; change the settings to match the adapter")
    for name, tensor in adapter_state(model).items():
        if name not in tensors:
            raise CheckpointError(f"{folder / ADAPTER_WEIGHTS}: {name} is missing; copy the adapter again")
        if tensors[name].shape != tensor.shape:
            raise UsageError(
                f"{folder}: {name} has shape {tuple(tensors[name].shape)}, but this model needs {tuple(tensor.shape)}; "
                "the adapter belongs to a different base model"
            )
        tensor.copy_(tensors[name])
    for name, tensor in tensors.items():
        path, _, leaf = name.removeprefix(PREFIX).partition(".base_layer.")
        if name.endswith(OF_BASE) and not same_values(tensor, getattr(layers[path].base, leaf)):
            raise UsageError(
                f"{folder}: {name} differs from the base model's {path}.{leaf}, but only the adapter would be loaded; "
                "merge the adapter with PEFT and train from the merged model"
            )


def _target_names(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return short names if they select exactly these layers, otherwise full ones.

    PEFT selects by the last part of a name, and nothing inside of `modules_to_save`.
    """
    adapted = set(layers)
    leaves = {name.rpartition(".")[2] for name in adapted}
    # modules inside those that are trained in full get no adapter in PEFT either
    inner = tuple(f"{name}.{part}" for name in adapted_modules(model) for part in ("base", "trained"))
    names = [name for name, _ in model.named_modules() if not name.startswith(inner)]
    saved = saved_modules(model)
    selected = {name for name in names if name.rpartition(".")[2] in leaves and name not in saved}
    return sorted(leaves) if selected == adapted else sorted(adapted)


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes; for meta tensors, whether their shapes are."""
    if left.shape != right.shape or left.is_meta or right.is_meta:
        return left.shape == right.shape
    narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(left.to(right.device, narrow), right.to(narrow))


def _disagreements(model: PreTrainedModel, saved: LoraConfig, rows: Mapping[str, list[int]]) -> list[str]:
    layers, saved_beside = lora_layers(model), saved_modules(model)
    if not layers:
        return ["this model has no LoRA layers"]
    problems: dict[str, None] = {}
    for name, layer in layers.items():
        theirs = saved.of_layer(target_name(name, layer))
        if layer.rank != theirs.rank:
            problems[f"lora.rank is {layer.rank}, but the adapter's is {theirs.rank}"] = None
        elif not math.isclose(layer.scaling, scaling := lora_scaling(theirs)):
            problems[f"lora.alpha and lora.rslora scale by {layer.scaling:g}, but the adapter by {scaling:g}"] = None
        if (layer.magnitude is not None) != saved.dora:
            problems[f"lora.dora is {layer.magnitude is not None}, but the adapter's is {saved.dora}"] = None
    if odd := sorted(set(saved.targets) ^ {target_name(name, layer) for name, layer in layers.items()}):
        problems[f"lora.targets and the adapter differ in {len(odd)} layers, such as {odd[0]}"] = None
    full = {name for name, module in saved_beside.items() if isinstance(module, SavedModule)}
    if odd := sorted(set(saved.modules_to_save) ^ full):
        problems[f"lora.modules_to_save and the adapter differ: only one of them has {', '.join(odd)}"] = None
    masters = [module.trained.weight for module in saved_beside.values() if isinstance(module, SavedModule)]
    if masters and (shared := len(set(map(id, masters))) < len(masters)) != saved.keep_tied and ties_ends(model):
        problems[f"lora.keep_tied is {shared}, but the adapter's is {saved.keep_tied}"] = None
    if (trained := _rows_of(model)) != rows:
        problems[f"data.new_tokens trains the rows {trained or 'of no token'}, but the adapter {rows or 'none'}"] = None
    return list(problems)
