"""config.json of the model shapes that are measured, built from random weights."""

from __future__ import annotations

from typing import Any

_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
}


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = True, **other: Any
) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **other,
    }


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, *, head_dim: int, factor: float, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
    }


_QWEN3_30B_A3B = _qwen3(
    2048,
    6144,
    48,
    32,
    tied=False,
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    router_aux_loss_coef=0.001,
)

# Qwen3.5-4B's text model in its own class
_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
_TINY_HYBRID = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": _QWEN3_5["layer_types"][:4],
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(64, 128, 2, 4, num_key_value_heads=2, head_dim=32, vocab_size=1024, max_position_embeddings=4096),
    # for parity gates: as wide as 0.6b, and quick
    "qwen3-8-layers": _qwen3(1024, 3072, 8, 16),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-30b-a3b-12-layers": {**_QWEN3_30B_A3B, "num_hidden_layers": 12},
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, head_dim=128, factor=8.0, tied=False),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, factor=32.0, tied=True),
    # Llama 3.3's
    "llama-70b": _llama(8192, 28672, 80, 64, head_dim=128, factor=8.0, tied=False),
    "qwen3.5-4b": _QWEN3_5,
    "qwen3.5-tiny": {**_QWEN3_5, **_TINY_HYBRID},
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


def shape_config(name: str) -> dict[str, Any]:
    """The config.json of one of SHAPES. Special ids are those of the tokenizer that `bench.samples` writes."""
    return {**SHAPES[name], "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
