"""Load an unmodified transformers causal LM onto its device, with our packed attention, and report the choices made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from flatout.config.schema import BaseConfig, FullConfig, ModelConfig
from flatout.environment import named_capability
from flatout.errors import CheckpointError, Fix, FlatoutError, PackingError, ResourceError, UsageError, reason_of
from flatout.io.hub import hub_errors, hub_source
from flatout.kernels.capability import AMPERE, capability, choose_kernels_of
from flatout.kernels.fp8_matmul import has_fp8
from flatout.models.arch_quirks import choose_layout
from flatout.models.attention import Implementation, choose_attention, register, registered_name
from flatout.models.experts.block import IMPLEMENTATION, prepare_experts, register_experts
from flatout.models.frozen.frozen_linear import num_weights
from flatout.models.load import quantized
from flatout.models.load.auto_class import auto_class, is_scoring
from flatout.models.load.sharded import DeferredWeights, compute_buffers
from flatout.models.load.source import ALL_RANDOM, check_source
from flatout.models.lora.saved import grow_vocabulary, without_reports
from flatout.models.masters import narrow_hidden_states
from flatout.models.rope import scale_by_document
from flatout.models.scoring import NEW_WEIGHT, Scoring, set_padding, start_score, use_scoring

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# quantized files that transformers dequantizes on load: gpt-oss, DeepSeek and others with fp8 by blocks
_DEQUANTIZED = ("mxfp4", "fp8")
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
CANNOT_BUILD = "model.name: {} cannot be built from its config.json, generation_config.json and weights"
CHOOSE_ANOTHER = "; choose a different model"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for `ModelWithLoss`."""

    model: PreTrainedModel
    dtype: torch.dtype
    """The compute dtype of the forward and backward pass."""
    autocast: bool
    """Whether the weights are fp32 masters, so that the model must run under torch.autocast(dtype)."""
    attention: Implementation | Literal["transformers"]
    report: tuple[str, ...]
    """Lines for the console."""
    deferred_weights: DeferredWeights | None = None
    """Weights that are still in their files."""
    is_padded: bool = False
    """Whether every document is a padded row; then `attention` may be one of transformers' own."""

    def casting(self) -> torch.autocast:
        """Return the autocast that passes run under, if any."""
        return torch.autocast(self.model.device.type, dtype=self.dtype, enabled=self.autocast)

    def present(self) -> AbstractContextManager[None]:
        """Make the model runnable within this context; if its weights are still in files, only its first layers."""
        return nullcontext() if self.deferred_weights is None else self.deferred_weights.first_layers()


@dataclass(frozen=True, slots=True)
class Loading:
    """What a run has decided of how its model is loaded."""

    on_host: bool = False
    """Leave pretrained weights in their mapped files, and quantized ones in host memory, see `DeferredWeights`."""
    is_padded: bool = False
    """Whether each document is a padded row."""
    num_rows: int = 0
    """The rows to which embedding and head grow."""
    keep_dense: Sequence[str] = ()
    """Endings of the names of modules that are not quantized."""
    context_ranks: int = 1
    """As in `choose_attention`."""
    scoring: Scoring | None = None
    """The scores of a model for sequence classification."""


def gpu_features(device: torch.device) -> tuple[bool, bool]:
    """Return whether a device, or the named one in its place, has bf16 and float8 in hardware; a CPU has neither."""
    choose_kernels_of(named_capability())
    return capability(device) >= AMPERE, has_fp8(device)


def resolve_precision(name: Literal["auto", "bf16", "fp16", "fp32", "fp64"], device: torch.device) -> torch.dtype:
    """Return the compute dtype: auto is bf16 on GPUs that have it in hardware, otherwise fp32.

    Raises ResourceError if bf16 is requested by name on a GPU without it.
    """
    has_bf16, _ = gpu_features(device)
    if name == "auto":
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "bf16" and device.type == "cuda" and not has_bf16:
        raise ResourceError("model.precision: this GPU has no bf16 hardware", [Fix({"model.precision": "auto"})])
    return _DTYPES[name]


