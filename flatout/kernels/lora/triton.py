"""Gradients that pass through LoRA's B, by one pass over the outputs' gradients: two launches for all members."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# tl.dot needs at least this many columns
MIN_COLUMNS = 16
# shortest block of tokens and most waves of programs: they bound the partial sums of B's gradients
_MIN_BLOCK, _MAX_WAVES = 128, 4
# partial sums that a program adds at once: this many, of this many elements
_PARTS, _ELEMENTS = 8, 512


class Tile(NamedTuple):
    """What a program reads at once of dY, and how."""

    tokens: int
    columns: int
    num_warps: int
    num_stages: int


# by padded rank: as wide as shared memory allows, since each slice of columns writes partial sums for all tokens
TILES = {16: Tile(64, 512, 8, 3), 32: Tile(64, 512, 8, 2), 64: Tile(64, 512, 8, 2)}


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    values, firsts, own,
    MEMBERS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # of the last member whose part begins at `own` or before
    picked = values[0]
    for member in tl.static_range(1, MEMBERS):
        picked = tl.where(own >= firsts[member], values[member], picked)
    return picked


# Triton would compile a second kernel for numbers of tokens that are multiples of 16, in the middle of a run
@triton.jit(do_not_specialize=["num_tokens", "block_tokens"])  # type: ignore[untyped-decorator]
def _lora_gradients_kernel(  # type: ignore[no-untyped-def]
    grads, grad_strides, wides, ranks, num_columns, first_slices, low_columns, wide_starts, low_ptr, low_parts_ptr,
    wide_parts_ptr, num_tokens, block_tokens, num_slices, low_stride, max_rank, wide_size,
    MEMBERS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # neighbours read neighbouring columns of the same rows
    own, block = tl.program_id(0) % num_slices, tl.program_id(0) // num_slices
    rank = _pick(ranks, first_slices, own, MEMBERS)
    low_column = _pick(low_columns, first_slices, own, MEMBERS)
    # says that they are multiples, which allows asynchronous copies; Triton knows by itself only of multiples of 16
    rank, low_column = rank // ALIGNMENT * ALIGNMENT, low_column // ALIGNMENT * ALIGNMENT
    low_stride, max_rank = low_stride // ALIGNMENT * ALIGNMENT, max_rank // ALIGNMENT * ALIGNMENT
    columns = (own - _pick(first_slices, first_slices, own, MEMBERS)) * COLUMNS + tl.arange(0, COLUMNS)
    rank_range = tl.arange(0, RANK)
    is_column, is_rank = columns < _pick(num_columns, first_slices, own, MEMBERS), rank_range < rank
    is_wide = is_column[:, None] & is_rank[None, :]
    wide_offsets = columns[:, None] * rank + rank_range[None, :]
    wide = tl.load(_pick(wides, first_slices, own, MEMBERS) + wide_offsets, mask=is_wide, other=0.0)
    grad_ptrs = _pick(grads, first_slices, own, MEMBERS) + columns[None, :]
    grad_stride = _pick(grad_strides, first_slices, own, MEMBERS)
    low_ptrs = low_ptr + low_column + rank_range[None, :]
    low_parts_ptr += own.to(tl.int64) * num_tokens * max_rank
    total = tl.zeros((COLUMNS, RANK), tl.float32)
    start = block * block_tokens
    for first in range(start, tl.minimum(start + block_tokens, num_tokens), TOKENS):
        rows = first + tl.arange(0, TOKENS)
        is_row, rows = (rows < num_tokens)[:, None], rows.to(tl.int64)[:, None]
        grad = tl.load(grad_ptrs + rows * grad_stride, mask=is_row & is_column[None, :], other=0.0)
        low = tl.load(low_ptrs + rows * low_stride, mask=is_row & is_rank[None, :], other=0.0)
        total = tl.dot(tl.trans(grad), low, total)
        part = tl.dot(grad, wide)
        tl.store(low_parts_ptr + rows * max_rank + rank_range[None, :], part, mask=is_row & is_rank[None, :])
    wide_parts_ptr += block.to(tl.int64) * wide_size + _pick(wide_starts, first_slices, own, MEMBERS)
    tl.store(wide_parts_ptr + wide_offsets, total, mask=is_wide)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(  # type: ignore[no-untyped-def]
    ptrs, first, end, stride, is_inside,
    PARTS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    total = tl.zeros((ELEMENTS,), tl.float32)
    for start in range(first, end, PARTS):
        parts = start + tl.arange(0, PARTS)
        mask = (parts < end)[:, None] & is_inside[None, :]
        total += tl.sum(tl.load(ptrs[None, :] + parts.to(tl.int64)[:, None] * stride, mask=mask, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "low_programs"])  # type: ignore[untyped-decorator]
def _lora_sum_kernel(  # type: ignore[no-untyped-def]
    members, ranks, first_slices, end_slices, low_columns, low_parts_ptr, wide_parts_ptr, low_grad_ptr,
    wide_grads_ptr, num_tokens, num_blocks, wide_programs, low_programs, low_stride, max_rank, wide_size, scaling,
    MEMBERS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    if program < wide_programs:
        elements = program * ELEMENTS + tl.arange(0, ELEMENTS)
        is_inside = elements < wide_size
        total = _sum_parts(wide_parts_ptr + elements, 0, num_blocks, wide_size, is_inside, PARTS, ELEMENTS)
        tl.store(wide_grads_ptr + elements, (total * scaling).to(wide_grads_ptr.dtype.element_ty), mask=is_inside)
    else:
        program -= wide_programs
        own = program // low_programs
        elements = (program % low_programs) * ELEMENTS + tl.arange(0, ELEMENTS)
        rows, columns = elements // max_rank, elements % max_rank
        first, end = _pick(first_slices, members, own, MEMBERS), _pick(end_slices, members, own, MEMBERS)
        is_inside = (rows < num_tokens) & (columns < _pick(ranks, members, own, MEMBERS))
        stride = num_tokens * max_rank
        total = _sum_parts(low_parts_ptr + elements, first, end, stride, is_inside, PARTS, ELEMENTS)
        targets = low_grad_ptr + rows.to(tl.int64) * low_stride + _pick(low_columns, members, own, MEMBERS) + columns
        tl.store(targets, total.to(low_grad_ptr.dtype.element_ty), mask=is_inside)


def _ceil_div(total: int, size: int) -> int:
    return -(-total // size)


class _Layout(NamedTuple):
    """Where the members' parts begin, in slices of columns, columns of `low` and elements of B; their sums are last."""

    numbers: tuple[int, ...]
    slices: tuple[int, ...]
    low_columns: tuple[int, ...]
    wide_starts: tuple[int, ...]


