"""NF4 with double quantization, bit-equal to bitsandbytes: dequantize several weights into one tensor.

reference.py is the reference and runs everywhere; triton.py is its equivalent on CUDA. Weights whose row length is not
a multiple of 64 are dequantized by the reference on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.capability import has_triton
from flatout.kernels.fp8_matmul import has_fp8
from flatout.kernels.nf4 import reference
from flatout.kernels.nf4.reference import BLOCK, Nf4Weight, nf4_levels
from flatout.kernels.operators import define_operator

# Triton has no fp64 path that rounds level * absmax to fp32 first
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_levels_on = cache(nf4_levels)


def dequantize(
    weights: Sequence[Nf4Weight],
    num_rows: Sequence[int],
    num_columns: int,
    dtype: torch.dtype,
    *,
    scales: Sequence[Tensor] = (),
    transposed: bool = False,
    in_backward: bool = False,
) -> Tensor:
    """Return the dense weights concatenated, (sum of num_rows, num_columns) in `dtype`, transposed if `transposed`.

    The result is new, contiguous and not differentiable. `scales` are fp32 (rows,) for each weight, which its rows are
    divided by (see `reference.row_scale`). Traceable by torch.compile after `register_ops`. `in_backward` does not
    change the result: it keeps the compiler from merging equal calls in forward and backward, which would keep the
    dense weight in memory.
    """
    fields = [list(column) for column in zip(*weights, strict=True)]
    return torch.ops.flatout.nf4_dequantize(
        *fields, list(scales), list(num_rows), num_columns, dtype, transposed, in_backward
    )


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.nf4_dequantize; call before the first use of `dequantize`."""
    weights = ", ".join(f"Tensor[] {name}" for name in Nf4Weight._fields)
    rest = "Tensor[] scales, int[] num_rows, int num_columns, ScalarType dtype, bool transposed, bool in_backward"
    schema = f"({weights}, {rest}) -> Tensor"
    define_operator("flatout::nf4_dequantize", schema, _dequantize, _empty)


def _empty(packed: list[Tensor], *arguments: Any) -> Tensor:
    num_rows, num_columns, dtype, transposed, _ = arguments[-5:]
    shape = (num_columns, sum(num_rows)) if transposed else (sum(num_rows), num_columns)
    return packed[0].new_empty(shape, dtype=dtype)


def _dequantize(*arguments: Any) -> Tensor:
    *fields, scales, num_rows, num_columns, dtype, transposed, _ = arguments
    out = _empty(*arguments)
    has_kernel = (
        has_triton(out.device)
        and num_columns % BLOCK == 0
        and (has_fp8(out.device) if dtype == torch.float8_e4m3fn else dtype in _KERNEL_DTYPES)
    )
    parts = (out.t() if transposed else out).split(num_rows)
    weights = map(Nf4Weight, *fields)
    for weight, scale, rows in zip(weights, scales or [None] * len(num_rows), parts, strict=True):
        if has_kernel:
            # machines without a GPU have no Triton
            from flatout.kernels.nf4.triton import dequantize_into

            dequantize_into(weight, rows, _levels_on(rows.device), scale)
        else:
            rows.copy_(reference.dequantize(weight, len(rows), num_columns, dtype, scale))
    return out
