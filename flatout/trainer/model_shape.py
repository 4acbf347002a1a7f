"""A model's sizes, counted on the model that transformers builds from config.json, without its weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flatout.errors import Fix, UsageError, reason_of
from flatout.models.arch_quirks import num_logits
from flatout.models.blocks import expert_tensors, layer_configs, layer_list, text_decoder, towers
from flatout.models.experts.block import experts_modules
from flatout.models.experts.lora import expert_parameters
from flatout.models.frozen.frozen_linear import is_plain_linear
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.quantized import empty_model
from flatout.models.load.source import read_model_config
from flatout.models.scoring import ONE_SCORE, score_module, use_scoring
from flatout.planner.shape import LayerShape, Linear, ModelShape, TowerShape

# layer kinds with a window
_WINDOWED = re.compile("sliding|chunked")
# class names of recurrent mixers, which save more than their projections for the backward pass
_RECURRENT = re.compile("Mixer$|DeltaNet|DeltaAttention|Lightning|LinearAttention|RecurrentBlock|RwkvSelf|xLSTMLayer")
# elements saved per projected element, and per element of the state (channels x state size, or heads x chunk), by
# transformers' torch forms, which run where a kernel is missing; kernels save fewer. Against saved tensors measured at
# hidden size 512 and 512 tokens: Mamba-2 within 2 %, short convolutions +3 %, Gated DeltaNet +4 %, Falcon-H1 +4 %,
# Mamba +26 %, lightning attention +40 %, RG-LRU +59 %
_RECURRENT_SHARE, _STATE_SHARE = 4, 2.5
# configurations' names for the number of experts per token
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_num_active_experts")
# position tables may have a few more rows than positions
_SPARE_ROWS = 2
# what configurations and models raise for invalid values
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip


def read_shape(name: str, revision: str | None, *, scores: bool = False, trained: Collection[str] = ()) -> ModelShape:
    """Read the shape of a model folder or hub id. Raises like `read_model_config` and `make_shape`."""
    values = read_model_config(name, revision)
    return make_shape(values, origin=f"{name}/config.json", scores=scores, trained=trained)


def read_text_config(name: str, revision: str | None) -> Any:
    """Return transformers' configuration of the text part of a model whose shape was read."""
    values = read_model_config(name, revision)
    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values)).get_text_config()


