"""The loss of a tile and its gradient in one kernel, which reads the logits twice, each row by one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _WARPS = 8192, 8


@triton.jit  # type: ignore[untyped-decorator]
def _shaped(values, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return scaled and capped logits, and their derivative without the factor `scale`."""
    shaped = values.to(tl.float32) * scale
    slope = shaped * 0 + 1
    if CAPPED:
        # without overflow, as the exponent is never positive
        decay = tl.exp(-2 * tl.abs(shaped / softcap))
        tanh = (1 - decay) / (1 + decay)
        tanh = tl.where(shaped < 0, -tanh, tanh)
        shaped, slope = tanh * softcap, 1 - tanh * tanh
    return shaped, slope


@triton.jit  # type: ignore[untyped-decorator]
def _row_terms(  # type: ignore[no-untyped-def]
    logits, targets, losses, correct, num_columns, scale, softcap,
    CAPPED: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, within = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    target = tl.load(targets + row)
    logits += row * num_columns
    own, _own_slope = _shaped(tl.load(logits + tl.maximum(target, 0)), scale, softcap, CAPPED)
    largest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + within
        values = tl.load(logits + columns, mask=columns < num_columns, other=float("-inf"))
        first, _first_slope = _shaped(values, scale, softcap, CAPPED)
        shaped = tl.where(columns < num_columns, first, float("-inf"))
        larger = tl.maximum(largest, tl.max(shaped, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(shaped - larger), 0)
        largest = larger
    log_total, num_before = largest + tl.log(total), tl.zeros((), tl.int32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + within
        mask = columns < num_columns
        shaped, slope = _shaped(tl.load(logits + columns, mask=mask, other=0.0), scale, softcap, CAPPED)
        # the first of equal logits counts as the largest
        num_before += tl.sum((mask & (shaped == largest) & (columns < target)).to(tl.int32), 0)
        gradient = (tl.exp(shaped - log_total) - (columns == target).to(tl.float32)) * slope * scale
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=mask)
    is_row = target >= 0
    tl.store(losses + row, tl.where(is_row, log_total - own, 0.0))
    tl.store(correct + row, (is_row & (own == largest) & (num_before == 0)).to(tl.int64))


def tile_terms(logits: Tensor, targets: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss sum (0-d fp32), correct rows (0-d int64) and d loss / d logits, which replaces the logits.

    logits (R, V) in 16 bit, contiguous on CUDA, are the output of the head's GEMM, targets int64 (R,). All arithmetic
    is fp32. Rows with the target -1 count in no sum, but their gradient is not zero. The running maximum and sum are
    those of Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    num_rows, num_columns = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    with torch.cuda.device(logits.device):
        _row_terms[(num_rows,)](
            logits, targets, losses, correct, num_columns, scale, 1.0 if softcap is None else softcap,
            CAPPED=softcap is not None, COLUMNS=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    return losses.sum(), correct.sum(), logits
