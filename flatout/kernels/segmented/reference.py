"""Several products and a low-rank one in a single sum: the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Operands of column_scale * sum_i row_scales_i parts_i weights_i.T + low wide.T, (M, N) in low's dtype.

    parts (M, K_i) and weights (N, K_i) are e4m3 with scales fp32 (M,) and (N,), or have low's dtype and no scales, and
    weights are (K_i, N) if `weights_kn`. low (M, R), wide (N, R). If `wide` is block-diagonal, `first_columns[i]` is
    the first column of block i and `first_ranks[i]` its first rank; the last entry is R. Each block's columns of the
    sum are a result of their own.
    """

    parts: Sequence[Tensor]
    weights: Sequence[Tensor]
    row_scales: Sequence[Tensor]
    column_scale: Tensor | None
    low: Tensor
    wide: Tensor
    first_columns: Sequence[int]
    first_ranks: Sequence[int]
    weights_kn: bool

    @property
    def widths(self) -> list[int]:
        """Columns of each block's result."""
        return [end - start for start, end in pairwise([*self.first_columns, self.wide.shape[0]])]


def segmented_product(own: Segments) -> list[Tensor]:
    """Return the sum of `Segments` block by block, (M, N_i), in fp32 (fp64 for fp64) until it is rounded."""
    exact = torch.promote_types(own.low.dtype, torch.float32)
    total = own.low.to(exact) @ own.wide.to(exact).T
    for i, (part, weight) in enumerate(zip(own.parts, own.weights, strict=True)):
        product = part.to(exact) @ (weight.to(exact) if own.weights_kn else weight.to(exact).T)
        if own.column_scale is not None:
            product = product * own.row_scales[i].to(exact)[:, None] * own.column_scale.to(exact)
        total = total + product
    return apart(total.to(own.low.dtype), own.widths)


def apart(total: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return the columns of a matrix as matrices of these widths, each in memory of its own."""
    parts = total.split(list(widths), dim=1)
    return [total] if len(parts) == 1 else [part.clone(memory_format=torch.contiguous_format) for part in parts]