def make_shape(
    values: Mapping[str, Any], *, origin: str = "config.json", scores: bool = False, trained: Collection[str] = ()
) -> ModelShape:
    """Return the shape of the model that a config.json describes, measured on its modules; with `scores`, of one that
    scores texts instead of writing. Parts that are `trained` (`Config.model.trained_parts`) count as the model's.

    Raises UsageError for a model type that transformers does not have, values that it rejects, and encoder-decoders.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UsageError(f"{origin}: model_type is {model_type!r}, which the installed transformers does not know")
    try:
        model = build_empty(values, origin, labels=ONE_SCORE if scores else None)
        return _shape_of(model, model.config.get_text_config(), trained)
    except _REFUSALS as error:
        raise UsageError(f"{origin}: transformers rejects it: {reason_of(error)}") from error


def build_empty(
    values: Mapping[str, Any], origin: str, *, labels: Sequence[str] | None = None, num_rows: int = 0
) -> PreTrainedModel:
    """Build the model of a config.json without weights, with at least `num_rows` tokens.

    It scores `labels`, or writes without any. Raises UsageError unless it can.
    """
    config = CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    if labels:
        use_scoring(config, None if labels == ONE_SCORE else labels, origin)
    elif is_scoring(config):
        raise UsageError(
            f"{origin}: a {config.architectures[0]} scores texts and does not write",
            [*(Fix({"objective": one}) for one in ("reward", "classify")), Fix({}, "choose the model it came from")],
        )
    if num_rows:
        text = config.get_text_config()
        text.vocab_size = max(num_rows, text.vocab_size)
    model = empty_model(config, {})
    if labels:
        score_module(model)
    return model


def _tower_shape(model: PreTrainedModel, unread: Set[str], num_trained: int) -> TowerShape | None:
    """Return the shape of the part that reads pictures: its first convolution, its layers and what projects patches."""
    parts = {name: module for name, module in model.named_modules() if f"{name}.weight" in unread}
    patch = next((part for part in parts.values() if isinstance(part, nn.Conv2d | nn.Conv3d)), None)
    linears = {name: part for name, part in parts.items() if isinstance(part, nn.Linear)}
    width = 0 if patch is None else patch.out_channels
    of_patches = [name for name, linear in linears.items() if linear.in_features == width]
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {name: layers for name, layers in lists.items() if any(path.startswith(f"{name}.") for path in of_patches)}
    if patch is None or not lists:
        return None
    path = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    inner = {linear for name, linear in linears.items() if name.startswith(f"{path}.")}
    in_layers, of_text = sum(linear.weight.numel() for linear in inner), set(text_decoder(model).modules())
    vision = getattr(model.config, "vision_config", None)
    full_blocks = getattr(vision, "fullatt_block_indexes", None) if getattr(vision, "window_size", None) else None
    num_full, size = len(lists[path]) if full_blocks is None else len(full_blocks), getattr(vision, "image_size", None)
    size = size[0] if isinstance(size, list | tuple) else size
    return TowerShape(
        patch_values=patch.weight[0].numel(),
        per_patch=in_layers + patch.weight.numel(),
        per_token=sum(linear.weight.numel() for linear in linears.values()) - in_layers,
        pair_width=2 * width * num_full,
        width=width,
        mlp_width=max(0, sum(linear.out_features for linear in inner) // len(lists[path]) - 5 * width),
        num_layers=len(lists[path]),
        rotates=any("Rotary" in type(module).__name__ for module in model.modules() if module not in of_text),
        feature_width=model.get_input_embeddings().weight.shape[1]
        * (1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())),
        projected_width=sum(outer.in_features + outer.out_features for outer in linears.values() if outer not in inner),
        num_trained=num_trained,
        image_patches=(size // patch.kernel_size[-1]) ** 2 if isinstance(size, int) else None,
    )


def _shape_of(model: PreTrainedModel, text: Any, trained: Collection[str]) -> ModelShape:
    decoder, path = layer_list(model)
    layers = decoder.get_submodule(path)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers_path = next(name for name, module in model.named_modules() if module is layers)
    tower_weights, unread = towers(model), towers(model, trained)
    num_tower_params = sum(parameter.numel() for parameter in unread.values())
    num_trained = sum(parameter.numel() for parameter in tower_weights.values()) - num_tower_params
    hidden_size = getattr(text, "hidden_size", None) or embedding.weight.shape[1]
    kinds = getattr(text, "layer_types", None) or ()
    kinds = kinds if len(kinds) == len(layers) else [None] * len(layers)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    max_positions: int | None = getattr(text, "max_position_embeddings", None)
    tables = [module.weight for module in decoder.modules() if isinstance(module, nn.Embedding)]
    tables = [table for table in (*tables, *decoder.buffers()) if table.ndim == 2 and table is not embedding.weight]
    experts_per_token = next((getattr(text, name) for name in _EXPERTS_PER_TOKEN if hasattr(text, name)), None) or 1
    configs = layer_configs(text)
    configs = configs if len(configs) == len(layers) else configs * len(layers)
    shapes, heads = [], [(0, 0)]
    for index, layer in enumerate(layers):
        attention = _softmax_attention(layer)
        first = next(iter(attention.values()), None)
        sizes = _Heads(0, 0, 0, 0) if first is None else _head_sizes(configs[index], first, index, hidden_size)
        heads.append((sizes.num_heads, sizes.head_dim))
        has_window = bool(attention and window and (kinds[index] is None or _WINDOWED.search(kinds[index])))
        shapes.append(_layer_shape(layer, hidden_size, experts_per_token, sizes, attention, has_window))
    return ModelShape(
        model_type=text.model_type,
        num_params=sum(parameter.numel() for parameter in model.parameters()) - num_tower_params,
        num_tower_params=num_tower_params,
        hidden_size=hidden_size,
        vocab_size=getattr(text, "vocab_size", None) or embedding.weight.shape[0],
        num_logits=num_logits(text),
        scores=is_scoring(model.config),
        num_heads=max(number for number, _ in heads),
        head_dim=max(size for _, size in heads),
        tied=head is None or head.weight is embedding.weight,
        sliding_window=window if any(layer.has_window for layer in shapes) else None,
        has_experts=any(expert_tensors(layer) for layer in layers),
        max_positions=max_positions,
        has_position_table=max_positions is not None
        and any(max_positions <= len(table) <= max_positions + _SPARE_ROWS for table in tables),
        layers_path=layers_path,
        layers=tuple(shapes),
        outer_linears=tuple(
            Linear(name, module.in_features, module.out_features, num_used=int(f"{name}.weight" not in tower_weights))
            for name, module in model.named_modules()
            if is_plain_linear(module) and module is not head and f"{name}.weight" not in unread
            if not name.startswith(f"{layers_path}.")
        ),
        groups_experts=bool(experts_modules(layers)),
        tower=_tower_shape(model, set(tower_weights), num_trained),
        embedding=next(name for name, module in model.named_modules() if module is embedding),
        head=next((name for name, module in model.named_modules() if head is not None and module is head), ""),
        modules=tuple(
            (name, num_elements)
            for name, module in model.named_modules()
            if (num_elements := sum(parameter.numel() for parameter in module.parameters(recurse=False)))
        ),
    )


class _Heads(NamedTuple):
    """Heads of one layer's attention, of its keys and values, and the widths of a query (or key) and of a value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int


