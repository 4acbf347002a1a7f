"""NF4 to dense in one launch: packed levels, 8-bit absmax and nested absmax in, bf16 or scaled float8 out."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flatout.kernels.nf4.reference import BLOCK, NESTED_BLOCK, Nf4Weight


@triton.jit
def _dequantize_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_map_ptr, offset_ptr, levels_ptr, scale_ptr, out_ptr, num_rows,
    blocks_per_row, row_stride, column_stride,
    IS_SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (rows < num_rows)[:, None] & (row_blocks < blocks_per_row)[None, :]
    blocks = rows[:, None] * blocks_per_row + row_blocks[None, :]
    codes = tl.load(absmax_ptr + blocks, mask=inside, other=0).to(tl.int32)
    nested = tl.load(nested_absmax_ptr + blocks // NESTED_BLOCK, mask=inside, other=0.0)
    # two roundings, as in bitsandbytes: the launch forbids fused multiply-add
    absmax = tl.load(nested_map_ptr + codes) * nested + tl.load(offset_ptr)
    if IS_SCALED:
        absmax = tl.div_rn(absmax, tl.load(scale_ptr + rows, mask=rows < num_rows, other=1.0)[:, None])
    offsets = blocks[:, :, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, None, :]
    pairs = tl.load(packed_ptr + offsets, mask=inside[:, :, None], other=0).to(tl.int32)
    first = tl.load(levels_ptr + (pairs >> 4)) * absmax[:, :, None]
    second = tl.load(levels_ptr + (pairs & 15)) * absmax[:, :, None]
    values = tl.reshape(tl.join(first, second), (ROWS, BLOCKS * BLOCK))
    columns = tl.program_id(0) * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
    targets = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    in_range = (rows < num_rows)[:, None] & (columns < blocks_per_row * BLOCK)[None, :]
    tl.store(out_ptr + targets, values.to(out_ptr.dtype.element_ty), mask=in_range)


def dequantize_into(weight: Nf4Weight, out: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Write the dense weight (divided by its row scale, fp32 (rows,), if given) into `out` (rows, columns).

    `out` may have any strides; columns is a multiple of 64, `levels` are the 16 NF4 levels. One launch; bitwise equal
    to the reference.
    """
    num_rows, num_columns = out.shape
    blocks_per_row = num_columns // BLOCK
    if out.stride(0) == 1:
        # rows are contiguous in memory, so use a tall tile to store whole cache lines
        tile_rows, tile_blocks, num_warps = 128, 1, 8
    elif scale is None and out.is_contiguous():
        # without row scales, treat the weight as one long row
        num_rows, blocks_per_row = 1, num_rows * blocks_per_row
        tile_rows, tile_blocks, num_warps = 1, 64, 4
    else:
        tile_rows, tile_blocks, num_warps = 8, 8, 4
    grid = (triton.cdiv(blocks_per_row, tile_blocks), triton.cdiv(num_rows, tile_rows))
    constants: dict[str, Any] = {"IS_SCALED": scale is not None, "ROWS": tile_rows, "BLOCKS": tile_blocks}
    _dequantize_kernel[grid](
        *weight, levels, weight.offset if scale is None else scale, out,
        num_rows, blocks_per_row, out.stride(0), out.stride(1),
        **constants, BLOCK=BLOCK, NESTED_BLOCK=NESTED_BLOCK, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
