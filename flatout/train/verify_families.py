"""Tiny random models of five architectures, to verify a run's settings on shapes that its own model may not have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.data.store import TokenStore

_SHAPE: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # wide enough that attention looks somewhere
    "initializer_range": 0.2,
}
# what sets each apart: normalised queries and a tied head, none of it, soft caps and windows, a window, joined linears
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "phi3": {},
}


def write_family(folder: Path, family: str, store: TokenStore) -> Path:
    """Write the config.json of a tiny model that has room for the store's tokens; returns the folder."""
    from transformers import CONFIG_MAPPING

    sizes = {
        "vocab_size": -(-(store.meta.max_token_id + 1) // 8) * 8,
        "max_position_embeddings": 1 << int(store.lengths.max()).bit_length(),
    }
    CONFIG_MAPPING[family](**{**_SHAPE, **FAMILIES[family], **sizes}).save_pretrained(folder)
    return folder
