"""Packed causal attention, one document at a time: works on every device and dtype, with one document's memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from flatout.kernels.attention.reference import document_mask, masked_attention


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention in plain torch, document by document, with all variants that models use.

    query (T, H, D), key (T, K, D), value (T, K, E), cu_seqlens int32 (D+1,); returns (T, H, E).
    """
    return torch.cat(
        [
            masked_attention(
                q, k, v, _causal_mask(q, window), scale=scale, softcap=softcap, sinks=sinks, dropout=dropout
            )
            for q, k, v in _documents(query, key, value, cu_seqlens)
        ]
    )


def sdpa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Call torch's scaled_dot_product_attention document by document; shapes as in `plain_attention`."""
    outputs = []
    for q, k, v in _documents(query, key, value, cu_seqlens):
        windowed = window is not None and window < len(q)
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=_causal_mask(q, window) if windowed else None,
            is_causal=not windowed,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    # reading the boundaries synchronizes with a GPU, where the varlen form is the fast one
    lengths = cu_seqlens.diff().tolist()
    return zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)


def _causal_mask(query: torch.Tensor, window: int | None) -> torch.Tensor:
    boundaries = torch.tensor([0, len(query)], device=query.device)
    return document_mask(boundaries, len(query), window)
