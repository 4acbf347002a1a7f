"""NF4 with double quantisation, bit-equal to bitsandbytes: quantise, and dequantise several weights into one tensor.

reference.py is the truth and runs everywhere; triton.py is its twin on CUDA. Weights whose rows are no whole number of
blocks of 64 are dequantised by the reference on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from flatout.kernels.fp8 import has_fp8
from flatout.kernels.nf4 import reference
from flatout.kernels.nf4.reference import BLOCK, NESTED_BLOCK, Nf4Weight, dynamic_map, nf4_levels, quantise, row_scale

__all__ = [
    "BLOCK", "NESTED_BLOCK", "Nf4Weight", "dequantise", "dequantise_fp8", "dynamic_map", "nf4_levels", "quantise",
    "register_ops", "row_scale",
]  # fmt: skip

_WEIGHTS = "Tensor[] packed, Tensor[] absmax, Tensor[] nested_absmax, Tensor[] nested_map, Tensor[] offset"


def dequantise(
    weights: Sequence[Nf4Weight],
    num_rows: Sequence[int],
    num_columns: int,
    dtype: torch.dtype,
    *,
    in_backward: bool = False,
) -> torch.Tensor:
    """The dense weights below each other, (sum of num_rows, num_columns) in `dtype`; a new tensor, not differentiable.

    Traceable by torch.compile once `register_ops` ran. `in_backward` changes nothing in the result: the compiler would
    merge two equal calls of forward and backward into one, and keep the dense weight in between.
    """
    result: torch.Tensor = torch.ops.flatout.nf4_dequantise(
        *_columns(weights), list(num_rows), num_columns, dtype, in_backward
    )
    return result


def dequantise_fp8(
    weights: Sequence[Nf4Weight],
    scales: Sequence[torch.Tensor],
    num_rows: Sequence[int],
    num_columns: int,
    *,
    transposed: bool = False,
    in_backward: bool = False,
) -> torch.Tensor:
    """The weights over their row scales (fp32 (rows,) each, see `row_scale`) in float8_e4m3fn, below each other.

    A new contiguous tensor: (sum of num_rows, num_columns), or (num_columns, sum of num_rows) if `transposed`.
    `in_backward` as in `dequantise`.
    """
    result: torch.Tensor = torch.ops.flatout.nf4_dequantise_fp8(
        *_columns(weights), list(scales), list(num_rows), num_columns, transposed, in_backward
    )
    return result


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.nf4_dequantise and nf4_dequantise_fp8; call before the first use."""
    shape = "int[] num_rows, int num_columns"
    schema = f"({_WEIGHTS}, {shape}, ScalarType dtype, bool in_backward) -> Tensor"
    dense = torch.library.custom_op("flatout::nf4_dequantise", _dequantise, mutates_args=(), schema=schema)
    dense.register_fake(_empty_dense)
    schema = f"({_WEIGHTS}, Tensor[] scales, {shape}, bool transposed, bool in_backward) -> Tensor"
    fp8 = torch.library.custom_op("flatout::nf4_dequantise_fp8", _dequantise_fp8, mutates_args=(), schema=schema)
    fp8.register_fake(_empty_fp8)


_Tensors = list[torch.Tensor]


def _columns(weights: Sequence[Nf4Weight]) -> list[_Tensors]:
    return [list(column) for column in zip(*weights, strict=True)]


def _empty_dense(
    packed: _Tensors, absmax: _Tensors, nested_absmax: _Tensors, nested_map: _Tensors, offset: _Tensors,
    num_rows: list[int], num_columns: int, dtype: torch.dtype, in_backward: bool,
) -> torch.Tensor:  # fmt: skip
    return packed[0].new_empty(sum(num_rows), num_columns, dtype=dtype)


def _dequantise(
    packed: _Tensors, absmax: _Tensors, nested_absmax: _Tensors, nested_map: _Tensors, offset: _Tensors,
    num_rows: list[int], num_columns: int, dtype: torch.dtype, in_backward: bool,
) -> torch.Tensor:  # fmt: skip
    out = packed[0].new_empty(sum(num_rows), num_columns, dtype=dtype)
    weights = map(Nf4Weight, packed, absmax, nested_absmax, nested_map, offset)
    for weight, rows in zip(weights, out.split(num_rows), strict=True):
        if has_kernel(out, num_columns):
            _launch(weight, rows, None)
        else:
            rows.copy_(reference.dequantise(weight, len(rows), num_columns, dtype))
    return out


def _empty_fp8(
    packed: _Tensors, absmax: _Tensors, nested_absmax: _Tensors, nested_map: _Tensors, offset: _Tensors,
    scales: _Tensors, num_rows: list[int], num_columns: int, transposed: bool, in_backward: bool,
) -> torch.Tensor:  # fmt: skip
    shape = (num_columns, sum(num_rows)) if transposed else (sum(num_rows), num_columns)
    return packed[0].new_empty(shape, dtype=torch.float8_e4m3fn)


def _dequantise_fp8(
    packed: _Tensors, absmax: _Tensors, nested_absmax: _Tensors, nested_map: _Tensors, offset: _Tensors,
    scales: _Tensors, num_rows: list[int], num_columns: int, transposed: bool, in_backward: bool,
) -> torch.Tensor:  # fmt: skip
    shape = (num_columns, sum(num_rows)) if transposed else (sum(num_rows), num_columns)
    out = packed[0].new_empty(shape, dtype=torch.float8_e4m3fn)
    row_major = out.t() if transposed else out
    weights = map(Nf4Weight, packed, absmax, nested_absmax, nested_map, offset)
    for weight, scale, rows in zip(weights, scales, row_major.split(num_rows), strict=True):
        if has_kernel(out, num_columns):
            _launch(weight, rows, scale)
        else:
            rows.copy_(reference.dequantise_fp8(weight, scale, len(rows), num_columns))
    return out


def has_kernel(out: torch.Tensor, num_columns: int) -> bool:
    """Whether the Triton kernel can write `out`: on CUDA, whole blocks in a row, float8 only where hardware has it."""
    if out.device.type != "cuda" or num_columns % BLOCK or find_spec("triton") is None:
        return False
    # Triton has no fp64 path that rounds level * absmax to fp32 first
    if out.dtype == torch.float8_e4m3fn:
        return has_fp8(out.device)
    return out.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _launch(weight: Nf4Weight, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    # machines without a GPU have no Triton
    from flatout.kernels.nf4.triton import dequantise_into

    dequantise_into(weight, rows, _levels_on(rows.device), scale)


@cache
def _levels_on(device: torch.device) -> torch.Tensor:
    return nf4_levels(device)
