"""torch's FlashAttention-2 (arXiv:2307.08691) of packed documents; queries and keys have boundaries of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    scale: float, left: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (T, H, D) and its log-sum-exp, fp32 (H, T), of q (T, H, D), k and v (S, K, D) in bf16 or fp16.

    `cu_seqlens_q` and `cu_seqlens_k` int32 (N+1,) are the documents' boundaries in queries and keys, and the next two
    upper bounds on their lengths. The last query of a document attends to all of its keys and each earlier one to one
    key less, of which `left` before the last (None: all).
    """
    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *documents, 0.0, left is None, False, **_settings(scale, left)
    )
    return output, log_sums


def varlen_backward(
    output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float, left: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k and v; the arguments are those of `varlen_forward`, and what it returned."""
    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    # the random state is for dropout, which is off
    random_state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
        output_grad, q, k, v, output, log_sums, *documents, 0.0, left is None, random_state, unused,
        **_settings(scale, left),
    )  # fmt: skip
    return gradients


def _settings(scale: float, left: int | None) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": -1 if left is None else left, "window_size_right": 0}
