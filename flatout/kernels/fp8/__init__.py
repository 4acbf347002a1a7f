"""Matrix products in float8 e4m3 with one scale per row: `torch._scaled_mm` on CUDA, otherwise the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.fp8 import reference

# torch._scaled_mm needs sizes in multiples of this
MULTIPLE = 16


def has_fp8(device: torch.device) -> bool:
    """Whether a CUDA device has float8 arithmetic: compute capability 8.9 or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_problem(device: torch.device, num_rows: int, num_columns: int) -> str | None:
    """Return why a weight (num_rows, num_columns) cannot be multiplied in float8 on this device (None if it can)."""
    if num_rows % MULTIPLE or num_columns % MULTIPLE:
        return f"float8 products need sizes in multiples of {MULTIPLE}, not {num_rows} x {num_columns}"
    if device.type == "cuda" and not has_fp8(device):
        return f"{torch.cuda.get_device_name(device)} has no float8 arithmetic"
    return None


def scaled_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `reference.scaled_product`; on CUDA in 16 bit with torch's rowwise GEMM and its fast accumulation."""
    if not left.is_cuda or dtype.itemsize != 2:
        return reference.scaled_product(left, right, left_scale, right_scale, dtype)
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale[None], out_dtype=dtype, use_fast_accum=True
    )
