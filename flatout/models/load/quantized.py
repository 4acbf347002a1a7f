"""Load a model with quantized linear layers one layer at a time, so that the dense model is never in memory as a whole.

* 16-bit or 32-bit files: transformers' own loader on the CPU handles all renames and ties. Its tensors are views of the
  mapped files (387 MiB of weights add 3 MiB of anonymous memory), so each linear layer is read, quantized on the device
  and dropped in turn. transformers' HfQuantizer prefetches many tensors to the device, and changes between versions.
* random weights: built on the meta device, then filled and quantized layer by layer.
* bitsandbytes NF4 files: the same empty model takes its linear layers from the files as they are. transformers' renames
  are not applied, so missing or unknown names are errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from flatout.errors import CheckpointError, UsageError
from flatout.io.hub import hub_errors, hub_source
from flatout.kernels.fp8_matmul import fp8_problem
from flatout.kernels.nf4.reference import BLOCK, NESTED_BLOCK, Nf4Weight, nf4_levels
from flatout.models.blocks import decoder_layers, replace_module, text_decoder
from flatout.models.experts.block import experts_modules, is_grouped
from flatout.models.frozen.frozen_experts import Fp8Experts, FrozenExperts, Nf4Experts
from flatout.models.frozen.frozen_linear import Fp8Linear, Nf4Linear
from flatout.models.load.auto_class import auto_class, is_scoring
from flatout.models.load.source import check_weights
from flatout.models.scoring import NEW_WEIGHT, start_score


class Quantizer(NamedTuple):
    """Makes the modules that replace dense weights on their device.

    `linear` takes a weight (out, in) and a bias (out,) or None. `experts` takes a weight (E, out, in) and the
    parameter's name, and returns None to leave it dense.
    """

    linear: Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
    experts: Callable[[torch.Tensor, str], nn.Module | None]


def _fp8_experts(weight: torch.Tensor, name: str) -> Fp8Experts | None:
    too_odd = fp8_problem(weight.device, *weight.shape[1:])
    return None if too_odd else Fp8Experts(weight, scales_inputs=name == "down_proj")


QUANTIZERS: Mapping[str, Quantizer] = {
    "fp8": Quantizer(Fp8Linear, _fp8_experts),
    "nf4": Quantizer(Nf4Linear.from_dense, lambda weight, _: Nf4Experts(weight)),
}

# narrower layers are gates of experts: hardly any memory, and too small for float8 products
_NARROWEST = 16
_STATE = ".weight.quant_state.bitsandbytes__nf4"
_PARTS = (".weight", ".weight.absmax", ".weight.nested_absmax", ".weight.nested_quant_map", ".weight.quant_map")


def quantize_layers(
    model: PreTrainedModel,
    quantizer: Quantizer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    place: torch.device,
    keep_dense: Sequence[str] = (),
) -> None:
    """Move a model from mapped files on the CPU to `place`; the decoder's layers are quantized on the device.

    Modules whose names end in one of `keep_dense` stay dense. The rest is cast to `dtype`, except what transformers
    keeps in another dtype than the files'.
    """
    dense = _modules_named(model, keep_dense)
    for layer in decoder_layers(model):
        _quantize_layer(layer, quantizer, device, dtype, dense)
        layer.to(place)
    files_dtype = model.dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(place, dtype if parameter.dtype == files_dtype else parameter.dtype)
    model.to(place)
    model.config.dtype = dtype


def random_quantized(
    config: Any,
    options: dict[str, Any],
    quantizer: Quantizer,
    *,
    device: torch.device,
    place: torch.device,
    seed: int,
    keep_dense: Sequence[str] = (),
) -> PreTrainedModel:
    """Make a model with random weights by `seed`, in options["dtype"], quantized layer by layer as in `_fill`."""
    model = empty_model(config, options)
    dense = _modules_named(model, keep_dense)
    _fill(model, device, place, seed, lambda layer: _quantize_layer(layer, quantizer, device, options["dtype"], dense))
    return model


def read_nf4(
    name: str,
    revision: str | None,
    config: Any,
    options: dict[str, Any],
    *,
    device: torch.device,
    place: torch.device,
    seed: int,
) -> PreTrainedModel:
    """Load a model from bitsandbytes NF4 files (a folder or hub id), without requantizing; `seed` as `load_pretrained`.

    Layers are made on the device and moved to `place`. Raises CheckpointError (weights missing, unknown, or of another
    shape or format) or UsageError (quantized weights outside the decoder's linear layers).
    """
    files = _open_files(name, revision)
    quantized = {key.removesuffix(_STATE) for key in files if key.endswith(_STATE)}
    model = empty_model(config, options)
    layers = set(decoder_layers(model))
    # names of layers only: a dict of all modules would keep each dense weight after it is replaced
    names = {module: path for path, module in model.named_modules() if module in layers}
    taken: set[str] = set()

    def take(layer: nn.Module) -> None:
        for path, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear and (full_name := f"{names[layer]}.{path}") in quantized:
                replace_module(layer, path, _read_linear(files, full_name, linear, device, options["dtype"]))
                taken.add(full_name)

    _fill(model, device, place, 0, take)
    if outside := sorted(quantized - taken):
        raise UsageError(
            f"{name}: {outside[0]} is quantized but is not a linear layer of the decoder ({len(outside)} such); "
            "use a checkpoint that quantizes only those, or the 16-bit model"
        )
    if is_new := is_scoring(config) and NEW_WEIGHT not in files:
        start_score(model, seed)
    _read_dense(model, name, files, taken, {NEW_WEIGHT} if is_new else set())
    return model


def describe_storage(model: PreTrainedModel, storage: str) -> list[str]:
    """Return lines for the console: how linear layers are stored, and which are slow or stay dense."""
    stored = [module for module in model.modules() if isinstance(module, (Fp8Linear, Nf4Linear))]
    num_stored = sum(module.in_features * module.out_features for module in stored)
    lines = [f"base {storage}: {len(stored)} linear layers of {num_stored:,} weights in {_gib(stored)}"]
    if dense := sum(isinstance(module, nn.Linear) for layer in decoder_layers(model) for module in layer.modules()):
        lines.append(f"{dense} linear layers of the decoder are not quantized")
    if experts := [module for module in model.modules() if isinstance(module, FrozenExperts)]:
        num_stored = sum(module.shape.numel() for module in experts)
        lines.append(f"{len(experts)} fused expert tensors: {num_stored:,} weights in {_gib(experts)}")
        if storage == "nf4":
            lines.append("experts multiply in 16 bit: each of their weights is dequantized for its products")
    fused = (
        parameter.dim() == 3 for experts in experts_modules(model).values() for parameter in experts.parameters(False)
    )
    if dense_experts := sum(fused):
        lines.append(f"{dense_experts} fused expert tensors are not quantized")
    if slow := sum(isinstance(module, Nf4Linear) and bool(module.in_features % BLOCK) for module in stored):
        lines.append(f"{slow} layers have rows that are not a multiple of {BLOCK}: torch dequantizes them, slowly")
    return lines


def _gib(modules: Sequence[nn.Module]) -> str:
    num_bytes = sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return f"{num_bytes / 2**30:.2f} GiB"


def _modules_named(model: nn.Module, endings: Sequence[str]) -> set[nn.Module]:
    parts = tuple(f".{ending}." for ending in endings)
    return {module for name, module in model.named_modules() if any(part in f".{name}." for part in parts)}


def _quantize_layer(
    layer: nn.Module, quantizer: Quantizer, device: torch.device, dtype: torch.dtype, dense: set[nn.Module]
) -> None:
    """Replace a decoder layer's linear layers, and the fused experts that grouped products compute."""
    for path, linear in list(layer.named_modules()):
        if type(linear) is not nn.Linear or linear in dense or min(linear.weight.shape) < _NARROWEST:
            continue
        weight = linear.weight.detach().to(device, dtype)
        bias = None if linear.bias is None else linear.bias.detach().to(device, dtype)
        replace_module(layer, path, quantizer.linear(weight, bias))
    for experts in experts_modules(layer).values():
        module: Any = experts
        if experts in dense or not is_grouped(experts):
            continue
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if parameter.dim() != 3:
                continue
            values = parameter.detach().to(device, dtype)
            values = values.transpose(1, 2) if module.is_transposed else values
            if (stored := quantizer.experts(values, name)) is None:
                continue
            delattr(experts, name)
            setattr(experts, name, stored)


def empty_model(config: Any, options: dict[str, Any]) -> PreTrainedModel:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, **options)


