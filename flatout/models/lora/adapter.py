"""Read and write adapters in PEFT's format, and check that PEFT reads them as trained."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, UsageError, reason_of
from flatout.io.json_file import read_json
from flatout.models.experts.lora import ExpertLora, expert_parameters, plain_name
from flatout.models.load.quantized import empty_model
from flatout.models.load.source import check_safetensors
from flatout.models.lora.layer import (
    LoraLinear,
    adapted_modules,
    add_lora,
    lora_layers,
    lora_scaling,
    remove_adapter,
    target_name,
)
from flatout.models.lora.saved import SavedModule, TrainedRows, grow_vocabulary, saved_modules, ties_ends

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# PEFT's names for the fields of LoraConfig
_FIELDS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora", "dora": "use_dora"}
_ROWS = ".token_adapter.trainable_tokens_delta"
_OF_BASE = (".base_layer.weight", ".base_layer.bias")
_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}

# PEFT options that change the numerics in ways flatout does not support, with the values that do not
_PLAIN_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(
        (
            "fan_in_fan_out", "layer_replication", "lora_bias", "use_bdlora", "use_qalora", "alora_invocation_tokens",
        ),
        (None, False, {}, []),
    ),
}  # fmt: skip
# relative tolerance between PEFT's logits and ours, for the median token: both add the same terms in another order
LOGIT_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
_ADAPTER = "default"
# what PEFT raises for names that it cannot match, convert or load
_READING_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the live adapter tensors (detached views, masters' dtype) by PEFT's tensor names."""
    return {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}


def _saved_parameters(model: PreTrainedModel) -> dict[str, tuple[nn.Parameter, torch.dtype]]:
    """Return what is trained beside LoRA by PEFT's tensor names, with the base's dtype."""
    found: dict[str, tuple[nn.Parameter, torch.dtype]] = {}
    for name, held in saved_modules(model).items():
        if isinstance(held, SavedModule):
            trained = held.trained.named_parameters()
            found |= {f"{_PREFIX}{name}.{leaf}": (own, held.dtypes[leaf]) for leaf, own in trained}
        elif not held.is_tied:
            found[f"{_PREFIX}{name}{_ROWS}"] = (held.rows, held.base.weight.dtype)
    return found


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by PEFT's tensor names."""
    return {
        f"{_PREFIX}{_peft_name(name, layer)}.{suffix}": getattr(layer, attribute)
        for name, layer in lora_layers(model).items()
        for attribute, suffix in _SUFFIXES.items()
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
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "target_modules": _target_names(model, layers),
        "target_parameters": experts or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        **_saved_config(model, config),
    }
    misread = _misread_layers(model, content, state)
    if not misread:
        return content
    content |= {
        "lora_dropout": 0.0,
        "target_modules": _target_names(model, layers.keys() - misread),
        "target_parameters": sorted([*experts, *(f"{name}.weight" for name in layers.keys() & misread)]),
    }
    # target_parameters do not support DoRA
    if not config.dora:
        misread = _misread_layers(model, content, state)
        if not misread:
            return content
    leaves = sorted({name.rpartition(".")[2] for name in misread})
    remedy = "lora.dora: false, or " if config.dora else ""
    raise UsageError(
        f"lora.targets: PEFT {peft.__version__} cannot read adapters of {min(misread)} ({len(misread)} layers) in "
        f"model type {model.config.model_type}; set {remedy}lora.targets so that it excludes {', '.join(leaves)} there"
    )


def _peft_name(name: str, layer: nn.Module) -> str:
    """Return the module name under which PEFT saves an adapter."""
    depth = name.removeprefix(plain_name(name)).count(".base") if isinstance(layer, ExpertLora) else 0
    return plain_name(name) + depth * ".base_layer" if depth else name


def _expert_targets(model: PreTrainedModel) -> list[str]:
    """Return the names of adapted expert matrices for PEFT's target_parameters: endings if they select only these."""
    wanted = {target_name(name, layer) for name, layer in lora_layers(model).items() if isinstance(layer, ExpertLora)}
    endings = {".".join(name.split(".")[-3:]) for name in wanted}
    selected = {name for name in expert_parameters(model) if name.endswith(tuple(f".{ending}" for ending in endings))}
    return sorted(endings if selected == wanted else wanted)


