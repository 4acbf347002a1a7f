"""Products of float8 rows with an adapter's matrices, and copies of the matrices: the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels.fp8_matmul import quantize_rows

# what rounding to e4m3 leaves of a value is at most 1/28 of the largest value
SECOND_TERM = 1 / 16


def two_terms(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values (R, C) into e4m3 (2, R, C) and scales fp32 (R,).

    values ~ (terms[0] + terms[1] / 16) * scale. The relative error is at most 2^-8.8 (bfloat16: 2^-8) for values of at
    least 2^-14 of their row's largest.
    """
    first, scale = quantize_rows(values)
    rest = values.float() / scale - first.float()
    return torch.stack([first, (rest / SECOND_TERM).to(first.dtype)]), scale[:, 0]


def low_rank_product(
    parts: Sequence[Tensor], row_scales: Sequence[Tensor], terms: Tensor, scales: Tensor, ranks: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `flatout.kernels.low_rank.low_rank_product`, in fp32 (fp64 for fp64) until it is rounded."""
    exact, products = torch.promote_types(dtype, torch.float32), []
    own_terms = terms.split([part.shape[1] for part in parts], dim=2)
    for part, row_scale, own, scale, rank in zip(parts, row_scales, own_terms, scales, ranks, strict=True):
        matrix = (own[0, :rank].to(exact) + own[1, :rank].to(exact) * SECOND_TERM) * scale[:rank, None].to(exact)
        products.append((part.to(exact) @ matrix.T * row_scale.to(exact)).to(dtype))
    return torch.cat(products, dim=1)


class MatrixCopy(NamedTuple):
    """Copies of `master` (R, C) times `factor`: in `targets` (R, C) and, divided by `divisor` (C,), as `two_terms`.

    The master is (C, R) if `transposed`; it may be reallocated. `terms` (2, R, C) and `scales` (R,) are None if no
    terms are wanted. Views may have any strides, but the terms' columns and the scales are contiguous. Targets have one
    dtype.
    """

    master: Tensor
    factor: float
    targets: Sequence[Tensor]
    transposed: bool = False
    terms: Tensor | None = None
    scales: Tensor | None = None
    divisor: Tensor | None = None

    @property
    def source(self) -> Tensor:
        """The master as (R, C)."""
        return self.master.t() if self.transposed else self.master


def write(copies: Sequence[MatrixCopy]) -> None:
    """Write all copies."""
    for copy in copies:
        values = copy.source * copy.factor
        for target in copy.targets:
            target.copy_(values)
        if copy.terms is not None and copy.scales is not None:
            terms, scales = two_terms(values if copy.divisor is None else values / copy.divisor)
            copy.terms.copy_(terms)
            copy.scales.copy_(scales)
