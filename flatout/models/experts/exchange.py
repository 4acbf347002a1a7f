"""Tokens of several ranks for the experts of one: gathered before their products, summed and returned after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.models.collectives import RankGroup, all_gather, reduce_scatter, wait


def exchange(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    group: RankGroup,
    num_experts: int,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the outputs (T, D) of all ranks' experts for this rank's tokens `x` (T, D).

    `weights` (T, k) and `chosen` (T, k), ids of all N `num_experts` experts, are its slots. Every rank gathers the N T
    tokens, `compute(x, weights, ids)` returns what its own `num_experts` contribute to each (ids from `num_experts` on
    are of no expert here), and the sums over ranks return to the tokens' ranks. The backward pass does the reverse.

    T is the same on all ranks. An all-to-all would send 0.996 of this for N = 2 and k = 8, 0.90 for N = 4, and needs
    counts on the host in every layer. Computing half of the tokens while the others are sent is slower on two H200s
    (docs/lab/2026-11.md, 25th).
    """
    ids, weights = _GatherSlots.apply(chosen, weights, group)
    ids = ids - group.rank * num_experts
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    partial_outputs = compute(_Exchange.apply(x, group, True), weights.flatten(0, 1), ids.flatten(0, 1))
    return _Exchange.apply(partial_outputs, group, False)


class _Exchange(torch.autograd.Function):
    """Gather x (T, D) of all ranks, (N T, D), or sum it over ranks and keep this rank's (T, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return wait(all_gather(x, group) if gathers else reduce_scatter(x, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return wait(reduce_scatter(grads[0], ctx.group) if ctx.gathers else all_gather(grads[0], ctx.group)), None, None


class _GatherSlots(torch.autograd.Function):
    """Gather ids (T, k) and weights (T, k) of all ranks in one collective: (N, T, k) each."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weights: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        k, wide = ids.shape[1], torch.promote_types(weights.dtype, torch.float32)
        slots = torch.cat([ids.to(torch.int32), weights.to(wide).contiguous().view(torch.int32)], 1)
        gathered = wait(all_gather(slots, group)).view(group.size, *slots.shape)
        gathered_weights = gathered[..., k:].contiguous().view(wide).to(weights.dtype)
        ids = gathered[..., :k].contiguous()
        ctx.mark_non_differentiable(ids)
        return ids, gathered_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # a slot has a gradient on the rank of its expert alone, so the sum is exact
        return None, wait(reduce_scatter(grads[1].flatten(0, 1), ctx.group)), None
