"""Cross-entropy of an output head by row tiles: one tile of logits at a time, gradients computed in the forward."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# 2,048 rows run the GEMMs of a 150k vocabulary at full speed on an H200 and take 0.6 GB of 16-bit logits
DEFAULT_TILE_ROWS = 2048
# rows of fused tiles are multiples of this: each new size may load kernels, during which an H200 idles for 2 to 3 ms
ROWS_MULTIPLE = 128
# the target of a padding row
_NO_TARGET = -1


def tile_terms(logits: Tensor, targets: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Call `triton.tile_terms`, which imports triton."""
    from flatout.kernels.cross_entropy import triton

    return triton.tile_terms(logits, targets, scale, softcap)


def _plain_terms(
    product: Tensor, targets: Tensor, scale: float, softcap: float | None, *, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `tile_terms` in any dtype, without padding rows; without `with_grad` the third value is empty."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    slope = None
    if scale != 1.0:
        logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(softcap)
    log_total = logits.logsumexp(-1, keepdim=True)
    picked = targets[:, None]
    loss_sum = (log_total - logits.gather(-1, picked)).sum()
    num_correct = (logits.argmax(-1, keepdim=True) == picked).sum()
    if not with_grad:
        return loss_sum, num_correct, product.new_empty(0)
    logit_grad = logits.sub_(log_total).exp_()
    logit_grad.scatter_add_(-1, picked, torch.full_like(log_total, -1.0))
    logit_grad = (logit_grad * slope if slope is not None else logit_grad).mul_(scale)
    return loss_sum, num_correct, logit_grad.to(product.dtype)


class _TiledLoss(torch.autograd.Function):
    """Computes loss and gradient in one pass: the incoming gradient is a scalar, which can be applied afterwards."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        row_ids: Tensor | None,
        row_values: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        tile_rows: int,
        compute_dtype: torch.dtype,
        with_grad: bool,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        compute_weight = weight.to(compute_dtype)
        rows_grad = None
        if row_ids is not None and row_values is not None:
            compute_weight = compute_weight.index_copy(0, row_ids, row_values.to(compute_dtype))
            if with_grad and ctx.needs_input_grad[3]:
                rows_grad = torch.zeros_like(row_values, dtype=sum_dtype)
        hidden_grad = torch.empty_like(hidden) if with_grad and ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if with_grad and ctx.needs_input_grad[1] else None
        needs_grad = any(grad is not None for grad in (hidden_grad, weight_grad, rows_grad))
        fused = fused and needs_grad
        terms = tile_terms if fused else partial(_plain_terms, with_grad=needs_grad)
        for start in range(0, len(hidden), tile_rows):
            rows = slice(start, start + tile_rows)
            tile, tile_targets = hidden[rows].to(compute_dtype), targets[rows]
            num_rows = len(tile)
            num_more = -num_rows % ROWS_MULTIPLE
            if fused and num_more:
                # padding rows: no target, so no loss, and zero hidden states, which add nothing to weight gradients
                tile = F.pad(tile, (0, 0, 0, num_more))
                tile_targets = F.pad(tile_targets, (0, num_more), value=_NO_TARGET)
            logits = F.linear(tile, compute_weight)
            tile_loss, tile_correct, logit_grad = terms(logits, tile_targets, scale, softcap)
            loss_sum += tile_loss
            num_correct += tile_correct
            if hidden_grad is not None:
                hidden_grad[rows] = (logit_grad @ compute_weight)[:num_rows]
            if weight_grad is not None:
                weight_grad += logit_grad.T @ tile
            if rows_grad is not None:
                rows_grad += logit_grad.index_select(1, row_ids).T @ tile  # type: ignore[arg-type]  # given
            # free before the next tile: 0.6 GB in bf16 with a 150k vocabulary
            del logits, logit_grad
        ctx.save_for_backward(hidden_grad, weight_grad, rows_grad)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if row_values is None else row_values.dtype)
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        hidden_grad, weight_grad, rows_grad = (
            None if grad is None else (grad * loss_grad).to(dtype) for grad, dtype in grads
        )
        return hidden_grad, weight_grad, None, rows_grad, *(None,) * 7


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tiles are fused and padded by default: in bf16 and fp16 on CUDA, with triton."""
    return device.type == "cuda" and dtype.itemsize == 2 and find_spec("triton") is not None


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
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of an output head and the number of rows whose argmax is the target.

    hidden (L, D), weight (V, D), targets int64 (L,) in 0..V-1. Logits are as in `reference.product_loss`, computed
    `tile_rows` rows at a time in `compute_dtype` (hidden's when None), summed in fp32 (fp64 when the compute is fp64).
    Returns the loss sum (0-d, with its graph) and the count (0-d int64). The weight's gradient is only computed if it
    is trained, and is summed over tiles in fp32. With no rows, the result is 0 with a graph. With a frozen head,
    forward and backward take two GEMMs in total. `trained_rows` (ids int64 (n,), values (n, D)) replace rows of a
    frozen weight, and get a gradient. `fused` computes a tile's loss and gradient in one kernel (None:
    decided by `is_fused`). Method: loss and gradient in one pass over tiles, as in Liger Kernel
    (arXiv:2410.10989, section 3.2).
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows is {tile_rows}; it must be at least 1")
    dtype = compute_dtype or hidden.dtype
    if fused is None:
        fused = is_fused(hidden.device, dtype)
    loss_sum, num_correct = _TiledLoss.apply(
        hidden,
        weight,
        *(trained_rows or (None, None)),
        targets,
        scale,
        softcap,
        tile_rows,
        dtype,
        torch.is_grad_enabled(),
        fused,
    )
    return loss_sum, num_correct