def _fill(
    model: PreTrainedModel, device: torch.device, place: torch.device, seed: int, store: Callable[[nn.Module], None]
) -> None:
    """Draw random weights on the device, layer by layer; each layer is passed to `store`, then moved to `place`."""
    layers = decoder_layers(model)
    decoder = text_decoder(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for layer in layers:
            layer.to_empty(device=device)
            layer.apply(decoder._init_weights)
            store(layer)
            layer.to(place)
        _fill_rest(model, model, device, set(layers))
    model.tie_weights()
    model.to(place)


def _fill_rest(module: nn.Module, owner: PreTrainedModel, device: torch.device, done: set[nn.Module]) -> None:
    """Fill embeddings, norms, head and buffers, children first; each sub-model initializes its own modules."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        if child not in done:
            _fill_rest(child, owner, device, done)
    module.to_empty(device=device, recurse=False)
    owner._init_weights(module)


def _open_files(name: str, revision: str | None) -> dict[str, Any]:
    source, revision = hub_source(name, revision)
    if not (folder := Path(source)).is_dir():
        from huggingface_hub import snapshot_download

        with hub_errors(name):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    # `check_source` checks only a folder
    check_weights(folder)
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        opened = safe_open(path, framework="pt")
        files.update(dict.fromkeys(opened.keys(), opened))
    return files


def _read(files: Mapping[str, Any], key: str) -> Any:
    if key not in files:
        raise CheckpointError(f"{key} is missing from the model's files; download or copy them again")
    return files[key].get_tensor(key)


def _read_linear(
    files: Mapping[str, Any], name: str, linear: nn.Linear, device: torch.device, dtype: torch.dtype
) -> Nf4Linear:
    packed, absmax, nested_absmax, nested_map, levels = (_read(files, name + part) for part in _PARTS)
    state = json.loads(bytes(_read(files, name + _STATE).tolist()))
    layout = (state["blocksize"], state.get("nested_blocksize"), tuple(state["shape"]))
    if layout != (expected := (BLOCK, NESTED_BLOCK, tuple(linear.weight.shape))):
        raise CheckpointError(
            f"{name} has (block size, nested block size, shape) {layout}, but this model needs {expected}; "
            "use a different checkpoint or the 16-bit model"
        )
    if not torch.equal(levels, nf4_levels(levels.device)):
        raise CheckpointError(f"{name} has levels that are not NF4's; use a different checkpoint or the 16-bit model")
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
    stored = Nf4Weight(packed.view(-1), absmax, nested_absmax, nested_map, offset)
    bias = None if linear.bias is None else _read(files, name + ".bias").to(device, dtype)
    weight = Nf4Weight(*(tensor.to(device) for tensor in stored))
    return Nf4Linear(weight, bias, in_features=linear.in_features, out_features=linear.out_features, dtype=dtype)


@torch.no_grad()
def _read_dense(
    model: PreTrainedModel, name: str, files: Mapping[str, Any], taken: set[str], new: Collection[str] = ()
) -> None:
    """Fill all parameters and saved buffers that are not quantized. Raises CheckpointError unless all names match.

    Those of `new` are in no file; a model that scores does not use the head over the vocabulary.
    """
    prefixes = tuple(path + "." for path in taken)
    targets = {key: tensor for key, tensor in model.state_dict(keep_vars=True).items() if not key.startswith(prefixes)}
    read: set[int] = set()
    for key, target in targets.items():
        if key in files and (source := _read(files, key)).shape == target.shape:
            target.copy_(source)
            read.add(id(target))
    missing = [key for key, target in targets.items() if id(target) not in read and key not in new]
    # old files contain the rotary frequencies, which models now compute
    known = set(targets) | {path + part for path in taken for part in (*_PARTS, _STATE, ".bias")}
    known |= {"lm_head.weight"} if is_scoring(model.config) else set()
    unknown = sorted(key for key in set(files) - known if not key.endswith("rotary_emb.inv_freq"))
    if missing or unknown:
        raise CheckpointError(
            f"{name}: {len(missing)} weights are missing or have a different shape ({', '.join(missing[:3])}), "
            f"{len(unknown)} are unknown ({', '.join(unknown[:3])}); use the complete model, or the 16-bit one"
        )