@cache
def _layout(num_columns: tuple[int, ...], ranks: tuple[int, ...], tile_columns: int) -> _Layout:
    sizes = (
        [_ceil_div(columns, tile_columns) for columns in num_columns],
        ranks,
        [columns * rank for columns, rank in zip(num_columns, ranks, strict=True)],
    )
    return _Layout(tuple(range(len(ranks))), *(tuple(accumulate(size, initial=0)) for size in sizes))


@lru_cache(maxsize=4096)
def block_size(num_tokens: int, num_slices: int, num_processors: int, tile: Tile) -> int:
    """Return the tokens of a program, in whole tiles, that leave the fewest processors idle in the last wave."""

    def utilization(size: int) -> float:
        programs = num_slices * _ceil_div(max(1, num_tokens), size)
        return programs / (_ceil_div(programs, num_processors) * num_processors)

    # of two equal ones the longer, which has fewer partial sums
    sizes = []
    for wave in range(1, _MAX_WAVES + 1):
        num_blocks = max(1, wave * num_processors // num_slices)
        tokens = max(_MIN_BLOCK, _ceil_div(num_tokens, num_blocks))
        sizes.append(_ceil_div(tokens, tile.tokens) * tile.tokens)
    return max(sizes, key=utilization)


def adapter_gradients(
    grads: Sequence[Tensor],
    low: Tensor,
    wides: Sequence[Tensor],
    scaling: float,
    dtype: torch.dtype,
    *,
    num_processors: int,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `low` and those of all B in one tensor, flat one after another.

    As `reference.adapter_gradients`, summed in fp32, in 16 bits, ranks up to MAX_RANK. Each dY_i is read once. Partial
    sums, fp32, are added in a fixed order, so equal inputs have equal results to the bit on the same GPU.
    """
    grads = tuple(grad if grad.stride(1) == 1 else grad.contiguous() for grad in grads)
    wides = tuple(wide.contiguous() for wide in wides)
    low = low if low.stride(1) == 1 else low.contiguous()
    num_tokens, num_columns = low.shape[0], tuple(wide.shape[0] for wide in wides)
    ranks = tuple(wide.shape[1] for wide in wides)
    max_rank = max(ranks)
    padded = max(MIN_COLUMNS, triton.next_power_of_2(max_rank))
    tile = tile or TILES[padded]
    numbers, slices, low_columns, wide_starts = _layout(num_columns, ranks, tile.columns)
    num_slices, wide_size = slices[-1], wide_starts[-1]
    block_tokens = block_size(num_tokens, num_slices, num_processors, tile)
    num_blocks = max(1, _ceil_div(num_tokens, block_tokens))
    low_parts = low.new_empty(num_slices, num_tokens, max_rank, dtype=torch.float32)
    wide_parts = low.new_empty(num_blocks, wide_size, dtype=torch.float32)
    _lora_gradients_kernel[(num_blocks * num_slices,)](
        grads, tuple(grad.stride(0) for grad in grads), wides, ranks, num_columns, slices[:-1], low_columns[:-1],
        wide_starts[:-1], low, low_parts, wide_parts, num_tokens, block_tokens, num_slices, low.stride(0), max_rank,
        wide_size, MEMBERS=len(ranks), TOKENS=tile.tokens, COLUMNS=tile.columns, RANK=padded,
        ALIGNMENT=gcd(*ranks, low.stride(0)), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    low_grad, wide_grads = low.new_empty(low.shape), low.new_empty(wide_size, dtype=dtype)
    wide_programs, low_programs = _ceil_div(wide_size, _ELEMENTS), _ceil_div(num_tokens * max_rank, _ELEMENTS)
    _lora_sum_kernel[(wide_programs + low_programs * len(ranks),)](
        numbers, ranks, slices[:-1], slices[1:], low_columns[:-1], low_parts, wide_parts, low_grad, wide_grads,
        num_tokens, num_blocks, wide_programs, low_programs, low_columns[-1], max_rank, wide_size, scaling,
        MEMBERS=len(ranks), PARTS=_PARTS, ELEMENTS=_ELEMENTS, num_warps=4,
    )  # fmt: skip
    return low_grad, wide_grads
