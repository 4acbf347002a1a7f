"""Attention of a shard's queries to the keys and values of all ranks' shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels.attention.flash import Attention, add_sinks, sinks_gradient
from flatout.kernels.attention.pieces import padded_pieces_attention, register_varlen_pieces
from flatout.models.collectives import RankGroup, all_gather, reduce_scatter, wait
from flatout.models.packed import KeyPieces


def attention_over_ranks(form: Attention, group: RankGroup, *, is_varlen: bool) -> Attention:
    """Return `form` with a keyword `keys`: queries (T, H, D) of a shard attend to `keys` of all shards of the group.

    Every rank gathers keys and values (T, K, D) of all N ranks in each pass, and picks those of its pieces; in the
    backward pass their gradients are summed and return to their ranks. `is_varlen`: torch's FlashAttention-2 computes
    the pieces; any other form computes all of their documents. Without `keys` it is `form`.
    """
    if is_varlen:
        register_varlen_pieces()

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *max_seqlen: int, keys: KeyPieces | None = None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        if keys is None:
            return form(q, k, v, cu_seqlens, *max_seqlen, **settings)
        if is_varlen:
            window, sinks = settings.get("window"), settings.get("sinks")
            # the kernel's window excludes the row itself, transformers' includes it
            how = (max_seqlen[0], keys.max_seqlen, settings["scale"], None if window is None else window - 1)
            sinks = None if sinks is None else sinks.to(torch.promote_types(q.dtype, torch.float32))
            return _Varlen.apply(q, k, v, sinks, keys.rows, cu_seqlens, keys.cu_seqlens, group, *how)
        key, value = _Gather.apply(k, v, keys.rows, group)
        return padded_pieces_attention(form, q, key, value, cu_seqlens, keys.cu_seqlens, **settings)

    return attention


def _gather(k: Tensor, v: Tensor, rows: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Return the `rows` (S,) of all ranks' keys and values, (S, K, D) each, as views of one tensor."""
    both = torch.cat([k.flatten(1), v.flatten(1)], 1)
    picked = wait(all_gather(both, group)).index_select(0, rows)
    width = k.shape[1] * k.shape[2]
    return picked[:, :width].unflatten(1, k.shape[1:]), picked[:, width:].unflatten(1, v.shape[1:])


def _scatter(
    key_grad: Tensor, value_grad: Tensor, rows: Tensor, num_tokens: int, group: RankGroup
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's `num_tokens` keys and values, summed over pieces and ranks."""
    both = torch.cat([key_grad.flatten(1), value_grad.flatten(1)], 1)
    # at most two pieces of a shard have a key, so the order of additions does not matter
    total = both.new_zeros(group.size * num_tokens, both.shape[1]).index_add(0, rows, both)
    grad = wait(reduce_scatter(total, group))
    width = key_grad.shape[1] * key_grad.shape[2]
    return grad[:, :width].unflatten(1, key_grad.shape[1:]), grad[:, width:].unflatten(1, value_grad.shape[1:])


class _Gather(torch.autograd.Function):
    """`_gather`, whose backward is `_scatter`."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, rows: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.num_tokens, ctx.group = len(k), group
        return _gather(k, v, rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return (*_scatter(grads[0], grads[1], rows, ctx.num_tokens, ctx.group), None, None)


class _Varlen(torch.autograd.Function):
    """Attention by the varlen kernel, which keeps this rank's keys alone and gathers all again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rows: Tensor, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, *how: Any,
    ) -> Tensor:  # fmt: skip
        group, *settings = how
        output: Tensor
        operator = torch.ops.flatout.varlen_pieces
        output, log_sums = operator(q, *_gather(k, v, rows, group), cu_seqlens_q, cu_seqlens_k, *settings)
        if sinks is not None:
            log_sums = add_sinks(output, log_sums.T, sinks).T.contiguous()
        ctx.save_for_backward(q, k, v, sinks, rows, output, log_sums, cu_seqlens_q, cu_seqlens_k)
        ctx.group, ctx.settings = group, settings
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, rows, output, log_sums, *boundaries = ctx.saved_tensors
        key, value = _gather(k, v, rows, ctx.group)
        saved = (q, key, value, output, log_sums, *boundaries)
        q_grad, key_grad, value_grad = torch.ops.flatout.varlen_pieces_backward(output_grad, *saved, *ctx.settings)
        k_grad, v_grad = _scatter(key_grad, value_grad, rows, len(k), ctx.group)
        sinks_grad = sinks_gradient(output_grad, output, log_sums.T, sinks) if ctx.needs_input_grad[3] else None
        return (q_grad, k_grad, v_grad, sinks_grad, *[None] * 8)
