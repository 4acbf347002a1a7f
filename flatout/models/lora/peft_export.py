"""Write adapters so that PEFT adapts exactly the layers that were trained, and check what PEFT reads."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, UsageError
from flatout.models.blocks import replace_module
from flatout.models.load.quantized import empty_model
from flatout.models.lora.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_NAMES,
    PREFIX,
    adapter_state,
    apply_adapter,
    equal_as_stored,
)
from flatout.models.lora.layer import lora_layers, lora_scaling

# relative tolerance between PEFT's logits and ours, for the median token: both add the same terms in another order
LOGIT_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
_ADAPTER = "default"
# what PEFT raises for names that it cannot match, convert or load
_READING_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)


def adapter_config(
    model: PreTrainedModel, config: LoraConfig, *, base_name: str, state: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return the adapter_config.json with which PEFT adapts exactly the layers that are adapted here.

    In many mixture-of-experts models, PEFT takes names such as gate_proj for the fused experts, and drops adapters of
    dense layers and shared experts. Those are listed as `target_parameters` instead, which PEFT does not convert; it
    then requires dropout 0 in the file. Only the shapes of `state` (None: the live adapter) are read.
    Raises UsageError with a layer's name if PEFT can read neither form.
    """
    import peft

    state = adapter_state(model) if state is None else state
    layers = lora_layers(model)
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        **{theirs: getattr(config, ours) for ours, theirs in PEFT_NAMES.items()},
        "target_modules": _target_names(model, layers),
        "target_parameters": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    misread = _misread_layers(model, content, state)
    if not misread:
        return content
    content |= {
        "lora_dropout": 0.0,
        "target_modules": _target_names(model, layers.keys() - misread),
        "target_parameters": sorted(f"{name}.weight" for name in layers.keys() & misread),
    }
    # target_parameters do not support DoRA
    if not config.dora:
        misread = _misread_layers(model, content, state)
        if not misread:
            return content
    leaves = sorted({name.rpartition(".")[2] for name in layers.keys() & misread})
    remedy = "lora.dora: false, or " if config.dora else ""
    raise UsageError(
        f"lora.targets: PEFT {peft.__version__} cannot read adapters of {min(misread)} ({len(misread)} layers) in "
        f"model type {model.config.model_type}; set {remedy}lora.targets to what leaves these {', '.join(leaves)} out"
    )


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
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
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

    state = adapter_state(model) if state is None else state
    plain = _plain_copy(model)
    ours = None
    has_weights = _borrow_weights(plain, model)
    if has_weights:
        apply_adapter(plain, folder)
        logits = _logits_of_short_text(plain.eval())
        for name, layer in lora_layers(plain).items():
            replace_module(plain, name, layer.base)
        ours = logits if bool(logits.isfinite().all()) else None
    with warnings.catch_warnings(action="ignore"):
        wrapped = peft.PeftModel.from_pretrained(plain, str(folder), low_cpu_mem_usage=not has_weights).eval()
    read = _peft_state(wrapped)
    problems = [
        f"{name} is {'missing' if name not in read else 'unknown' if name not in state else 'different'}"
        for name in sorted(read.keys() | state.keys())
        if name not in read or name not in state or not equal_as_stored(read[name], state[name])
    ]
    # the factors by which PEFT multiplies B A x
    scalings = {module.scaling[_ADAPTER] for module in wrapped.modules() if hasattr(module, "lora_A")}
    if scalings != {lora_scaling(config)}:
        problems.append(f"the scale is {scalings}, not {lora_scaling(config):g}")
    proved = "names, shapes, scale"
    if ours is not None and not problems:
        theirs, limit = _logits_of_short_text(wrapped), LOGIT_TOLERANCES[model.dtype]
        error = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
        if error > limit:
            problems.append(f"logits differ by {error:.1e} (limit {limit:.0e})")
        proved = f"logits within {error:.0e}"
    if problems:
        raise CheckpointError(
            f"{folder}: PEFT {peft.__version__} reads another adapter: {problems[0]} ({len(problems)} such); the "
            "trained weights are in the run's checkpoints; report this"
        )
    return f"PEFT {peft.__version__} reads the same adapter: {len(lora_layers(model))} layers, {proved}"


def _misread_layers(model: PreTrainedModel, content: Mapping[str, Any], state: Mapping[str, Tensor]) -> set[str]:
    """Return the layers that are adapted here but not by PEFT, or by PEFT but not here.

    `content` is an adapter_config.json, `state` an adapter's tensors by PEFT's names. PEFT reads them into a copy of
    the model on the meta device, so values are not compared. Returns all layers if PEFT fails.
    """
    import peft

    def layers(names: Iterable[str]) -> set[str]:
        return {name.removeprefix(PREFIX).partition(".lora_")[0].replace(".base_layer", "") for name in names}

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
    return layers(name for name in read.keys() | state.keys() if name not in same)


def _peft_state(wrapped: Any) -> dict[str, Tensor]:
    """Return a PEFT model's adapter tensors, by the names under which PEFT would save them."""
    import peft

    state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    # PEFT includes the base weight of an adapted head
    return {name: tensor for name, tensor in state.items() if ".base_layer." not in name}


def _target_names(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return short names if they select exactly these layers, otherwise full ones."""
    wanted = set(layers)
    leaves = {name.rpartition(".")[2] for name in wanted}
    inner = {f"{name}.base" for name in lora_layers(model)}
    selected = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves and name not in inner}
    return sorted(leaves) if selected == wanted else sorted(wanted)


def _plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Build transformers' own model of this shape on the meta device, in eval mode, without adapters."""
    options = {"dtype": model.dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    return empty_model(copy.deepcopy(model.config), options).eval()


def _borrow_weights(plain: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Make a plain copy on the meta device use the base weights and buffers of `model` in place.

    Returns False and changes nothing unless all of them are present, unsharded, on one device, and either in the
    expected dtype or in floating point of 16 bits or more; quantized and sharded weights are not.
    """
    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in lora_layers(model):
        live |= {f"{name}.{leaf}": live[key] for leaf in ("weight", "bias") if (key := f"{name}.base.{leaf}") in live}
    wanted = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]
    for name, tensor in wanted:
        own = live.get(name)
        if own is None or hasattr(own, "to_local") or own.is_meta or own.shape != tensor.shape:
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
