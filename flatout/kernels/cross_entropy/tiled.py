"""Cross-entropy of an output head by row tiles: one tile of logits at a time, gradients computed in the forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.capability import has_triton

# 2,048 rows run the GEMMs of a 150k vocabulary at full speed on an H200 and take 0.6 GB of 16-bit logits
DEFAULT_TILE_ROWS = 2048
# rows of fused tiles are multiples of this: each new size may load kernels, during which an H200 idles for 2 to 3 ms
ROWS_MULTIPLE = 128
# the target of a padding row
_NO_TARGET = -1


# losses, correct rows, gradients of logits and entropies of a tile; what nobody asked for is empty
_Terms: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def tile_terms(logits: Tensor, targets: Tensor, scale: float, softcap: float | None, *, with_entropy: bool) -> _Terms:
    """Call `triton.tile_terms`, which imports triton."""
    from flatout.kernels.cross_entropy import triton

    return triton.tile_terms(logits, targets, scale, softcap, with_entropy=with_entropy)


def row_entropies(logits: Tensor) -> Tensor:
    """Return the entropy (L,) in nats of the softmax of each row of `logits` (L, V), a few rows at a time."""
    logprobs = (rows.log_softmax(-1) for rows in logits.split(ROWS_MULTIPLE))
    # p log p is 0 where p is, of a token that cannot come
    return torch.cat([-(rows.exp() * rows.masked_fill(rows == -math.inf, 0.0)).sum(-1) for rows in logprobs])


def _plain_terms(
    product: Tensor, targets: Tensor, scale: float, softcap: float | None, *, with_entropy: bool, with_grad: bool
) -> _Terms:
    """Compute `tile_terms` in any dtype, without padding rows; without `with_grad` no gradients."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    slope = None
    if scale != 1.0:
        logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(softcap)
    nothing = product.new_empty(0)
    entropies = row_entropies(logits) if with_entropy else nothing
    picked = targets[:, None]
    top, likeliest = logits.max(-1, keepdim=True)
    own = logits.sub_(top).gather(-1, picked)
    # the sum without the target's part: near certainty, 1 - p and log p lose all digits when they come from p
    others = logits.exp_().scatter_(-1, picked, 0.0).sum(-1, keepdim=True)
    total, is_correct = others + own.exp(), likeliest == picked
    losses = others.log1p().where(is_correct, total.log() - own)
    if not with_grad:
        return losses.squeeze(-1), is_correct.squeeze(-1), nothing, entropies
    logit_grad = logits.scatter_(-1, picked, -others).div_(total)
    logit_grad = (logit_grad * slope if slope is not None else logit_grad).mul_(scale)
    return losses.squeeze(-1), is_correct.squeeze(-1), logit_grad.to(product.dtype), entropies


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A head and how its tiles are computed; `row_ids` and `row_values` replace rows of its weight."""

    scale: float
    softcap: float | None
    num_rows: int
    dtype: torch.dtype
    fused: bool
    with_grad: bool
    by_row: bool
    with_entropy: bool

    def weight(self, weight: Tensor, row_ids: Tensor | None, row_values: Tensor | None) -> Tensor:
        weight = weight.to(self.dtype)
        if row_ids is None or row_values is None:
            return weight
        return weight.index_copy(0, row_ids, row_values.to(self.dtype))

    def terms(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, with_grad: bool
    ) -> Iterator[tuple[slice, Tensor, _Terms]]:
        """Yield each tile's rows, its hidden states and its `tile_terms`; both padded if fused."""
        fused = self.fused and with_grad
        terms = partial(
            tile_terms if fused else partial(_plain_terms, with_grad=with_grad), with_entropy=self.with_entropy
        )
        for start in range(0, len(hidden), self.num_rows):
            rows = slice(start, start + self.num_rows)
            tile, tile_targets = hidden[rows].to(self.dtype), targets[rows]
            num_more = -len(tile) % ROWS_MULTIPLE
            if fused and num_more:
                # padding rows: no target, so no loss, and zero hidden states, which add nothing to weight gradients
                tile = F.pad(tile, (0, 0, 0, num_more))
                tile_targets = F.pad(tile_targets, (0, num_more), value=_NO_TARGET)
            # no name here holds the logits: 0.6 GB in bf16 with a 150k vocabulary
            yield rows, tile, terms(F.linear(tile, weight), tile_targets, self.scale, self.softcap)


