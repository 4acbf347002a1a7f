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
    *,
    num_parts: int,
) -> Tensor:
    """Return the outputs (T, D) of all ranks' experts for this rank's tokens `x` (T, D).

    `weights` (T, k) and `chosen` (T, k), ids of all N `num_experts` experts, are its slots. Every rank gathers the N T
    tokens, `compute(x, weights, ids)` returns what its own `num_experts` contribute to each (ids from `num_experts` on
    are of no expert here), and the sums over ranks return to the tokens' ranks. The backward pass does the reverse.

    An all-to-all would send a token only to the (1 - (1 - 1/N)^k) N ranks that it needs: 0.996 N for N = 2 and k = 8,
    0.90 N for N = 4. It needs counts on the host in every layer; this needs only that T is the same on all ranks.
    In two parts of the tokens (`num_parts`), the second is sent while the first is computed.
    """
    ids, weights = _GatherSlots.apply(chosen, weights, group)
    ids = ids - group.place * num_experts
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    middle = (x.shape[0] + 1) // 2
    spans = [slice(0, middle), slice(middle, None)] if num_parts == 2 and x.shape[0] > 1 else [slice(None)]
    sent = [_Start.apply(x[span], all_gather, group) for span in spans]
    outputs = []
    for span, part in zip(spans, sent, strict=True):
        tokens = _Finish.apply(*part, reduce_scatter, group)
        own = compute(tokens, weights[:, span].flatten(0, 1), ids[:, span].flatten(0, 1))
        outputs.append(_Start.apply(own, reduce_scatter, group))
    outputs = [_Finish.apply(*part, all_gather, group) for part in outputs]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Start(torch.autograd.Function):
    """Start a collective; return x, to which the gradient belongs, and the result. Both are for `_Finish` only.

    In the backward pass, wait for the gradient's collective, which `_Finish` has started. Whatever is between the two
    runs beside the collective, in both passes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, collective: Callable[[Tensor, RankGroup], Tensor], group: RankGroup
    ) -> tuple[Tensor, Tensor]:
        started = collective(x, group)
        ctx.mark_non_differentiable(started)
        return x.view_as(x), started

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return wait(grads[0]), None, None


class _Finish(torch.autograd.Function):
    """Wait for a started collective. In the backward pass, start its `reverse`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, started: Tensor, reverse: Callable[[Tensor, RankGroup], Tensor], group: RankGroup
    ) -> Tensor:
        ctx.reverse, ctx.group = reverse, group
        arrived = wait(started)
        # recomputation stops at the last saved tensor, which must not be before this wait
        ctx.save_for_backward(arrived.new_empty(0))
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.reverse(grads[0], ctx.group), None, None, None


class _GatherSlots(torch.autograd.Function):
    """Gather ids (T, k) and weights (T, k) of all ranks in one collective: (N, T, k) each."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weights: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        k, wide = ids.shape[1], torch.promote_types(weights.dtype, torch.float32)
        slots = torch.cat([ids.to(torch.int32), weights.to(wide).contiguous().view(torch.int32)], 1)
        gathered = wait(all_gather(slots, group)).view(group.size, *slots.shape)
        own = gathered[..., k:].contiguous().view(wide).to(weights.dtype)
        ids = gathered[..., :k].contiguous()
        ctx.mark_non_differentiable(ids)
        return ids, own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # a slot has a gradient on the rank of its expert alone, so the sum is exact
        return None, wait(reduce_scatter(grads[1].flatten(0, 1), ctx.group)), None
