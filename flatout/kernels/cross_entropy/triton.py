"""The loss of a tile and its gradient in one kernel, which reads the logits twice, each row by one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _WARPS = 1024, 4
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def shaped_logits(values, scale, softcap, CAPPED: tl.constexpr):
    """Return values * scale in fp32, or softcap * tanh(values * scale / softcap) with a cap."""
    shaped = values.to(tl.float32) * scale
    if CAPPED:
        # without overflow, as the exponent is never positive
        decay = tl.exp(-2 * tl.abs(shaped / softcap))
        tanh = (1 - decay) / (1 + decay)
        shaped = tl.where(shaped < 0, -tanh, tanh) * softcap
    return shaped


@triton.jit
def _gradient(shaped, log_total, one, scale, softcap, CAPPED: tl.constexpr):
    """Return d loss / d logits of shaped logits; `one` is 1 for the target, else 0."""
    gradient = (tl.exp2(shaped * _LOG2_E - log_total * _LOG2_E) - one) * scale
    if CAPPED:
        ratio = shaped / softcap
        gradient *= 1 - ratio * ratio
    return gradient


@triton.jit
def _block(row, start, num_columns, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Return columns (COLUMNS / 8, 8) from `start` on, their mask and values; a thread holds 8 neighbors."""
    columns = start + tl.arange(0, COLUMNS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = columns < num_columns
    values = tl.load(row + columns, mask=mask, other=0.0) if MASKED else tl.load(row + columns)
    return columns, mask, values


@triton.jit
def _add_block(
    row, start, num_columns, target, largest, total, before, scale, softcap,
    CAPPED: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update each thread's largest logit, its sum of exponentials, and its largest logit before the target's."""
    columns, mask, values = _block(row, start, num_columns, COLUMNS, MASKED)
    shaped = shaped_logits(values, scale, softcap, CAPPED)
    if MASKED:
        shaped = tl.where(mask, shaped, float("-inf"))
    larger = tl.maximum(largest, tl.max(shaped, 1))
    total = total * tl.exp2((largest - larger) * _LOG2_E)
    total += tl.sum(tl.exp2(shaped * _LOG2_E - (larger * _LOG2_E)[:, None]), 1)
    if start + COLUMNS <= target:
        before = larger
    elif start <= target:
        before = tl.maximum(before, tl.max(tl.where(columns < target, shaped, float("-inf")), 1))
    return larger, total, before


@triton.jit
def _write_block(
    row, start, num_columns, log_total, entropy, scale, softcap,
    CAPPED: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Replace logits by their gradient, without the target's 1; return each thread's part of the entropy so far."""
    columns, mask, values = _block(row, start, num_columns, COLUMNS, MASKED)
    shaped = shaped_logits(values, scale, softcap, CAPPED)
    gradient = _gradient(shaped, log_total, 0.0, scale, softcap, CAPPED)
    if ENTROPY:
        surprise = log_total - shaped
        terms = tl.exp2(shaped * _LOG2_E - log_total * _LOG2_E) * surprise
        if MASKED:
            terms = tl.where(mask, terms, 0.0)
        # a logit of -inf adds nothing, not 0 * inf
        entropy += tl.sum(tl.where(surprise < float("inf"), terms, 0.0), 1)
    if MASKED:
        tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=mask)
    else:
        tl.store(row + columns, gradient.to(row.dtype.element_ty))
    return entropy


@triton.jit
def _row_terms(
    logits, targets, losses, correct, entropies, num_columns, scale, softcap,
    CAPPED: tl.constexpr, COLUMNS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    target, row = tl.load(targets + index), logits + index * num_columns
    is_row, target_place = target >= 0, row + tl.maximum(target, 0)
    own = shaped_logits(tl.load(target_place), scale, softcap, CAPPED)
    # finite, as the difference of two infinities is no number
    largest = tl.full((COLUMNS // 8,), -1e38, tl.float32)
    before, total = largest, tl.zeros((COLUMNS // 8,), tl.float32)
    num_whole = num_columns // COLUMNS * COLUMNS
    for start in range(0, num_whole, COLUMNS):
        largest, total, before = _add_block(
            row, start, num_columns, target, largest, total, before, scale, softcap, CAPPED, COLUMNS, False
        )
    if num_whole < num_columns:
        largest, total, before = _add_block(
            row, num_whole, num_columns, target, largest, total, before, scale, softcap, CAPPED, COLUMNS, True
        )
    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    entropy = tl.zeros((COLUMNS // 8,), tl.float32)
    for start in range(0, num_whole, COLUMNS):
        entropy = _write_block(
            row, start, num_columns, log_total, entropy, scale, softcap, CAPPED, COLUMNS, False, ENTROPY
        )
    if num_whole < num_columns:
        entropy = _write_block(
            row, num_whole, num_columns, log_total, entropy, scale, softcap, CAPPED, COLUMNS, True, ENTROPY
        )
    if ENTROPY:
        tl.store(entropies + index, tl.sum(entropy, 0))
    # the target's gradient replaces what another thread has written
    tl.debug_barrier()
    gradient = _gradient(own, log_total, 1.0, scale, softcap, CAPPED)
    tl.store(target_place, gradient.to(logits.dtype.element_ty), mask=is_row)
    tl.store(losses + index, tl.where(is_row, log_total - own, 0.0))
    # the first of equal logits counts as the largest
    tl.store(correct + index, (is_row & (own == top) & (tl.max(before, 0) < top)).to(tl.int64))


def tile_terms(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses (R,) fp32, which rows are correct (R,) int64, and d loss / d logits, which replaces the logits.

    The fourth value is the entropy of each row in nats, (R,) fp32; empty unless `with_entropy`.
    logits (R, V) in 16 bit, contiguous on CUDA, are the output of the head's GEMM, targets int64 (R,). All arithmetic
    is fp32. Rows with the target -1 have no loss and are not correct, but their gradient is not zero. The running
    maximum and sum are those of Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    num_rows, num_columns = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    entropies = losses.new_empty(num_rows if with_entropy else 0)
    with torch.cuda.device(logits.device):
        _row_terms[(num_rows,)](
            logits, targets, losses, correct, entropies, num_columns, scale, 1.0 if softcap is None else softcap,
            CAPPED=softcap is not None, COLUMNS=_COLUMNS, ENTROPY=with_entropy, num_warps=_WARPS,
        )  # fmt: skip
    return losses, correct, logits, entropies