class _TiledLoss(torch.autograd.Function):
    """Computes losses and their gradients in one pass over tiles, and scales the gradients afterwards.

    The gradient of hidden states is scaled row by row, so rows may have gradients of their own. That of a weight is a
    sum over rows: with `by_row` and a trained weight, the backward pass computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        row_ids: Tensor | None,
        row_values: Tensor | None,
        targets: Tensor,
        tiles: _Tiles,
    ) -> tuple[Tensor, ...]:
        sum_dtype = torch.promote_types(tiles.dtype, torch.float32)
        compute_weight = tiles.weight(weight, row_ids, row_values)
        trained = (ctx.needs_input_grad[1], row_ids is not None and ctx.needs_input_grad[3])
        needs_grad = tiles.with_grad and (ctx.needs_input_grad[0] or any(trained))
        hidden_grad = torch.empty_like(hidden) if needs_grad and ctx.needs_input_grad[0] else None
        weight_grad = rows_grad = None
        if needs_grad and not tiles.by_row:
            weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if trained[0] else None
            rows_grad = torch.zeros_like(row_values, dtype=sum_dtype) if trained[1] else None  # type: ignore[arg-type]
        losses = torch.empty(len(hidden) if tiles.by_row else 0, dtype=sum_dtype, device=hidden.device)
        is_correct = torch.empty(len(losses), dtype=torch.bool, device=hidden.device)
        entropies = losses.new_empty(len(hidden) if tiles.with_entropy else 0)
        loss_sum = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for rows, tile, (tile_losses, tile_correct, logit_grad, tile_entropies) in tiles.terms(
            hidden, compute_weight, targets, with_grad=needs_grad
        ):
            num_rows = len(targets[rows])
            if tiles.by_row:
                losses[rows], is_correct[rows] = tile_losses[:num_rows], tile_correct[:num_rows]
            else:
                loss_sum += tile_losses.sum()
                num_correct += tile_correct.sum()
            entropies[rows] = tile_entropies[:num_rows]
            if hidden_grad is not None:
                hidden_grad[rows] = (logit_grad @ compute_weight)[:num_rows]
            _add_weight_grads(weight_grad, rows_grad, row_ids, logit_grad, tile)
            # free before the next tile
            del logit_grad
        again = (hidden, weight, row_ids, row_values, targets) if needs_grad and tiles.by_row and any(trained) else ()
        ctx.save_for_backward(hidden_grad, weight_grad, rows_grad, *again)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if row_values is None else row_values.dtype)
        ctx.tiles, ctx.trained = tiles, trained
        outputs = (losses, is_correct, entropies) if tiles.by_row else (loss_sum, num_correct, entropies)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, rows_grad, *again = ctx.saved_tensors
        if again:
            weight_grad, rows_grad = _weight_grads(
                again, loss_grad, replace(ctx.tiles, with_entropy=False), *ctx.trained
            )
        factors = (loss_grad[:, None], 1, 1) if ctx.tiles.by_row else (loss_grad,) * 3
        hidden_grad, weight_grad, rows_grad = (
            None if grad is None else (grad * factor).to(dtype)
            for grad, factor, dtype in zip((hidden_grad, weight_grad, rows_grad), factors, ctx.dtypes, strict=True)
        )
        return hidden_grad, weight_grad, None, rows_grad, None, None


def _add_weight_grads(
    weight_grad: Tensor | None, rows_grad: Tensor | None, row_ids: Tensor | None, logit_grad: Tensor, tile: Tensor
) -> None:
    """Add a tile's part to the gradients of a weight and of the rows that replace some of it; None: not trained."""
    if weight_grad is not None:
        weight_grad += logit_grad.T @ tile
    if rows_grad is not None:
        rows_grad += logit_grad.index_select(1, row_ids).T @ tile  # type: ignore[arg-type]  # given


def _weight_grads(
    inputs: Sequence[Any], loss_grad: Tensor, tiles: _Tiles, trains_weight: bool, trains_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a weight and of the rows that replace some of it, for losses with gradients (L,)."""
    hidden, weight, row_ids, row_values, targets = inputs
    weight_grad = torch.zeros_like(weight, dtype=loss_grad.dtype) if trains_weight else None
    rows_grad = torch.zeros_like(row_values, dtype=loss_grad.dtype) if trains_rows else None
    compute_weight = tiles.weight(weight, row_ids, row_values)
    for rows, tile, (_, _, logit_grad, _) in tiles.terms(hidden, compute_weight, targets, with_grad=True):
        own = loss_grad[rows]
        scaled = (tile * F.pad(own, (0, len(tile) - len(own)))[:, None]).to(tile.dtype)
        _add_weight_grads(weight_grad, rows_grad, row_ids, logit_grad, scaled)
        del logit_grad
    return weight_grad, rows_grad


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tiles are fused and padded by default: in bf16 and fp16 on CUDA, with triton."""
    return dtype.itemsize == 2 and has_triton(device)


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    trained_rows: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    tile_rows: int = DEFAULT_TILE_ROWS,
    compute_dtype: torch.dtype | None = None,
    fused: bool | None = None,
    by_row: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross-entropy of an output head and the number of rows whose argmax is the target.

    hidden (L, D), weight (V, D), targets int64 (L,) in 0..V-1. Logits are u = scale * hidden @ weight.T, with a cap
    softcap * tanh(u / softcap), computed `tile_rows` rows at a time in `compute_dtype` (hidden's when None), summed in
    fp32 (fp64 when the compute is fp64).
    Returns the loss sum (0-d, with its graph; 0 without rows) and the count (0-d int64); with `by_row`, each row's loss
    (L,), with its graph, and whether its argmax is the target (L,). The third value is the entropy of each row's
    softmax (L,) in nats, without a graph; empty unless `with_entropy`. With a frozen head, forward and backward take
    two GEMMs in total. A trained weight's gradient is summed over tiles in fp32; by row, it takes two more GEMMs.
    `trained_rows` (ids int64 (n,), values (n, D)) replace rows of a frozen weight, and get a gradient. `fused` computes
    a tile's loss and gradient in one kernel (None: by `is_fused`). Method: one pass over tiles, as in Liger Kernel
    (arXiv:2410.10989, section 3.2).
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows is {tile_rows}; it must be at least 1")
    dtype = compute_dtype or hidden.dtype
    if fused is None:
        fused = is_fused(hidden.device, dtype)
    tiles = _Tiles(scale, softcap, tile_rows, dtype, fused, torch.is_grad_enabled(), by_row, with_entropy)
    return _TiledLoss.apply(hidden, weight, *(trained_rows or (None, None)), targets, tiles)
