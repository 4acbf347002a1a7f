"""A transformers causal LM, unchanged, on its device, with our packed attention and one report of what was decided."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flatout.config.schema import BaseConfig, FullConfig, ModelConfig
from flatout.errors import CheckpointError, ResourceError, UsageError
from flatout.models.attention import AttentionChoice, Implementation, choose_attention, register
from flatout.models.bases import Fp8Linear, num_weights
from flatout.models.device_map import DeviceMap, read_device_map
from flatout.models.families import family_of
from flatout.models.nf4 import Nf4Linear
from flatout.models.quantised_load import (
    Make,
    check_nf4_config,
    describe_storage,
    empty_model,
    quantise_layers,
    random_quantised,
    read_nf4,
)
from flatout.models.shard_load import WaitingWeights, compute_buffers
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
    waiting: WaitingWeights | None = None

    def present(self) -> AbstractContextManager[None]:
        """Within, the model can run: whole, or its first layers where its weights wait in their files."""
        return nullcontext() if self.waiting is None else self.waiting.first_layers()


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
    on_host: bool = False,
) -> LoadedModel:
    """Load (or build at random) a causal language model for training on packed documents.

    lora: every weight frozen, in the compute dtype; the decoder's linear layers as `base.storage` says.
    full: fp32 master weights (fp64 for fp64), all trained, or with `full.weights: bf16` bf16 weights alone.
    Reads safetensors only, never runs code of the model's repository, never initialises a missing weight by itself.
    `on_host` leaves pretrained weights in their mapped files, in the files' precision, and quantised ones, made on the
    device layer by layer, in host memory (see `WaitingWeights`).
    `seed` fixes the weights of `init: random` on one kind of device and leaves the global random state alone.
    Raises UsageError, SecurityError or CheckpointError.
    """
    check_source(config.name, config.revision, needs_weights=config.init == "pretrained")
    storage = base.storage if method == "lora" else "model"
    model_config = _read_config(config.name, config.revision, storage)
    text_config = model_config.get_text_config()
    compute_dtype = resolve_precision(config.precision, device)
    weight_dtype = weight_dtype_of(method, full, compute_dtype)
    choice = choose_attention(config.attention, text_config, family_of(text_config), device=device, dtype=compute_dtype)
    register(choice.implementation)
    options: dict[str, Any] = {"dtype": weight_dtype, "attn_implementation": choice.registered_name}
    if compute_dtype == torch.float64:
        # transformers' grouped expert GEMM has no fp64
        options["experts_implementation"] = "eager"
    unused: list[str] = []
    place = torch.device("cpu") if on_host else device
    if storage != "model":
        model, unused = _stored_model(config, storage, model_config, options, device, seed, place)
    elif config.init == "random":
        model = _random_model(model_config, options, device, seed)
    else:
        how = {**options, "dtype": "auto"} if on_host else options
        model, unused = _pretrained_model(config.name, config.revision, model_config, how, place)
        if on_host and model.dtype != weight_dtype:
            compute_buffers(model, empty_model(model_config, options))
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


def weight_dtype_of(method: Literal["lora", "full"], full: FullConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype that weights are kept in. Raises UsageError for bf16 weights with another arithmetic."""
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
    name: str,
    *,
    revision: str | None = None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a model to generate with or to merge into: transformers' own sdpa attention and cache, frozen, eval mode.

    `dtype` None keeps the dtype of the files. `device_map` (see `read_device_map`) spreads it over several devices
    instead of the one. Raises as `load_model` and `read_device_map`.
    """
    check_source(name, revision)
    model_config = _read_config(name, revision)
    options = {"dtype": dtype or "auto"}
    places = None if device_map is None else read_device_map(device_map, model_config)
    model, _ = _pretrained_model(name, revision, model_config, options, device, places)
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
    config: ModelConfig,
    storage: str,
    model_config: Any,
    options: dict[str, Any],
    device: torch.device,
    seed: int,
    place: torch.device,
) -> tuple[PreTrainedModel, list[str]]:
    """As `_pretrained_model` and `_random_model`, with quantised layers made on the device and kept on `place`."""
    make: Make = Fp8Linear.from_dense if storage == "fp8" else Nf4Linear.from_dense
    is_quantised = getattr(model_config, "quantization_config", None) is not None
    if is_quantised:
        # transformers would load these weights through bitsandbytes
        del model_config.quantization_config
    if config.init == "random":
        return random_quantised(model_config, options, make, device=device, seed=seed, place=place), []
    if is_quantised:
        return read_nf4(config.name, config.revision, model_config, options, device=device, place=place), []
    mapped = {**options, "dtype": "auto"}
    model, unused = _pretrained_model(config.name, config.revision, model_config, mapped, torch.device("cpu"))
    quantise_layers(model, make, device=device, dtype=options["dtype"], place=place)
    return model, unused


def _random_model(config: Any, options: dict[str, Any], device: torch.device, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, **options)


def _pretrained_model(
    name: str,
    revision: str | None,
    config: Any,
    options: dict[str, Any],
    device: torch.device,
    places: DeviceMap | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    """Weights straight to the device; returns the model and the names of the files' weights it has no use for."""
    device_map: Any = places or {"": device}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, config=config, use_safetensors=True, trust_remote_code=False,
            device_map=device_map, output_loading_info=True, **options,
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
    source = "random weights" if config.init == "random" else "pretrained"
    lines = [
        f"{Path(config.name).name}: {model.config.model_type}, {num_weights(model):,} parameters, {source}, "
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
