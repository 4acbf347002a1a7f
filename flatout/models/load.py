"""A transformers causal LM, unchanged, on its device, with our packed attention and one report of what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError, ResourceError, UsageError
from flatout.models.attention import AttentionChoice, Implementation, choose_attention, register
from flatout.models.families import family_of
from flatout.models.source import check_source

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for `packed_loss`.

    `dtype` is the arithmetic of the forward and backward pass; `autocast` says that the weights are fp32 masters and
    the step must run the model under torch.autocast(dtype). `report` are lines for the console.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    autocast: bool
    attention: Implementation
    report: tuple[str, ...]


def resolve_precision(name: Literal["auto", "bf16", "fp16", "fp32", "fp64"], device: torch.device) -> torch.dtype:
    """The dtype of the arithmetic: auto is bf16 on GPUs that have it in hardware, else fp32.

    Raises ResourceError for bf16 asked for by name on a GPU without it.
    """
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "bf16" and device.type == "cuda" and not has_bf16:
        raise ResourceError("model.precision: bf16 is not in this GPU's hardware; use auto, fp16 or fp32")
    return _DTYPES[name]


def load_model(config: ModelConfig, *, method: Literal["lora", "full"], device: torch.device, seed: int) -> LoadedModel:
    """Load (or build at random) a causal language model for training on packed documents.

    lora: every weight frozen, in the compute dtype. full: fp32 master weights (fp64 for fp64), all trained.
    Reads safetensors only, never runs code of the model's repository, never initialises a missing weight by itself.
    `seed` fixes the weights of `init: random` on one kind of device and leaves the global random state alone.
    Raises UsageError, SecurityError or CheckpointError.
    """
    check_source(config.name, config.revision, needs_weights=config.init == "pretrained")
    model_config = _read_config(config.name, config.revision)
    text_config = model_config.get_text_config()
    compute_dtype = resolve_precision(config.precision, device)
    masters = torch.promote_types(compute_dtype, torch.float32)
    weight_dtype = compute_dtype if method == "lora" else masters
    choice = choose_attention(config.attention, text_config, family_of(text_config), device=device, dtype=compute_dtype)
    register()
    options: dict[str, Any] = {"dtype": weight_dtype, "attn_implementation": choice.registered_name}
    if compute_dtype == torch.float64:
        # transformers' grouped expert GEMM has no fp64
        options["experts_implementation"] = "eager"
    if config.init == "random":
        model = _random_model(model_config, options, device, seed)
        unused: list[str] = []
    else:
        model, unused = _pretrained_model(config.name, config.revision, model_config, options, device)
    if method == "lora":
        model.requires_grad_(False)
    if config.gradient_checkpointing:
        _enable_checkpointing(model)
    model.train()
    return LoadedModel(
        model=model,
        dtype=compute_dtype,
        autocast=weight_dtype != compute_dtype,
        attention=choice.implementation,
        report=tuple(_report(config, model, compute_dtype, weight_dtype, choice, unused)),
    )


def load_for_inference(
    name: str, *, revision: str | None = None, device: torch.device, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a model to generate with or to merge into: transformers' own sdpa attention and cache, frozen, eval mode.

    `dtype` None keeps the dtype of the files. Raises as `load_model`.
    """
    check_source(name, revision)
    model_config = _read_config(name, revision)
    options = {"dtype": dtype or "auto"}
    model, _ = _pretrained_model(name, revision, model_config, options, device)
    return model.requires_grad_(False).eval()


def _read_config(name: str, revision: str | None) -> Any:
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"model.name: {name} is no model that transformers knows: {_first_line(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"model.name: {name} has quantised weights, which are not supported; use the 16-bit model")
    return config


def _random_model(config: Any, options: dict[str, Any], device: torch.device, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, **options)


def _pretrained_model(
    name: str, revision: str | None, config: Any, options: dict[str, Any], device: torch.device
) -> tuple[PreTrainedModel, list[str]]:
    """Weights straight to the device; returns the model and the names of the files' weights it has no use for."""
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, config=config, use_safetensors=True, trust_remote_code=False,
            device_map={"": device}, output_loading_info=True, **options,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise UsageError(f"model.name: cannot load {name}: {_first_line(error)}") from error
    missing = sorted(map(str, loading["missing_keys"])) + sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise CheckpointError(
            f"{name}: {len(missing)} weights are missing or have another shape ({', '.join(missing[:3])}); "
            "they would be random: take the whole model, or set model.init: random"
        )
    return model, sorted(map(str, loading["unexpected_keys"]))


def _enable_checkpointing(model: PreTrainedModel) -> None:
    # non-reentrant: needs no gradient on the inputs, and keeps the random state for dropout
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _report(
    config: ModelConfig,
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    choice: AttentionChoice,
    unused: list[str],
) -> list[str]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    source = "random weights" if config.init == "random" else "pretrained"
    lines = [
        f"{Path(config.name).name}: {model.config.model_type}, {num_parameters:,} parameters, {source}, "
        f"weights {_short(weight_dtype)}, compute {_short(compute_dtype)}",
        f"attention {choice.implementation}: {choice.reason}",
    ]
    if unused:
        lines.append(f"{len(unused)} weights in the files are not used by this model: {', '.join(unused[:3])}")
    if getattr(model.config.get_text_config(), "router_aux_loss_coef", None):
        lines.append("experts: the router's balancing loss is not added; the loss is cross-entropy only")
    return lines


def _short(dtype: torch.dtype) -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
