"""Grouped matrix products over experts: rows are gathered by the kernel, nothing waits for the host."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flatout.kernels.moe.reference import TILE_ROWS, Routing

# tl.dot needs at least this many columns
MIN_COLUMNS = 16
# (columns of a tile, depth of a step, warps, pipeline stages), measured on H200 for products of 16-bit values
_WIDE, _NARROW, _WIDE_FP8 = (256, 64, 8, 4), (None, 128, 4, 3), (256, 128, 8, 3)


@triton.jit
def _product_kernel(
    x_ptr, weight, out_ptr, row_scale_ptr, column_scale_ptr, low_ptr, low_weight_ptr, order_ptr, offsets_ptr,
    tile_starts_ptr, tile_experts_ptr, num_experts, num_columns, depth, slots_per_row, rank, x_stride,
    low_weight_stride_n, low_weight_stride_r,
    GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, ROW_SCALE: tl.constexpr, COLUMN_SCALE: tl.constexpr,
    RANK: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    tile, column_tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if tile < tl.load(tile_starts_ptr + num_experts):
        expert = tl.load(tile_experts_ptr + tile)
        end = tl.load(offsets_ptr + expert + 1)
        first = tl.load(offsets_ptr + expert) + (tile - tl.load(tile_starts_ptr + expert)) * ROWS
        rows = first + tl.arange(0, ROWS)
        is_row = rows < end
        # rows past the expert's end read its first row, and are not stored
        rows = tl.where(is_row, rows, first)
        sources = tl.load(order_ptr + rows) // slots_per_row if GATHER else rows
        steps = tl.arange(0, DEPTH)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        x_ptrs = x_ptr + sources.to(tl.int64)[:, None] * x_stride + steps[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            x = tl.load(x_ptrs) if EVEN else tl.load(x_ptrs, mask=(start + steps < depth)[None, :], other=0.0)
            if TRANSPOSED:
                w = weight.load([expert * depth + start, column_tile * COLUMNS])
            else:
                w = weight.load([expert * num_columns + column_tile * COLUMNS, start]).T
            total = tl.dot(x, w, total)
            x_ptrs += DEPTH
        is_column = columns < num_columns
        own_columns = expert.to(tl.int64) * num_columns + columns
        if ROW_SCALE:
            total *= tl.load(row_scale_ptr + sources)[:, None]
        if COLUMN_SCALE:
            total *= tl.load(column_scale_ptr + own_columns, mask=is_column, other=0.0)[None, :]
        if RANK > 0:
            ranks = tl.arange(0, RANK)
            low = tl.load(
                low_ptr + rows.to(tl.int64)[:, None] * rank + ranks[None, :], mask=(ranks < rank)[None, :], other=0.0
            )
            low_weight_ptrs = low_weight_ptr + expert.to(tl.int64) * num_columns * rank
            low_weight_ptrs += ranks[:, None] * low_weight_stride_r + columns[None, :] * low_weight_stride_n
            low_weight = tl.load(low_weight_ptrs, mask=(ranks < rank)[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(low, low_weight, total)
        targets = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(targets, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _outer_kernel(
    wide_ptr, narrow_ptr, out_ptr, order_ptr, offsets_ptr, num_columns, slots_per_row, rank, wide_stride,
    narrow_stride, out_stride_n, out_stride_r,
    GATHER: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANK)
    is_column = columns < num_columns
    total = tl.zeros((COLUMNS, RANK), tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows < end
        sources = tl.load(order_ptr + rows, mask=is_row, other=0) // slots_per_row if GATHER else rows
        wide_ptrs = wide_ptr + sources.to(tl.int64)[:, None] * wide_stride + columns[None, :]
        wide = tl.load(wide_ptrs, mask=is_row[:, None] & is_column[None, :], other=0.0)
        narrow_ptrs = narrow_ptr + rows.to(tl.int64)[:, None] * narrow_stride + ranks[None, :]
        narrow = tl.load(narrow_ptrs, mask=is_row[:, None] & (ranks < rank)[None, :], other=0.0)
        total = tl.dot(tl.trans(wide), narrow, total)
    targets = out_ptr + expert.to(tl.int64) * num_columns * rank
    targets += columns[:, None] * out_stride_n + ranks[None, :] * out_stride_r
    tl.store(targets, total.to(out_ptr.dtype.element_ty), mask=is_column[:, None] & (ranks < rank)[None, :])


@triton.jit
def _tiles_kernel(
    offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    starts = tl.load(offsets_ptr + experts, mask=is_expert, other=0)
    ends = tl.load(offsets_ptr + experts + 1, mask=is_expert, other=0)
    num_tiles = (ends - starts + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(num_tiles, 0)
    own = tl.program_id(0)
    first = tl.sum(tl.where(experts < own, num_tiles, 0), 0)
    count = tl.sum(tl.where(experts == own, num_tiles, 0), 0)
    tl.store(tile_starts_ptr + own, first)
    if own == 0:
        tl.store(tile_starts_ptr + num_experts, tl.max(tile_ends, 0))
    for tile in range(first, first + count):
        tl.store(tile_experts_ptr + tile, own)


def make_tiles(offsets: Tensor, num_rows: int) -> Tensor:
    """Return the tiles of `num_rows` sorted rows, int32: each expert's first tile, their number, each tile's expert.

    `offsets` int32 (E + 1,) are the experts' first rows. An expert without rows has no tile.
    """
    num_experts = len(offsets) - 1
    tiles = offsets.new_empty(num_experts + 1 + num_rows // TILE_ROWS + num_experts)
    _tiles_kernel[(num_experts,)](
        offsets, tiles, tiles[num_experts + 1 :], num_experts,
        ROWS=TILE_ROWS, EXPERTS=triton.next_power_of_2(num_experts),
    )  # fmt: skip
    return tiles


def fits_product(x: Tensor, weight: Tensor) -> bool:
    """Whether `grouped_product` takes these: 16 bits or fewer, weights contiguous or transposed, rows of 16 n bytes."""
    straight = weight if weight.stride(2) == 1 else weight.transpose(1, 2)
    return (
        x.is_cuda
        and x.dtype == weight.dtype
        and x.element_size() <= 2
        and x.stride(-1) == 1
        and straight.is_contiguous()
        and straight.shape[2] * straight.element_size() % 16 == 0
        and straight.data_ptr() % 16 == 0
    )


def grouped_product(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x_i W_e^T + low_i V_e^T for each sorted row i of expert e, (S, N), summed in fp32; see `fits_product`.

    As `reference.grouped_linear`, without `scatter`. Rows after the last expert's are not written. With float8 `x`
    and `weight`, which must not be a transposed view, `row_scale` fp32 (rows of x,) and `column_scale` fp32 (E, N)
    multiply the first product, and the result has `dtype`.
    """
    num_experts, num_columns, depth = weight.shape
    transposed = weight.stride(2) != 1
    straight = weight.transpose(1, 2) if transposed else weight
    out = x.new_empty(len(routing.order), num_columns, dtype=dtype)
    wide = _WIDE_FP8 if x.element_size() == 1 else _WIDE
    columns, step, num_warps, num_stages = wide if num_columns >= 128 else _NARROW
    columns = columns or max(MIN_COLUMNS, triton.next_power_of_2(num_columns))
    block = [step, columns] if transposed else [columns, step]
    rank = 0 if low is None else low.shape[1]
    strides = (0, 0) if low_weight is None else (low_weight.stride(1), low_weight.stride(2))
    # an unused pointer must point somewhere
    options = (routing.order if option is None else option for option in (row_scale, column_scale, low, low_weight))
    constants: dict[str, Any] = {
        "GATHER": gather,
        "TRANSPOSED": transposed,
        "ROW_SCALE": row_scale is not None,
        "COLUMN_SCALE": column_scale is not None,
        "RANK": max(MIN_COLUMNS, triton.next_power_of_2(rank)) if rank else 0,
        "EVEN": depth % step == 0,
        "TILES": triton.cdiv(num_columns, columns),
    }
    max_tiles = len(routing.tiles) - num_experts - 1
    _product_kernel[(max_tiles * constants["TILES"],)](
        x, TensorDescriptor.from_tensor(straight.reshape(-1, straight.shape[2]), block), out, *options,
        routing.order, routing.offsets, routing.tiles, routing.tiles[num_experts + 1 :],
        num_experts, num_columns, depth, len(routing.order) // len(x), rank, x.stride(0), *strides,
        **constants, ROWS=TILE_ROWS, COLUMNS=columns, DEPTH=step, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def narrow_outer(wide: Tensor, narrow: Tensor, routing: Routing, *, gather: bool, transposed: bool) -> Tensor:
    """Return each expert's sum of wide_i^T narrow_i: (E, N, r), or (E, r, N) if `transposed`; 0 without rows.

    `wide` (S, N) is sorted, or with `gather` has one row per token; `narrow` (S, r) is sorted, r at most MAX_NARROW.
    """
    num_experts, num_columns, rank = len(routing.offsets) - 1, wide.shape[1], narrow.shape[1]
    shape = (num_experts, rank, num_columns) if transposed else (num_experts, num_columns, rank)
    out = wide.new_empty(shape)
    strides = (1, num_columns) if transposed else (rank, 1)
    columns = 128
    _outer_kernel[(triton.cdiv(num_columns, columns), num_experts)](
        wide, narrow, out, routing.order, routing.offsets, num_columns, len(routing.order) // len(wide), rank,
        wide.stride(0), narrow.stride(0), *strides,
        GATHER=gather, RANK=max(MIN_COLUMNS, triton.next_power_of_2(rank)), ROWS=64, COLUMNS=columns,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
