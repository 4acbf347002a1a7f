"""Tiny random models of every supported architecture, built from configs; the truth they are compared with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

VOCAB_SIZE = 300
_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": {},
    "gpt_neox": {},
    "smollm3": {},
    "qwen3_moe": _MOE,
}


def tiny_config(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**{**_BASE, **FAMILIES.get(family, {}), **changes})


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, attention: str = "eager", seed: int = 0, **changes: Any
) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = copy.deepcopy(tiny_config(family, **changes))
        options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype, **options)
    return model.eval()


def save_tiny_model(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    model = tiny_model(family, dtype, **changes)
    model.save_pretrained(folder)
    return model


def tiny_samples(lengths: list[int], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [(random.integers(3, VOCAB_SIZE, length), random.random(length) < 0.6) for length in lengths]


def truth_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' eager attention with its own masks, but the softmax in the inputs' dtype, not float32."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = (scores + attention_mask).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


def register_truth() -> None:
    AttentionInterface.register("truth", truth_attention)
    AttentionMaskInterface.register("truth", eager_mask)


class TableRotary(nn.Module):
    """Rotary values read from one table: float32 cosines then agree to the bit whatever the number of tokens."""

    def __init__(self, rotary: nn.Module, num_positions: int = 128) -> None:
        super().__init__()
        self.rotary, self.num_positions = rotary, num_positions

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(self.num_positions, device=position_ids.device)[None]
        cosine, sine = self.rotary(x, positions, *args)
        return cosine[0][position_ids], sine[0][position_ids]


def use_rotary_table(model: PreTrainedModel) -> PreTrainedModel:
    decoder = model.get_decoder()
    decoder.rotary_emb = TableRotary(decoder.rotary_emb)
    return model
