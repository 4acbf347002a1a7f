"""Attention of a vision tower: the patches of a picture see each other, and none of another picture."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# transformers gives the boundaries of pictures to what has flash in its name; to others, each picture in a call
TOWER = "flatout_flash_tower"


def tower_attention(
    _: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Return the output (1, T, H, D) of query, key and value (1, H, T, D), a transformers attention function.

    `cu_seq_lens_q` (N+1,) are the boundaries of pictures, and `max_length_q` the most patches of one. On a CUDA GPU in
    16 bit by torch's FlashAttention-2, else one picture after another.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        ends = cu_seq_lens_q.int()
        output = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q, scale=scaling)
        assert isinstance(output, Tensor)
        return output[None], None
    sizes = cu_seq_lens_q.diff().tolist()
    pieces = zip(*(each.split(sizes, dim=2) for each in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def register_tower() -> None:
    """Register the function with transformers; safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(TOWER, tower_attention)
