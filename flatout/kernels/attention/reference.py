"""Packed causal attention in plain torch: the reference with the full mask, and forms by document for every device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.attention.shared_prefix import SharedPrefixes


def document_mask(cu_seqlens: Tensor, num_tokens: int, window: int | None = None) -> Tensor:
    """Return the mask, bool (T, T): row i attends to j <= i of its own document, with a window only if i - j < window.

    `cu_seqlens` int (D+1,) are the documents' boundaries.
    """
    rows = torch.arange(num_tokens, device=cu_seqlens.device)
    documents = torch.bucketize(rows, cu_seqlens[1:], right=True)
    mask = (documents[:, None] == documents[None, :]) & (rows[:, None] >= rows[None, :])
    return mask if window is None else mask & (rows[:, None] - rows[None, :] < window)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute masked softmax attention: softmax(softcap * tanh(scale * q k^T / softcap)) v, softmax in fp32 or fp64.

    query (T, H, D), key (S, K, D), value (S, K, E), K divides H (grouped heads, arXiv:2305.13245), mask bool (T, S).
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
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, window: int | None = None, **settings: Any
) -> Tensor:
    """Compute causal attention of packed documents with one (T, T) mask: the reference for every other form.

    cu_seqlens int32 (D+1,); other shapes and keywords as in `masked_attention`.
    """
    return masked_attention(query, key, value, document_mask(cu_seqlens, len(query), window), **settings)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int | None = None,
    shared: SharedPrefixes | None = None,
    **settings: Any,
) -> Tensor:
    """Compute `packed_attention` document by document, with the memory of one document's mask.

    With `shared`, a suffix attends to its prefix and itself, as in one document.
    """
    documents = _documents(query, key, value, cu_seqlens, shared)
    return torch.cat([masked_attention(q, k, v, _causal_mask(q, k, window), **settings) for q, k, v in documents])


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Call torch's scaled_dot_product_attention document by document; shapes and `shared` as in `plain_attention`."""
    outputs = []
    for q, k, v in _documents(query, key, value, cu_seqlens, shared):
        # `is_causal` aligns queries with the first keys: those of a suffix get the prefix's place before them
        before, value_size = len(k) - len(q), v.shape[-1]
        q = F.pad(q, (0, 0, 0, 0, before, 0)) if before else q
        windowed = window is not None and window < len(q)
        if sinks is not None:
            q, k, v = _with_sink_token(q, k, v, sinks / scale)
        mask = _causal_mask(q, k, window) if windowed else None
        if mask is not None and sinks is not None:
            mask[:, 0] = True
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=not windowed,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output[0].transpose(0, 1)[before + int(sinks is not None) :, :, :value_size])
    return torch.cat(outputs)


def _with_sink_token(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put a first token before a document, of value 0, whose key has the product sinks (H,) with every later query.

    Heads that share a key differ in their sinks: each of them reads its own of as many additional dimensions.
    """
    groups, key_heads = q.shape[1] // k.shape[1], k.shape[1]
    own = torch.eye(groups, dtype=q.dtype, device=q.device).repeat(key_heads, 1)
    q = F.pad(torch.cat([q, own.expand(len(q), -1, -1)], dim=-1), (0, 0, 0, 0, 1, 0))
    sink_key = F.pad(sinks.to(k.dtype).view(1, key_heads, groups), (k.shape[-1], 0))
    k = torch.cat([sink_key, F.pad(k, (0, groups))])
    return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1], 0, 0, 1, 0))


def _documents(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, shared: SharedPrefixes | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    # reading the boundaries synchronizes with a GPU, where the varlen form is the fast one
    lengths = cu_seqlens.diff().tolist()
    documents = list(zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True))
    num_prefixes, row, prefix = 0 if shared is None else int(shared.sizes[0]), 0, 0
    ends = [] if shared is None else shared.suffix_cu_seqlens[1 : num_prefixes + 1].tolist()
    for index, (q, k, v) in enumerate(documents):
        if index >= num_prefixes and prefix < num_prefixes:
            _, prefix_key, prefix_value = documents[prefix]
            k, v = torch.cat([prefix_key, k]), torch.cat([prefix_value, v])
            row += len(q)
            prefix += row == ends[prefix]
        yield q, k, v


def _causal_mask(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    columns = torch.arange(len(key), device=query.device)
    distance = columns[len(key) - len(query) :, None] - columns
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