def load_model(
    config: ModelConfig,
    *,
    method: Literal["lora", "full"],
    device: torch.device,
    seed: int,
    full: FullConfig = FullConfig(),  # noqa: B008  (FullConfig is frozen)
    base: BaseConfig = BaseConfig(),  # noqa: B008  (frozen as well)
    how: Loading = Loading(),
) -> LoadedModel:
    """Load a causal language model, or initialize it randomly, to train on packed documents or on padded rows.

    lora: every weight frozen, in the compute dtype; the decoder's linear layers in `base.storage`.
    full: fp32 master weights (fp64 for fp64), all trained, or with `full.weights: bf16` only bf16 weights.
    Reads only safetensors, never runs code from the model's repository, never makes up a missing weight, but a `score`.
    `how` holds what the run has decided. Raises UsageError, SecurityError or CheckpointError.
    """
    choose_kernels_of(named_capability())
    check_source(config.name, config.revision, needs_weights=config.init == "pretrained")
    storage = base.storage if method == "lora" else "model"
    model_config = read_config(config.name, config.revision, storage, how.scoring)
    text = model_config.get_text_config()
    compute_dtype = resolve_precision(config.precision, device)
    weight_dtype = weight_dtype_of(method, full, compute_dtype)
    if not how.is_padded:
        choose_layout(text, "packed")
    ranks = how.context_ranks
    choice = choose_attention(config.attention, text, device=device, dtype=compute_dtype, context_ranks=ranks)
    register(choice.implementation)
    options: dict[str, Any] = {"dtype": weight_dtype, "attn_implementation": registered_name(choice.implementation)}
    register_experts()
    options["experts_implementation"] = IMPLEMENTATION if config.experts == "auto" else "eager"
    with library_errors(CANNOT_BUILD.format(config.name), CHOOSE_ANOTHER):
        make = partial(_make_model, config, storage=storage, device=device, seed=seed, how=how)
        model, unused, own_attention = _make_attending(config, model_config, options, make, is_padded=how.is_padded)
        grow_vocabulary(model, how.num_rows, seed=seed)
    set_padding(model, how.scoring and how.scoring.padding_id)
    if method == "lora":
        model.requires_grad_(False)
    model.train()
    dtypes = f"weights {_NAMES[weight_dtype]}, compute {_NAMES[compute_dtype]}"
    attention = f"transformers: {own_attention}" if own_attention else ": ".join(choice)
    report = _report(config, model, dtypes, attention, unused, dequantized_method(model_config))
    narrowed = narrow_hidden_states(model, full, compute_dtype)
    report += filter(None, (prepare_experts(model), scale_by_document(model), narrowed))
    if storage != "model":
        report += quantized.describe_storage(model, storage)
    attends: Any = "transformers" if own_attention else choice.implementation
    has_masters = weight_dtype != compute_dtype
    return LoadedModel(model, compute_dtype, has_masters, attends, tuple(report), is_padded=how.is_padded)


