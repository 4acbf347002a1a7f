"""Matrix products in float8 e4m3 with one scale per row (Micikevicius et al. 2022, arXiv:2209.05433)."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.capability import ADA, capability

# torch._scaled_mm needs sizes in multiples of this
MULTIPLE = 16


def has_fp8(device: torch.device) -> bool:
    """Whether a device has float8 arithmetic: an Ada GPU (compute capability 8.9) or newer."""
    return capability(device) >= ADA


def fp8_problem(device: torch.device, num_rows: int, num_columns: int) -> str | None:
    """Return why a weight (num_rows, num_columns) cannot be multiplied in float8 on this device (None if it can)."""
    if num_rows % MULTIPLE or num_columns % MULTIPLE:
        return f"float8 matmuls need sizes in multiples of {MULTIPLE}, not {num_rows} x {num_columns}"
    if device.type == "cuda" and not has_fp8(device):
        return f"{torch.cuda.get_device_name(device)} does not support float8"
    return None


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize values (R, C) to float8 e4m3fn (R, C) and scales fp32 (R, 1), with values ~ bytes * scale.

    The scale of a row is its largest magnitude / 448, the largest finite e4m3fn, so nothing saturates; scales are
    clamped above 0, so that rows of zeros can be divided.
    """
    # literals, as a compiled graph would turn module constants into inputs
    scale = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


def bounded_scales(scales: Tensor) -> Tensor:
    """Return a frozen weight's scales (N,) fp32 with none below 1/64 of the largest, and ones for a weight of zeros.

    Output gradients are multiplied by these before they are quantized, so a tiny one would hide its output's gradient
    from the adapters. A scale 64 times larger than needed costs precision only for values below 1/450 of the row's
    largest.
    """
    largest = scales.max()
    return torch.where(largest > 1e-14, scales.clamp(min=largest / 64), 1.0)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a frozen weight (N, K) to float8 e4m3fn (N, K) and `bounded_scales` fp32 (N,)."""
    scales = bounded_scales(weight.abs().amax(dim=1).float() / 448.0)
    return (weight.float() / scales[:, None]).to(torch.float8_e4m3fn), scales


def scaled_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (left * left_scale) @ (right * right_scale).T in `dtype`, summed in fp32 (fp64 for fp64).

    left e4m3 (T, C) with scales (T, 1), right e4m3 (N, C) with scales (N,) fp32; returns (T, N). On CUDA in 16 or
    32 bits it is torch's GEMM with fast accumulation; the other form is its reference.
    """
    if left.is_cuda and dtype.itemsize == 2:
        return torch._scaled_mm(
            left, right.t(), scale_a=left_scale, scale_b=right_scale[None], out_dtype=dtype, use_fast_accum=True
        )
    exact = torch.promote_types(dtype, torch.float32)
    if left.is_cuda and dtype == torch.float32:
        # on Ada GPUs, torch's GEMM with a scale per row only returns bf16
        one = left_scale.new_ones(())
        product = torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True)
        return product.mul_(left_scale).mul_(right_scale)
    product = left.to(exact) @ right.to(exact).T
    return (product * left_scale.to(exact) * right_scale.to(exact)).to(dtype)