def _saved_config(model: PreTrainedModel, config: LoraConfig) -> dict[str, Any]:
    """Return PEFT's fields for ranks and alphas of single layers, and for what is trained beside LoRA."""
    saved = saved_modules(model)
    masters = [held.trained.weight for held in saved.values() if isinstance(held, SavedModule)]
    return {
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "modules_to_save": [name for name, held in saved.items() if isinstance(held, SavedModule)] or None,
        "ensure_weight_tying": len(set(map(id, masters))) < len(masters),
        "trainable_token_indices": _rows_of(model) or None,
    }


def _as_written(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's tensors as its file holds them: what is trained beside LoRA in the precision of the base."""
    saved = _saved_parameters(model)
    # a copy, as tied ones share memory
    return {
        name: tensor.to(saved[name][1], copy=True) if name in saved else tensor.contiguous()
        for name, tensor in state.items()
    }


def _rows_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """Return the ids of trained rows by module name; PEFT ties a tied head itself."""
    rows = {name: held for name, held in saved_modules(model).items() if isinstance(held, TrainedRows)}
    return {name: held.token_ids.tolist() for name, held in rows.items() if not held.is_tied}


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    base_name: str,
    config: LoraConfig,
    state: Mapping[str, Tensor] | None = None,
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
    save_file(_as_written(model, state), folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_back(
    model: PreTrainedModel, folder: Path, *, config: LoraConfig, state: Mapping[str, Tensor] | None = None
) -> str:
    """Check that PEFT reads the adapter in `folder` as the one that was trained; return a line for the console.

    PEFT loads the files. Its tensors must have the names and shapes of `state` (None: the live adapter), and its scale
    must be that of `config`. If the base weights are available (unsharded, 16 bits or more), values must also be equal,
    and PEFT's logits on 16 tokens must equal those of our layers within LOGIT_TOLERANCES. The base weights are used in
    place, so this only needs memory for the adapter and 16 tokens. Raises CheckpointError.
    """
    import peft

    state = _as_written(model, adapter_state(model) if state is None else state)
    plain = _plain_copy(model)
    ours = None
    has_weights = _borrow_weights(plain, model)
    if has_weights:
        apply_adapter(plain, folder)
        logits = _logits_of_short_text(plain.eval())
        remove_adapter(plain)
        plain.set_experts_implementation("eager")
        ours = logits if bool(logits.isfinite().all()) else None
    with warnings.catch_warnings(action="ignore"):
        wrapped = peft.PeftModel.from_pretrained(plain, str(folder), low_cpu_mem_usage=not has_weights).eval()
    read = _peft_state(wrapped)
    problems = [
        f"{name} is {'missing' if name not in read else 'unknown' if name not in state else 'different'}"
        for name in sorted(read.keys() | state.keys())
        if name not in read or name not in state or not _same(read[name], state[name])
    ]
    # the factors by which PEFT multiplies B A x
    scalings = {module.scaling[_ADAPTER] for module in wrapped.modules() if hasattr(module, "lora_A")}
    if scalings != (
        own := {lora_scaling(config.of_layer(target_name(name, layer))) for name, layer in lora_layers(model).items()}
    ):
        problems.append(f"the scale is {scalings}, not {own}")
    proved = "names, shapes, scale"
    if ours is not None and not problems:
        theirs, limit = _logits_of_short_text(wrapped), LOGIT_TOLERANCES[model.dtype]
        error = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
        if error > limit:
            problems.append(f"logits differ by {error:.1e} (limit {limit:.0e})")
        proved = f"logits within {error:.0e}"
    if problems:
        raise CheckpointError(
            f"{folder}: PEFT {peft.__version__} reads a different adapter: {problems[0]} ({len(problems)} such); the "
            "trained weights are safe in the run's checkpoints; please report this"
        )
    return f"PEFT {peft.__version__} reads the same adapter: {len(adapted_modules(model))} layers, {proved}"


def apply_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter to a plain model, all parameters frozen, for generation or merging; see `load_adapter`."""
    saved, tensors, rows = _read_adapter(folder)
    _grow_for(model, tensors, rows)
    add_lora(model, saved, seed=0, rows=rows)
    load_adapter(model, folder)
    model.requires_grad_(False)


def _grow_for(model: PreTrainedModel, tensors: Mapping[str, Tensor], rows: Mapping[str, list[int]]) -> None:
    """Give a plain model rows for the tokens that an adapter's user had added; the adapter holds their values."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    keys = [f"{_PREFIX}{name}.weight" for name, module in model.named_modules() if module in ends]
    sizes = [len(tensors[key]) for key in keys if key in tensors]
    grow_vocabulary(model, max([0, *sizes, *(token_id + 1 for ids in rows.values() for token_id in ids)]))


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy an adapter's weights, ours or PEFT's, into a model that already has LoRA layers, to continue training.

    Raises CheckpointError (missing or damaged files) or UsageError with the setting that differs: rank, alpha, rslora,
    dora, targets, modules_to_save, new tokens.
    """
    saved, tensors, rows = _read_adapter(folder)
    layers = lora_layers(model)
    problems = _disagreements(model, saved, rows)
    if problems:
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
        path, _, leaf = name.removeprefix(_PREFIX).partition(".base_layer.")
        if name.endswith(_OF_BASE) and not _same(tensor, getattr(layers[path].base, leaf)):
            raise UsageError(
                f"{folder}: {name} differs from the base model's {path}.{leaf}, but only the adapter would be loaded; "
                "merge the adapter with PEFT and train from the merged model"
            )


def _misread_layers(model: PreTrainedModel, content: Mapping[str, Any], state: Mapping[str, Tensor]) -> set[str]:
    """Return the layers that are adapted here but not by PEFT, or by PEFT but not here.

    `content` is an adapter_config.json, `state` an adapter's tensors by PEFT's names. PEFT reads them into a copy of
    the model on the meta device, so values are not compared. Returns all layers if PEFT fails.
    """
    import peft

    saved = _saved_parameters(model)

    def layers(names: Iterable[str]) -> set[str]:
        names = {name if name in saved else name.partition(".lora_")[0].replace(".base_layer", "") for name in names}
        return {name.removeprefix(_PREFIX) for name in names}

    try:
        # PEFT warns about what is checked here: missing keys, tied heads
        with warnings.catch_warnings(action="ignore"):
            wrapped = peft.PeftModel(_plain_copy(model), peft.LoraConfig(**content), low_cpu_mem_usage=True)
            tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
            loaded = peft.set_peft_model_state_dict(wrapped, tensors, low_cpu_mem_usage=True)
    except _READING_ERRORS:
        return layers(state)
    missing = {name.replace(f".{_ADAPTER}", "") for name in loaded.missing_keys}
    read = _peft_state(wrapped)
    same = {name for name in read if name in state and read[name].shape == state[name].shape and name not in missing}
    return layers((read.keys() | state.keys()) - same)


def _peft_state(wrapped: Any) -> dict[str, Tensor]:
    """Return a PEFT model's adapter tensors, by the names under which PEFT would save them."""
    import peft

    state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    # PEFT includes the base weight of an adapted head
    return {name: tensor for name, tensor in state.items() if not name.endswith(_OF_BASE)}


def _target_names(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return short names if they select exactly these layers, otherwise full ones."""
    wanted = set(layers)
    leaves = {name.rpartition(".")[2] for name in wanted}
    # modules inside those that are trained in full get no adapter in PEFT either
    inner = tuple(f"{name}.{part}" for name in adapted_modules(model) for part in ("base", "trained"))
    names = [name for name, _ in model.named_modules() if not name.startswith(inner)]
    selected = {name for name in names if name.rpartition(".")[2] in leaves and name not in saved_modules(model)}
    return sorted(leaves) if selected == wanted else sorted(wanted)


def share_base(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a model without adapters that uses the base weights of `model` in place; None if not all can be shared."""
    twin = _plain_copy(model, attention="sdpa")
    twin.generation_config = model.generation_config
    return twin if _borrow_weights(twin, model) else None


def _plain_copy(model: PreTrainedModel, *, attention: str = "eager") -> PreTrainedModel:
    """Build transformers' own model of this shape on the meta device, in eval mode, without adapters."""
    options = {"dtype": model.dtype, "attn_implementation": attention, "experts_implementation": "eager"}
    return empty_model(copy.deepcopy(model.config), options).eval()


def _borrow_weights(plain: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Make a plain copy on the meta device use the base weights and buffers of `model` in place.

    Returns False and changes nothing unless all of them are present, unsharded, on one device, and either in the
    expected dtype or in floating point of 16 bits or more; quantized and sharded weights are not.
    """
    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    # adapters of experts are nested: from the inside
    for name in reversed(adapted_modules(model)):
        inner = f"{name}.base."
        live |= {f"{name}.{key.removeprefix(inner)}": own for key, own in live.items() if key.startswith(inner)}
    wanted = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]
    for name, tensor in wanted:
        own = live.get(name)
        if own is None or isinstance(own, DTensor) or own.is_meta or own.shape != tensor.shape:
            return False
        if own.dtype != tensor.dtype and not (own.is_floating_point() and own.element_size() > 1):
            return False
    if len({live[name].device for name, _ in wanted}) != 1:
        return False
    borrowed: dict[int, nn.Parameter] = {}
    for name, tensor in wanted:
        path, _, leaf = name.rpartition(".")
        source: Tensor = live[name].detach()
        if isinstance(tensor, nn.Parameter):
            # tied weights stay tied
            source = borrowed.setdefault(id(live[name]), nn.Parameter(source, requires_grad=False))
        setattr(plain.get_submodule(path), leaf, source)
    return True


@torch.no_grad()
def _logits_of_short_text(model: Any) -> Tensor:
    """Return the logits (16, V), at least fp32, of a transformers or PEFT model for sixteen fixed tokens."""
    embedding = model.get_input_embeddings().weight
    token_ids = (torch.arange(16, device=embedding.device) * 7919 + 3) % len(embedding)
    logits: Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes; for meta tensors, whether their shapes are."""
    if left.shape != right.shape or left.is_meta or right.is_meta:
        return left.shape == right.shape
    narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(left.to(right.device, narrow), right.to(narrow))


def _disagreements(model: PreTrainedModel, saved: LoraConfig, rows: Mapping[str, list[int]]) -> list[str]:
    layers, beside = lora_layers(model), saved_modules(model)
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
    full = {name for name, held in beside.items() if isinstance(held, SavedModule)}
    if odd := sorted(set(saved.modules_to_save) ^ full):
        problems[f"lora.modules_to_save and the adapter differ: only one of them has {', '.join(odd)}"] = None
    masters = [held.trained.weight for held in beside.values() if isinstance(held, SavedModule)]
    if masters and (shared := len(set(map(id, masters))) < len(masters)) != saved.keep_tied and ties_ends(model):
        problems[f"lora.keep_tied is {shared}, but the adapter's is {saved.keep_tied}"] = None
    if (own := _rows_of(model)) != rows:
        problems[f"data.new_tokens trains the rows {own or 'of no token'}, but the adapter {rows or 'none'}"] = None
    return list(problems)


def _read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor], dict[str, list[int]]]:
    """Read an adapter folder: a LoraConfig with full module names as targets, its tensors by PEFT's names, its rows."""
    config_file, weights_file = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    for file in (config_file, weights_file):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; give a folder with an adapter in PEFT's format")
    check_safetensors(weights_file)
    tensors = load_file(weights_file)
    tail = "." + _SUFFIXES["lora_a"]
    names = [name.removeprefix(_PREFIX).removesuffix(tail) for name in tensors if name.endswith(tail)]
    config, tokens = _read_adapter_config(config_file, names)
    suffixes = [suffix for attribute, suffix in _SUFFIXES.items() if config.dora or attribute != "magnitude"]
    own = {f"{_PREFIX}{name}.{suffix}" for name in names for suffix in suffixes}
    rest = {name.removeprefix(_PREFIX) for name in tensors.keys() - own}
    rows = {name.removesuffix(_ROWS): tokens for name in rest if name.endswith(_ROWS)}
    if isinstance(tokens, dict):
        # PEFT's keys are endings of names
        rows = {name: next((ids for key, ids in tokens.items() if name.endswith(key)), []) for name in rows}
    saved = {name: _saved_name(name, config) for name in rest if not name.endswith(_ROWS)}
    config = config.model_copy(update={"modules_to_save": sorted(filter(None, set(saved.values())))})
    # PEFT stores the frozen weight of an adapted head with the adapter
    of_base = {f"{name}.base_layer.{leaf}" for name in names for leaf in ("weight", "bias")}
    odd = own - tensors.keys() | {name for name, module in saved.items() if module is None and name not in of_base}
    if odd:
        raise CheckpointError(f"{weights_file}: {len(odd)} tensors are missing or unknown, such as {min(odd)}")
    return config, tensors, dict(sorted(rows.items()))


def _targets_of(names: list[str], parameters: list[str]) -> list[str]:
    """Return the targets of the layers `names` in an adapter file.

    PEFT nests the adapters of an experts module, one level of `base_layer` for each of its `parameters`. The `.weight`
    of a linear layer is equivalent to targeting its module.
    """
    split = [name.rpartition(".") for name in parameters if not name.endswith(".weight")]
    targets = []
    for name in dict.fromkeys(name.replace(".base_layer", "") for name in names):
        # a parameter without a module is of any experts
        found = {leaf for path, _, leaf in split if f".{name}".endswith(f".{path or 'experts'}")}
        targets += [f"{name}.{leaf}" for leaf in found] or [name]
    return sorted(targets)


def _saved_name(tensor_name: str, config: LoraConfig) -> str | None:
    """Return the module of `modules_to_save` (by endings, as PEFT matches them) that a tensor belongs to, or None."""
    parts = tensor_name.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    found = next((name for name in names if name.endswith(tuple(config.modules_to_save))), None)
    # with ensure_weight_tying, a tied head is saved without being listed
    return names[-1] if found is None and config.modules_to_save and config.keep_tied and len(names) == 1 else found


def _read_adapter_config(file: Path, names: list[str]) -> tuple[LoraConfig, Any]:
    """Read an adapter_config.json for the layers `names`; also return its trainable_token_indices."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object; copy the adapter again")
    try:
        kind = content.get("peft_type")
        odd = {
            key: content[key] for key, plain in _PLAIN_OPTIONS.items() if key in content and content[key] not in plain
        }
        targets = content.get("target_modules") or content.get("target_parameters")
        if not targets or not isinstance(targets, str | list):
            raise CheckpointError(f"{file}: target_modules is {targets!r:.100}; copy the adapter again")
        if kind != "LORA" or odd:
            found = f"peft_type is {kind!r}" if kind != "LORA" else f"{odd} is not supported"
            raise UsageError(
                f"{file}: {found}; only plain LoRA adapters of linear layers and fused experts are supported"
            )
        content = {"lora_dropout": 0.0, "use_rslora": False, "use_dora": False, **content}
        saved = content.get("modules_to_save") or []
        fields = {
            **{ours: content[theirs] for ours, theirs in _FIELDS.items()},
            **{name: content.get(name) or {} for name in ("rank_pattern", "alpha_pattern")},
            "modules_to_save": saved,
            "keep_tied": bool(content.get("ensure_weight_tying")) or not saved,
        }
        parameters = content.get("target_parameters") or []
        return LoraConfig(targets=_targets_of(names, parameters), **fields), content.get("trainable_token_indices")
    except ValidationError as error:
        first = error.errors()[0]
        field = _FIELDS.get(str(first["loc"][0]), first["loc"][0])
        raise CheckpointError(f"{file}: {field}: {first['msg']}; copy the adapter again") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {reason_of(error)}; copy the adapter again") from error
