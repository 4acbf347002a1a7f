"""NF4 with double quantization, bit-equal to bitsandbytes: quantize, and dequantize several weights into one tensor.

reference.py is the reference and runs everywhere; triton.py is its equivalent on CUDA. Weights whose row length is not
a multiple of 64 are dequantized by the reference on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from flatout.kernels.fp8 import has_fp8
from flatout.kernels.nf4 import reference
from flatout.kernels.nf4.reference import BLOCK, NESTED_BLOCK, Nf4Weight, dynamic_map, nf4_levels, quantize, row_scale

__all__ = [
    "BLOCK", "NESTED_BLOCK", "Nf4Weight", "dequantize", "dequantize_fp8", "dynamic_map", "nf4_levels", "quantize",
    "register_ops", "row_scale",
]  # fmt: skip

_WEIGHTS = "Tensor[] packed, Tensor[] absmax, Tensor[] nested_absmax, Tensor[] nested_map, Tensor[] offset"
_FIELDS = len(Nf4Weight._fields)


def dequantize(
    weights: Sequence[Nf4Weight],
    num_rows: Sequence[int],
    num_columns: int,
    dtype: torch.dtype,
    *,
    in_backward: bool = False,
) -> torch.Tensor:
    """Return the dense weights concatenated, (sum of num_rows, num_columns) in `dtype`; new and not differentiable.

    Traceable by torch.compile after `register_ops`. `in_backward` does not change the result: it keeps the compiler
    from merging equal calls in forward and backward, which would keep the dense weight in memory.
    """
    result: torch.Tensor = torch.ops.flatout.nf4_dequantize(
        *_columns(weights), list(num_rows), num_columns, dtype, in_backward
    )
    return result


def dequantize_fp8(
    weights: Sequence[Nf4Weight],
    scales: Sequence[torch.Tensor],
    num_rows: Sequence[int],
    num_columns: int,
    *,
    transposed: bool = False,
    in_backward: bool = False,
) -> torch.Tensor:
    """Return the weights divided by their row scales (fp32 (rows,), see `row_scale`) in float8_e4m3fn, concatenated.

    Returns a new contiguous tensor (sum of num_rows, num_columns), or (num_columns, sum of num_rows) if `transposed`.
    `in_backward` as in `dequantize`.
    """
    result: torch.Tensor = torch.ops.flatout.nf4_dequantize_fp8(
        *_columns(weights), list(scales), list(num_rows), num_columns, transposed, in_backward
    )
    return result


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.nf4_dequantize and nf4_dequantize_fp8; call before the first use."""
    shape = "int[] num_rows, int num_columns"
    schema = f"({_WEIGHTS}, {shape}, ScalarType dtype, bool in_backward) -> Tensor"
    dense = torch.library.custom_op("flatout::nf4_dequantize", _dequantize, mutates_args=(), schema=schema)
    dense.register_fake(_empty_dense)
    schema = f"({_WEIGHTS}, Tensor[] scales, {shape}, bool transposed, bool in_backward) -> Tensor"
    fp8 = torch.library.custom_op("flatout::nf4_dequantize_fp8", _dequantize_fp8, mutates_args=(), schema=schema)
    fp8.register_fake(_empty_fp8)


def _columns(weights: Sequence[Nf4Weight]) -> list[list[torch.Tensor]]:
    return [list(column) for column in zip(*weights, strict=True)]


def _empty_dense(*arguments: Any) -> torch.Tensor:
    (packed, *_), (num_rows, num_columns, dtype, _) = arguments[:_FIELDS], arguments[_FIELDS:]
    out: torch.Tensor = packed[0].new_empty(sum(num_rows), num_columns, dtype=dtype)
    return out


def _dequantize(*arguments: Any) -> torch.Tensor:
    num_rows, num_columns, dtype, _ = arguments[_FIELDS:]
    out = _empty_dense(*arguments)
    for weight, rows in zip(map(Nf4Weight, *arguments[:_FIELDS]), out.split(num_rows), strict=True):
        if has_kernel(out, num_columns):
            _launch(weight, rows, None)
        else:
            rows.copy_(reference.dequantize(weight, len(rows), num_columns, dtype))
    return out


def _empty_fp8(*arguments: Any) -> torch.Tensor:
    (packed, *_), (_, num_rows, num_columns, transposed, _) = arguments[:_FIELDS], arguments[_FIELDS:]
    shape = (num_columns, sum(num_rows)) if transposed else (sum(num_rows), num_columns)
    out: torch.Tensor = packed[0].new_empty(shape, dtype=torch.float8_e4m3fn)
    return out


def _dequantize_fp8(*arguments: Any) -> torch.Tensor:
    scales, num_rows, num_columns, transposed, _ = arguments[_FIELDS:]
    out = _empty_fp8(*arguments)
    row_major = out.t() if transposed else out
    weights = map(Nf4Weight, *arguments[:_FIELDS])
    for weight, scale, rows in zip(weights, scales, row_major.split(num_rows), strict=True):
        if has_kernel(out, num_columns):
            _launch(weight, rows, scale)
        else:
            rows.copy_(reference.dequantize_fp8(weight, scale, len(rows), num_columns))
    return out


def has_kernel(out: torch.Tensor, num_columns: int) -> bool:
    """Whether the Triton kernel can write `out`: on CUDA, whole blocks per row, float8 only if the hardware has it."""
    if out.device.type != "cuda" or num_columns % BLOCK or find_spec("triton") is None:
        return False
    # Triton has no fp64 path that rounds level * absmax to fp32 first
    if out.dtype == torch.float8_e4m3fn:
        return has_fp8(out.device)
    return out.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _launch(weight: Nf4Weight, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    # machines without a GPU have no Triton
    from flatout.kernels.nf4.triton import dequantize_into

    dequantize_into(weight, rows, _levels_on(rows.device), scale)


_levels_on = cache(nf4_levels)
