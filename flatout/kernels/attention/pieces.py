"""Packed causal attention of pieces of documents: the queries of a piece are the last tokens of its keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.attention.flash import Attention, attention_flops, empty_gradients, varlen_backward, varlen_forward
from flatout.kernels.operators import define_operator

_INPUTS = "Tensor q, Tensor k, Tensor v"
_REST = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt? left"


def padded_pieces_attention(
    form: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    **settings: Any,
) -> Tensor:
    """Compute attention of pieces by a form for whole documents: a piece's first keys get queries that are dropped.

    query (T, H, D), key (S, K, D), value (S, K, E); `cu_seqlens_q` and `cu_seqlens_k` int32 (D+1,) are the pieces'
    boundaries in queries and keys. Query i of a piece of n queries and m >= n keys attends to its first i + 1 + m - n
    keys. Returns (T, H, E). It costs as much attention as documents of all keys.
    """
    rows = torch.arange(len(query), device=query.device)
    pieces = torch.bucketize(rows, cu_seqlens_q[1:], right=True)
    rows = rows + (cu_seqlens_k[1:] - cu_seqlens_q[1:])[pieces]
    padded = query.new_zeros(len(key), *query.shape[1:]).index_copy(0, rows, query)
    return form(padded, key, value, cu_seqlens_k, **settings).index_select(0, rows)


@cache
def register_varlen_pieces() -> None:
    """Register torch's FlashAttention-2 for pieces as flatout::varlen_pieces and its backward, once per process.

    The operator takes q (T, H, D), k and v (S, K, D) in bf16 or fp16, which may be views, int32 boundaries, upper
    bounds on the queries and keys of a piece, scale, and how many tokens before its own a query attends to (None: all).
    It returns the output and its log-sum-exp, fp32 (H, T). flatout::varlen_pieces_backward takes the output's gradient,
    q, k, v, output, log-sum-exp and the other arguments, and returns the three gradients.
    """

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(tensor.contiguous() for tensor in varlen_forward(*arguments))

    def fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    def run_backward(output_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in varlen_backward(output_grad.contiguous(), *arguments))

    def num_flops(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *rest: Any, **_: Any) -> int:
        max_seqlen_q, max_seqlen_k, _scale, left = rest
        return attention_flops(q, max_seqlen_q, max_seqlen_k, left)

    def backward_flops(
        output_grad: Any, q: Any, k: Any, v: Any, output: Any, log_sums: Any, *rest: Any, **_: Any
    ) -> int:
        return num_flops(q, k, v, *rest) * 5 // 2

    define_operator("flatout::varlen_pieces", f"({_INPUTS}, {_REST}) -> (Tensor, Tensor)", run, fake, num_flops)
    schema = f"(Tensor output_grad, {_INPUTS}, Tensor output, Tensor log_sums, {_REST}) -> (Tensor, Tensor, Tensor)"
    define_operator("flatout::varlen_pieces_backward", schema, run_backward, empty_gradients, backward_flops)
