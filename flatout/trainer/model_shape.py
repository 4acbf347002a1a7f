"""A model's sizes, counted on the model that transformers builds from config.json, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from flatout.errors import UsageError, reason_of
from flatout.models.bases.frozen_linear import is_plain_linear
from flatout.models.blocks import layer_configs, layer_list
from flatout.models.experts.block import experts_modules
from flatout.models.load.quantized import empty_model
from flatout.models.load.source import read_model_config
from flatout.planner.shape import LayerShape, Linear, ModelShape

# layers whose attention has a window
_WINDOWED = {"sliding_attention", "chunked_attention"}
# configurations' names for the number of experts per token
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_num_active_experts")
# position tables may have a few more rows than positions
_SPARE_ROWS = 2
# what configurations and models raise for invalid values
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip


def read_shape(name: str, revision: str | None) -> ModelShape:
    """Read the shape of a model folder or hub id. Raises like `read_model_config` and `make_shape`."""
    return make_shape(read_model_config(name, revision), origin=f"{name}/config.json")


def read_text_config(name: str, revision: str | None) -> Any:
    """Return transformers' configuration of the text part of a model whose shape was read."""
    values = read_model_config(name, revision)
    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values)).get_text_config()


def make_shape(values: Mapping[str, Any], *, origin: str = "config.json") -> ModelShape:
    """Return the shape of the model that a config.json describes.

    Raises UsageError for a model type that transformers does not have, and values that it rejects.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UsageError(f"{origin}: model_type is {model_type!r}, which the installed transformers does not know")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(values))
        model = empty_model(config, {})
        text = config.get_text_config()
        return _shape_of(model, text)
    except _REFUSALS as error:
        raise UsageError(f"{origin}: transformers rejects it: {reason_of(error)}") from error


def _shape_of(model: PreTrainedModel, text: Any) -> ModelShape:
    decoder, path = layer_list(model)
    layers = decoder.get_submodule(path)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = {*decoder.parameters(), *(head.parameters() if head is not None else ())}
    # a model without attention counts one head
    num_heads, head_dim = _largest(text, "num_attention_heads", 1), _largest(text, "head_dim", 0)
    head_dim = head_dim or text.hidden_size // num_heads
    value_head_dim = _largest(text, "v_head_dim", head_dim)
    if hasattr(text, "qk_nope_head_dim"):
        # latent attention is counted expanded to full heads, as transformers trains it
        head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    num_window_layers = sum(kind in _WINDOWED for kind in kinds) if kinds else len(layers)
    max_positions: int | None = getattr(text, "max_position_embeddings", None)
    tables = [module.weight for module in decoder.modules() if isinstance(module, nn.Embedding)]
    tables = [table for table in (*tables, *decoder.buffers()) if table.ndim == 2 and table is not embedding.weight]
    experts_per_token = next((getattr(text, name) for name in _EXPERTS_PER_TOKEN if hasattr(text, name)), None) or 1
    return ModelShape(
        model_type=text.model_type,
        num_params=sum(parameter.numel() for parameter in parameters),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_heads=num_heads,
        num_kv_heads=_largest(text, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        qk_norm=any(name.rpartition(".")[2] in ("q_norm", "q_layernorm") for name, _ in layers[-1].named_modules()),
        tied=head is None or head.weight is embedding.weight,
        sliding_window=window if num_window_layers else None,
        num_window_layers=num_window_layers if window else 0,
        has_experts=any(parameter.ndim == 3 for parameter in layers.parameters()),
        max_positions=max_positions,
        has_position_table=max_positions is not None
        and any(max_positions <= len(table) <= max_positions + _SPARE_ROWS for table in tables),
        layers_path=next(name for name, module in model.named_modules() if module is layers),
        layers=tuple(_layer_shape(layer, text.hidden_size, experts_per_token) for layer in layers),
        groups_experts=bool(experts_modules(layers)),
    )


def _largest(text: Any, key: str, default: int | None = None) -> int:
    """Return a size of the text model, the largest over its layers. Raises AttributeError if it is missing."""
    found = [size for config in layer_configs(text) if (size := getattr(config, key, None)) is not None]
    if found or default is not None:
        return max(found, default=default)  # type: ignore[return-value]  # never None here
    raise AttributeError(f"{key} is missing")


def _layer_shape(layer: nn.Module, hidden_size: int, experts_per_token: int) -> LayerShape:
    attention = [name for name, module in layer.named_modules() if "Attention" in type(module).__name__ and name]
    linears, active, mlp_elements = [], 0, 0
    for name, module in layer.named_modules():
        if is_plain_linear(module):
            linears.append(Linear(name, module.in_features, module.out_features))
            if not any(name.startswith(f"{part}.") for part in attention):
                # up-projections save their output for backward, down-projections their input
                mlp_elements += module.out_features if module.in_features == hidden_size else 0
                mlp_elements += module.in_features if module.out_features == hidden_size else 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2 and not name.endswith("bias"):
            active += parameter.numel()
        elif parameter.ndim == 3:
            num_weights = experts_per_token * parameter[0].numel()
            active += num_weights
            mlp_elements += num_weights // hidden_size
    unsaved = 0
    if fused := [parameter[0].numel() for parameter in layer.parameters() if parameter.ndim == 3]:
        mlp_elements += experts_per_token * 2 * hidden_size
        # the down projection's input is computed again, and its input and output per expert are temporary
        unsaved = experts_per_token * (min(fused) // hidden_size + 2 * hidden_size)
    return LayerShape(tuple(linears), active, mlp_elements, unsaved)