def _softmax_attention(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a layer's self-attention modules by name, the outermost; text alone never reaches cross-attention."""
    modules: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        kind = type(module).__name__
        is_named = "Attention" in kind or re.search(r"(^|\.)(self_)?(attn|attention)(\.\d+)?$", name)
        is_container = kind.endswith("Layer") or isinstance(module, nn.ModuleList)
        is_attention = is_named and not is_container and not _RECURRENT.search(kind)
        is_cross = "cross" in name or "encoder_attn" in name
        if is_attention and not is_cross and not any(f"{name}.".startswith(f"{outer}.") for outer in modules):
            modules[name] = module
        if "" in modules:
            break
    return modules


def _head_sizes(config: Any, attention: nn.Module, index: int, hidden_size: int) -> _Heads:
    """Return one layer's heads by its config, else by its attention module, else as one head as wide as the model."""

    def size(key: str, default: int) -> int:
        value = next(
            (head_size for place in (config, attention) if (head_size := getattr(place, key, None)) is not None), None
        )
        value = value[index] if isinstance(value, list | tuple) else value
        return value if isinstance(value, int) and value > 0 else default

    num_heads = size("num_attention_heads", size("num_heads", 1))
    head_dim = size("head_dim", hidden_size // num_heads)
    value_head_dim = size("v_head_dim", head_dim)
    if hasattr(config, "qk_nope_head_dim"):
        # latent attention is counted expanded to full heads, as transformers trains it
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return _Heads(num_heads, size("num_key_value_heads", num_heads), head_dim, value_head_dim)


def _layer_shape(
    layer: nn.Module, hidden_size: int, experts_per_token: int, heads: _Heads, attention: Collection[str],
    has_window: bool,
) -> LayerShape:  # fmt: skip
    modules = dict(layer.named_modules())
    recurrent = [name for name, module in modules.items() if name and _RECURRENT.search(type(module).__name__)]
    outside_mlp = {*attention, *(name for name, module in modules.items() if "Attention" in type(module).__name__)}
    linears, active, mlp_elements, projected = [], 0, 0, 0
    for name, module in modules.items():
        if is_plain_linear(module):
            num_in, num_out = module.in_features, module.out_features
            linears.append(Linear(name, num_in, num_out))
        elif isinstance(module, Conv1D):
            num_in, num_out = module.weight.shape
        else:
            continue
        # up-projections save their output for backward, down-projections their input
        saved = (num_out if num_in == hidden_size else 0) + (num_in if num_out == hidden_size else 0)
        if any(name.startswith(f"{part}.") for part in recurrent):
            projected += saved
        elif not any(name.startswith(f"{part}.") for part in outside_mlp):
            mlp_elements += saved
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2 and not name.endswith("bias"):
            active += parameter.numel()
    for parameter in expert_tensors(layer):
        num_weights = experts_per_token * parameter[0].numel()
        active += num_weights
        mlp_elements += num_weights // hidden_size
    unsaved = 0
    if fused := [parameter[0].numel() for parameter in expert_tensors(layer)]:
        mlp_elements += experts_per_token * 2 * hidden_size
        # the down projection's input is computed again, and its input and output per expert are temporary
        unsaved = experts_per_token * (min(fused) // hidden_size + 2 * hidden_size)
    saved_by_mixers = _recurrent_elements([modules[name] for name in recurrent], projected)
    # normalized queries and keys are saved twice
    num_saved = 1 + any(name.rpartition(".")[2] in ("q_norm", "q_layernorm") for name in modules)
    head_elements = num_saved * heads.head_dim + heads.value_head_dim
    elements = (heads.num_heads + heads.num_kv_heads) * head_elements
    return LayerShape(
        linears=tuple(linears),
        num_active_weights=active,
        mixer_elements=len(attention) * elements + saved_by_mixers,
        mlp_elements=mlp_elements,
        pair_width=len(attention) * heads.num_heads * (heads.head_dim + heads.value_head_dim),
        has_window=has_window,
        key_width=len(attention) * heads.num_kv_heads * (heads.head_dim + heads.value_head_dim),
        unsaved_elements=unsaved,
        experts=tuple(_expert_linears(layer, experts_per_token)),
    )


def _expert_linears(layer: nn.Module, experts_per_token: int) -> Iterator[Linear]:
    """Yield the matrices of fused experts that can have adapters."""
    for name, (path, _, matrices) in expert_parameters(layer).items():
        num_experts, num_out, num_in = matrices.shape
        if layer.get_submodule(path).is_transposed:
            num_in, num_out = num_out, num_in
        yield Linear(name, num_in, num_out, num_experts, experts_per_token)


def _recurrent_elements(mixers: list[Any], projected: int) -> int:
    """Return what recurrent mixers save per token, beside `projected` elements of projections.

    The state that they keep per token is Mamba's matrix, or a row of each head's chunk.
    """
    state = 0
    for mixer in mixers:
        decay = getattr(mixer, "A_log", None)
        if decay is not None:
            state += decay.numel() * (1 if decay.ndim == 2 else getattr(mixer, "chunk_size", 1))
    return _RECURRENT_SHARE * projected + int(_STATE_SHARE * state)