@contextmanager
def library_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Turn what a library raises for a user's files into a UsageError of one sentence: `what`, reason, `remedy`."""
    try:
        yield
    except (FlatoutError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(f"{what}: {reason_of(error)}{remedy}") from error


def weight_dtype_of(method: Literal["lora", "full"], full: FullConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that weights are stored in. Raises UsageError for bf16 weights with another compute dtype."""
    if method == "lora":
        return compute_dtype
    if full.weights == "fp32":
        return torch.promote_types(compute_dtype, torch.float32)
    if compute_dtype != torch.bfloat16:
        raise UsageError(
            f"full.weights: bf16 computes in bf16; got model.precision {_NAMES[compute_dtype]} on this device",
            [Fix({"model.precision": "bf16"}), Fix({"full.weights": "fp32"})],
        )
    return compute_dtype


def read_config(name: str, revision: str | None, storage: str, scoring: Scoring | None) -> Any:
    """Return transformers' configuration of a model, for sequence classification with `scoring`.

    Its quantization_config is a dict with `dequantize` for weights that transformers dequantizes on load. Raises
    UsageError if transformers refuses it, and for other quantized weights than bitsandbytes' double quantized NF4 with
    `storage` nf4.
    """
    with library_errors(f"{name}/config.json: transformers rejects it"):
        source, revision = hub_source(name, revision)
        with hub_errors(name):
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if scoring is not None:
        use_scoring(config, scoring.labels, f"{name}/config.json")
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return config
    fields = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = fields.get("quant_method")
    if method in _DEQUANTIZED:
        config.quantization_config = {**fields, "dequantize": True}
        return config
    if method != "bitsandbytes":
        raise UsageError(f"model.name: {name} has {method} weights, which are not supported; use the 16-bit model")
    if not (fields.get("load_in_4bit") or fields.get("_load_in_4bit")):
        raise UsageError(
            f"model.name: {name} has bitsandbytes int8 weights, which are not supported; use NF4 or 16 bit"
        )
    supported = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8"}
    # files of older versions do not name the storage
    stored = {"bnb_4bit_quant_storage": "uint8", **fields}
    if wrong := [f"{field}: {stored.get(field)}" for field in supported if stored.get(field) != supported[field]]:
        raise UsageError(
            f"model.name: {name} has bitsandbytes weights with {', '.join(wrong)}; the only 4-bit format supported is "
            "nf4 with double quantization: use such a checkpoint or the 16-bit model"
        )
    if storage != "nf4":
        raise UsageError(
            f"model.name: {name} has bitsandbytes NF4 weights, which only adapters train on",
            [Fix({"method": "lora", "base.storage": "nf4"}), Fix({}, "use the 16-bit model")],
        )
    return config


def dequantized_method(config: Any) -> str | None:
    """Return the format of quantized weights that transformers dequantizes on load, as `read_config` set it."""
    quantization = getattr(config, "quantization_config", None)
    return quantization["quant_method"] if isinstance(quantization, dict) and quantization.get("dequantize") else None


def _make_attending(
    config: ModelConfig,
    model_config: Any,
    options: dict[str, Any],
    make: Callable[[Any, dict[str, Any]], tuple[PreTrainedModel, list[str]]],
    *,
    is_padded: bool,
) -> tuple[PreTrainedModel, list[str], str | None]:
    """Make the model as `_make_model` does; with rows, if need be with its own attention, and return why.

    Raises PackingError if documents are packed, or an attention is configured, and the model only has its own.
    """
    try:
        return (*make(copy(model_config), options), None)
    except KeyError as error:
        if options["attn_implementation"] not in str(error):
            raise
        reason = "its attention does not go through transformers' attention interface"
        if not is_padded or config.attention != "auto":
            fix = Fix({"batch.layout": "auto", "model.attention": "auto"})
            raise PackingError(f"model type {model_config.model_type}: {reason}", [fix]) from error
        return (*make(model_config, {**options, "attn_implementation": None}), reason)


def _make_model(
    config: ModelConfig, model_config: Any, options: dict[str, Any], *, storage: str, device: torch.device, seed: int,
    how: Loading,
) -> tuple[PreTrainedModel, list[str]]:  # fmt: skip
    """Make the model for `load_model`; also return the names of unused weights in the files."""
    place = torch.device("cpu") if how.on_host else device
    quantization = getattr(model_config, "quantization_config", None)
    is_nf4 = quantization is not None and not dequantized_method(model_config)
    if is_nf4 or (quantization is not None and config.init == "random"):
        # transformers would load these weights through bitsandbytes, and make random ones in fp8
        del model_config.quantization_config
    if config.init == "random" and storage != "model":
        quantizer = quantized.QUANTIZERS[storage]
        model = quantized.random_quantized(
            model_config, options, quantizer, device=device, seed=seed, place=place, keep_dense=how.keep_dense
        )
        return model, []
    if config.init == "random":
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed)
            return auto_class(model_config).from_config(model_config, **options), []
    if is_nf4:
        nf4 = quantized.read_nf4(
            config.name, config.revision, model_config, options, device=device, place=place, seed=seed
        )
        return nf4, []
    in_files = how.on_host or storage != "model"
    read, where = ({**options, "dtype": "auto"}, torch.device("cpu")) if in_files else (options, device)
    model, unused = load_pretrained(config.name, config.revision, model_config, read, {"": where}, seed=seed)
    if storage != "model":
        quantizer = quantized.QUANTIZERS[storage]
        quantized.quantize_layers(
            model, quantizer, device=device, dtype=options["dtype"], place=place, keep_dense=how.keep_dense
        )
    elif how.on_host and model.dtype != options["dtype"]:
        compute_buffers(model, quantized.empty_model(model_config, options))
    return model, unused


def load_pretrained(
    name: str, revision: str | None, config: Any, options: dict[str, Any], device_map: Any, *, seed: int
) -> tuple[PreTrainedModel, list[str]]:
    """Load weights directly to their devices; return the model and the names of unused weights in the files.

    Only the `score` of a model for sequence classification may be missing: it is drawn by `seed`.
    """
    try:
        source, revision = hub_source(name, revision)
        # it would report a new `score` as a fault of the files
        quiet = without_reports() if is_scoring(config) else nullcontext()
        with hub_errors(name), quiet:
            model, loading = auto_class(config).from_pretrained(
                source, revision=revision, config=config, use_safetensors=True, trust_remote_code=False,
                device_map=device_map, output_loading_info=True, **options,
            )  # fmt: skip
    except (OSError, ValueError) as error:
        raise UsageError(f"model.name: cannot load {name}: {reason_of(error)}") from error
    except SafetensorError as error:
        # a local folder's files were checked before, so these are from the hub, and their download did not finish
        raise CheckpointError(
            f"{name}: its downloaded weights are damaged ({error}); remove them from the hub cache and load again"
        ) from error
    missing_keys = set(map(str, loading["missing_keys"]))
    if is_scoring(config) and NEW_WEIGHT in missing_keys:
        start_score(model, seed)
        missing_keys.discard(NEW_WEIGHT)
    missing = sorted(missing_keys) + sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise CheckpointError(
            f"{name}: {len(missing)} weights are missing or misshaped ({', '.join(missing[:3])}); use a complete one",
            [ALL_RANDOM],
        )
    if dequantized_method(config):
        # saving would reverse what was done to the files' names, and call dense weights quantized
        vars(model).pop("_weight_conversions", None)
        del config.quantization_config
        # transformers leaves weights that are not quantized in the files' dtype
        for parameter in model.parameters() if options["dtype"] != "auto" else ():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(options["dtype"])
    return model, sorted(map(str, loading["unexpected_keys"]))


def _report(
    config: ModelConfig,
    model: PreTrainedModel,
    dtypes: str,
    attention: str,
    unused: list[str],
    source_format: str | None,
) -> list[str]:
    source = "random weights" if config.init == "random" else "pretrained"
    lines = [
        f"{Path(config.name).name}: {model.config.model_type}, {num_weights(model):,} parameters, {source}, {dtypes}",
        f"attention {attention}",
    ]
    if unused:
        lines.append(f"{len(unused)} weights in the files are unused by this model: {', '.join(unused[:3])}")
    if config.init == "pretrained" and source_format:
        lines.append(f"the files' {source_format} weights are dequantized")
    return lines
