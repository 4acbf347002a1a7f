"""config.json of the Qwen3 shapes that the benchmarks train from random weights."""

from __future__ import annotations

from typing import Any

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "transformers_version": "5.17.0",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
}
# hidden size, intermediate size, layers, attention heads, tied embeddings
SIZES = {
    "tiny": (64, 128, 2, 16, True),
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
}


def qwen3_config(name: str) -> dict[str, Any]:
    """The config.json of one of SIZES."""
    hidden_size, intermediate_size, num_layers, num_heads, tied = SIZES[name]
    return {
        **COMMON,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "tie_word_embeddings": tied,
    }
