"""A transformers causal LM, unchanged, on its device, with our packed attention and one report of what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flatout.config.schema import BaseConfig, FullConfig, ModelConfig
from flatout.errors import CheckpointError, ResourceError, UsageError
from flatout.models.attention import AttentionChoice, Implementation, choose_attention, register
from flatout.models.families import family_of
from flatout.models.nf4 import Nf4Linear
from flatout.models.quantised_load import (
    Make,
    check_nf4_config,
    describe_storage,
    num_stored_weights,
    quantise_layers,
    random_quantised,
    read_nf4,
)
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


def load_model(
    config: ModelConfig,
    *,
    method: Literal["lora", "full"],
    device: torch.device,
    seed: int,
    full: FullConfig = FullConfig(),  # noqa: B008  (FullConfig is frozen)
    base: BaseConfig = BaseConfig(),  # noqa: B008  (frozen as well)
) -> LoadedModel:
    """Load (or build at random) a causal language model for training on packed documents.

    lora: every weight frozen, in the compute dtype; the decoder's linear layers as `base.storage` says.
    full: fp32 master weights (fp64 for fp64), all trained, or with `full.weights: bf16` bf16 weights alone.
    Reads safetensors only, never runs code of the model's repository, never initialises a missing weight by itself.
    `seed` fixes the weights of `init: random` on one kind of device and leaves the global random state alone.
    Raises UsageError, SecurityError or CheckpointError.
    """
    check_source(config.name, config.revision, needs_weights=config.init == "pretrained")
    storage = base.storage if method == "lora" else "model"
    model_config = _read_config(config.name, config.revision, storage)
    text_config = model_config.get_text_config()
    compute_dtype = resolve_precision(config.precision, device)
    weight_dtype = _weight_dtype(method, full, compute_dtype)
    choice = choose_attention(config.attention, text_config, family_of(text_config), device=device, dtype=compute_dtype)
    register(choice.implementation)
    options: dict[str, Any] = {"dtype": weight_dtype, "attn_implementation": choice.registered_name}
    if compute_dtype == torch.float64:
        # transformers' grouped expert GEMM has no fp64
        options["experts_implementation"] = "eager"
    unused: list[str] = []
    if storage != "model":
        model, unused = _stored_model(config, storage, model_config, options, device, seed)
    elif config.init == "random":
        model = _random_model(model_config, options, device, seed)
    else:
        model, unused = _pretrained_model(config.name, config.revision, model_config, options, device)
    if method == "lora":
        model.requires_grad_(False)
    model.train()
    report = _report(config, model, compute_dtype, weight_dtype, choice, unused)
    if storage != "model":
        report += describe_storage(model, storage)
    return LoadedModel(
        model=model,
        dtype=compute_dtype,
        autocast=weight_dtype != compute_dtype,
        attention=choice.implementation,
        report=tuple(report),
    )


def _weight_dtype(method: Literal["lora", "full"], full: FullConfig, compute_dtype: torch.dtype) -> torch.dtype:
    if method == "lora":
        return compute_dtype
    if full.weights == "fp32":
        return torch.promote_types(compute_dtype, torch.float32)
    if compute_dtype != torch.bfloat16:
        raise UsageError(
            f"full.weights: bf16 computes in bf16; got model.precision {_short(compute_dtype)} on this device, "
            "set model.precision: bf16 or full.weights: fp32"
        )
    return compute_dtype


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


def _read_config(name: str, revision: str | None, storage: str = "model") -> Any:
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"model.name: {name} is no model that transformers knows: {_first_line(error)}") from error
    if (quantisation := getattr(config, "quantization_config", None)) is not None:
        check_nf4_config(name, quantisation)
        if storage != "nf4":
            raise UsageError(
                f"model.name: {name} has bitsandbytes NF4 weights, which are only for method: lora with "
                "base.storage: nf4; set that, or use the 16-bit model"
            )
    return config


def _stored_model(
    config: ModelConfig, storage: str, model_config: Any, options: dict[str, Any], device: torch.device, seed: int
) -> tuple[PreTrainedModel, list[str]]:
    """As `_pretrained_model` and `_random_model`, the decoder's linear layers quantised."""
    make: Make = Nf4Linear.from_dense
    if storage == "fp8":
        from flatout.models.bases import Fp8Linear

        make = Fp8Linear.from_dense
    is_quantised = getattr(model_config, "quantization_config", None) is not None
    if is_quantised:
        # transformers would load these weights through bitsandbytes
        del model_config.quantization_config
    if config.init == "random":
        return random_quantised(model_config, options, make, device=device, seed=seed), []
    if is_quantised:
        return read_nf4(config.name, config.revision, model_config, options, device=device), []
    mapped = {**options, "dtype": "auto"}
    model, unused = _pretrained_model(config.name, config.revision, model_config, mapped, torch.device("cpu"))
    quantise_layers(model, make, device=device, dtype=options["dtype"])
    return model, unused


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


def _report(
    config: ModelConfig,
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    choice: AttentionChoice,
    unused: list[str],
) -> list[str]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters()) + num_stored_weights(model)
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
