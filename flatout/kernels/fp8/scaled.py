"""Float8 products on CUDA: the library's rowwise GEMM (`torch._scaled_mm`); elsewhere the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.fp8 import reference

# the library's kernels read 16 elements at a time
MULTIPLE = 16


def has_fp8(device: torch.device) -> bool:
    """Whether a CUDA device has float8 arithmetic: from compute capability 8.9 on."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_problem(device: torch.device, num_rows: int, num_columns: int) -> str | None:
    """Why a weight (num_rows, num_columns) cannot be multiplied in float8 on this device (None when it can)."""
    if num_rows % MULTIPLE or num_columns % MULTIPLE:
        return f"float8 products need sizes in multiples of {MULTIPLE}, not {num_rows} x {num_columns}"
    if device.type == "cuda" and not has_fp8(device):
        return f"{torch.cuda.get_device_name(device)} has no float8 arithmetic"
    return None


def scaled_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.scaled_product`; on CUDA in 16 bit by the library, which sums in its fast accumulator."""
    if not left.is_cuda or dtype.itemsize != 2:
        return reference.scaled_product(left, right, left_scale, right_scale, dtype)
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale[None], out_dtype=dtype, use_fast_accum=True
    )
