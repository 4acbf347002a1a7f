"""Several products and a low-rank one in a single sum: the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def segmented_product(
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    row_scales: Sequence[Tensor],
    column_scale: Tensor | None,
    low: Tensor,
    wide: Tensor,
    weights_kn: bool,
) -> Tensor:
    """Return column_scale * sum_i row_scales_i parts_i weights_i.T + low wide.T, (M, N) in low's dtype.

    parts (M, K_i) and weights (N, K_i) are e4m3 with scales fp32 (M,) and (N,), or have low's dtype and no scales, and
    weights are (K_i, N) if `weights_kn`. low (M, R), wide (N, R). Summed in fp32 (fp64 for fp64).
    """
    exact = torch.promote_types(low.dtype, torch.float32)
    total = low.to(exact) @ wide.to(exact).T
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        product = part.to(exact) @ (weight.to(exact) if weights_kn else weight.to(exact).T)
        if column_scale is not None:
            product = product * row_scales[i].to(exact)[:, None] * column_scale.to(exact)
        total = total + product
    return total.to(low.dtype)
