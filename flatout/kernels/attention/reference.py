"""Packed causal attention in plain torch with the full mask: the reference for every other form."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def document_mask(cu_seqlens: torch.Tensor, num_tokens: int, window: int | None = None) -> torch.Tensor:
    """Return the attention mask: bool (T, T), True where row i attends to column j.

    `cu_seqlens` int (D+1,) are the documents' boundaries. i attends to j of its own document with j <= i and, with a
    sliding window, i - j < window.
    """
    rows = torch.arange(num_tokens, device=cu_seqlens.device)
    documents = torch.bucketize(rows, cu_seqlens[1:], right=True)
    mask = (documents[:, None] == documents[None, :]) & (rows[:, None] >= rows[None, :])
    return mask if window is None else mask & (rows[:, None] - rows[None, :] < window)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute masked softmax attention: softmax(softcap * tanh(scale * q k^T / softcap)) v, softmax in fp32 or fp64.

    query (T, H, D), key (T, K, D), value (T, K, E), K divides H (grouped heads, arXiv:2305.13245), mask bool (T, T).
    `sinks` (H,) add one logit per head that takes probability but has no value (gpt-oss). Returns (T, H, E).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1).transpose(0, 1) for tensor in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    weights = F.dropout(weights.to(value.dtype), dropout)
    return (weights @ value).transpose(0, 1)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of packed documents with one (T, T) mask; shapes as in `masked_attention`."""
    mask = document_mask(cu_seqlens, len(query), window)
    return masked_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
