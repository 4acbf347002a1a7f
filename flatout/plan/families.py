"""One row an architecture: where its layers differ from Llama's in parameters, names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of one `model_type`. A bias is True, False or the name of the config key that says so.

    `attention` names the projections (query, key, value, output) or, fused, (qkv, output); `mlp` names
    (gate, up, down), fused (gate_up, down), or without a gate (up, down). `full_every` = k: without `layer_types` every
    k-th layer has full attention and the others the sliding window; 0: a window, where there is one, holds for all.
    `defaults` are values that transformers fills in when config.json leaves the key out.
    """

    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    attention_module: str = "self_attn"
    layers_path: str = "model.layers"
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    expert_bias: bool = False
    head_bias: bool = False
    num_layer_norms: int = 2
    norm_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    attention_sinks: bool = False
    shared_expert_gate: bool = False
    full_every: int = 0
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


_TIED = {"tie_word_embeddings": True}
_CLASSIC = Family(gated=False, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True)
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "mistral": Family(qkv_bias=False, out_bias=False),
        "ministral3": Family(qkv_bias=False, out_bias=False),
        "granite": Family(),
        "smollm3": Family(defaults={**_TIED, "use_sliding_window": False}),
        "qwen2": Family(qkv_bias=True, out_bias=False, defaults={"use_sliding_window": False}),
        "qwen3": Family(qk_norm="head", defaults={"use_sliding_window": False}),
        "gemma": Family(defaults={**_TIED, "head_dim": 256}),
        "gemma2": Family(num_layer_norms=4, full_every=2, defaults={**_TIED, "head_dim": 256, "sliding_window": 4096}),
        "gemma3_text": Family(
            num_layer_norms=4, qk_norm="head", full_every=6, defaults={**_TIED, **_GEMMA3, "sliding_window": 4096}
        ),
        "phi3": Family(("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj"), qkv_bias=False, out_bias=False),
        "phi": replace(
            _CLASSIC,
            attention=("q_proj", "k_proj", "v_proj", "dense"),
            mlp=("fc1", "fc2"),
            head_bias=True,
            num_layer_norms=1,
        ),
        "gpt_neox": replace(
            _CLASSIC,
            attention=("query_key_value", "dense"),
            mlp=("dense_h_to_4h", "dense_4h_to_h"),
            attention_module="attention",
            layers_path="gpt_neox.layers",
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            defaults={"attention_bias": True},
        ),
        "starcoder2": replace(
            _CLASSIC,
            mlp=("c_fc", "c_proj"),
            qkv_bias="use_bias",
            out_bias="use_bias",
            mlp_bias="use_bias",
            defaults={**_TIED, "use_bias": True},
        ),
        "olmo2": Family(qk_norm="full"),
        "olmo3": Family(qk_norm="full", full_every=4, defaults={"sliding_window": 4096}),
        "cohere2": Family(num_layer_norms=1, full_every=4, defaults={**_TIED, "sliding_window": 4096}),
        "mixtral": Family(qkv_bias=False, out_bias=False),
        "olmoe": Family(qk_norm="full"),
        "qwen2_moe": Family(
            qkv_bias=True, out_bias=False, shared_expert_gate=True, defaults={"use_sliding_window": False}
        ),
        "qwen3_moe": Family(qk_norm="head", defaults={"use_sliding_window": False}),
        "deepseek_v3": Family(),
        "gpt_oss": Family(
            expert_bias=True, attention_sinks=True, full_every=2, defaults={"attention_bias": True}
        ),
    }
)  # fmt: skip

_OTHER = Family()


def family_named(model_type: str) -> Family:
    """The family of transformers' model_type; one that is not known counts as the defaults say."""
    return FAMILIES.get(model_type, _OTHER)
