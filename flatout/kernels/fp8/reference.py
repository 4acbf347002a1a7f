"""Float8 products in plain torch: quantize rows, multiply the dequantized values."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize values (R, C) to float8 e4m3fn (R, C) and scales fp32 (R, 1), with values ~ bytes * scale.

    The scale of a row is its largest magnitude / 448, the largest finite e4m3fn (Micikevicius et al. 2022,
    arXiv:2209.05433), so nothing saturates; scales are clamped above 0, so that rows of zeros can be divided.
    """
    # literals, as a compiled graph would turn module constants into inputs
    scale = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


def scaled_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (left * left_scale) @ (right * right_scale).T in `dtype`, summed in fp32 (fp64 for fp64).

    left e4m3 (T, C) with scales (T, 1), right e4m3 (N, C) with scales (N,) fp32; returns (T, N).
    """
    exact = torch.promote_types(dtype, torch.float32)
    product = left.to(exact) @ right.to(exact).T
    return (product * left_scale.to(exact) * right_scale.to(exact)).to(dtype)
