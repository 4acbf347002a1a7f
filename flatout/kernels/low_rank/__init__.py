"""Adapters beside float8 products: x A.T and dY B from the frozen products' bytes, and copies of A and B.

The narrow products of an adapter take as long as reading their input, so an input of one byte per value halves that.
Its matrix is kept as two float8 terms, whose sum is more exact than bfloat16. reference.py defines the operations and
runs everywhere; triton.py computes them on CUDA. The operator has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.capability import HOPPER, capability, has_triton
from flatout.kernels.low_rank import reference
from flatout.kernels.low_rank.reference import MatrixCopy
from flatout.kernels.operators import define_operator

# two accumulators of a tile must fit in registers
MAX_RANK = 128


def fits(device: torch.device, dtype: torch.dtype, rank: int) -> bool:
    """Whether a kernel multiplies float8 inputs with matrices of this rank; it was measured on Hopper GPUs only."""
    return capability(device) == HOPPER and dtype == torch.bfloat16 and rank <= MAX_RANK and has_triton(device)


def low_rank_product(
    parts: Sequence[Tensor], row_scales: Sequence[Tensor], terms: Tensor, scales: Tensor, ranks: Sequence[int],
    dtype: torch.dtype, originals: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """Return parts_i * row_scales_i times matrix_i.T for each i, side by side: (T, sum of r_i).

    parts_i e4m3 (T, K_i) with row_scales_i fp32 (T, 1). `terms` e4m3 (2, at least r_i, sum of K_i) and `scales` fp32
    (number of parts, at least r_i) are matrices (r_i, K_i), in `ranks` r_i, as `reference.two_terms` makes them.
    The result has the dtype `dtype`. `originals`, which were quantized, are not read. As operands they make the
    compiler write them to memory; otherwise it computes them twice, for the scale and for the bytes.
    """
    return torch.ops.flatout.low_rank_product(
        list(parts), list(row_scales), terms, scales, list(ranks), dtype, list(originals)
    )


class MatrixCopies:
    """Writes the copies of an adapter's matrices, in one launch on CUDA."""

    def __init__(self, copies: Sequence[MatrixCopy]) -> None:
        self._copies = tuple(copies)
        masters = [copy.master for copy in copies]
        self._has_kernel = bool(masters) and all(
            has_triton(master.device) and master.dtype == torch.float32 for master in masters
        )
        self._written = [own for copy in copies for own in (*copy.targets, copy.terms, copy.scales) if own is not None]
        # of the masters when the kernel was last prepared
        self._addresses: list[int] = []
        self._launch: Callable[[], None] | None = None

    def write(self) -> None:
        if not self._has_kernel:
            return reference.write(self._copies)
        addresses = [copy.master.data_ptr() for copy in self._copies]
        if self._launch is None or addresses != self._addresses:
            from flatout.kernels.low_rank import triton

            self._addresses, self._launch = addresses, triton.make_writer(self._copies)
        self._launch()
        # bump the version counters, as the kernel bypasses autograd
        torch.autograd.graph.increment_version(self._written)


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.low_rank_product; call before its first use."""
    schema = (
        "(Tensor[] parts, Tensor[] row_scales, Tensor terms, Tensor scales, int[] ranks, ScalarType dtype, "
        "Tensor[] originals) -> Tensor"
    )
    define_operator("flatout::low_rank_product", schema, _product, _empty, _num_flops)


def _num_flops(parts: Any, *shapes: Any, **_: Any) -> Any:
    ranks = shapes[-3]
    return sum(2 * part[0] * part[1] * rank for part, rank in zip(parts, ranks, strict=True))


def _empty(parts: Sequence[Tensor], *rest: Any) -> Tensor:
    *_, ranks, dtype, _originals = rest
    return parts[0].new_empty(parts[0].shape[0], sum(ranks), dtype=dtype)


def _product(
    parts: Sequence[Tensor], row_scales: Sequence[Tensor], terms: Tensor, scales: Tensor, ranks: Sequence[int],
    dtype: torch.dtype, originals: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    if not (parts[0].is_cuda and fits(parts[0].device, dtype, max(ranks))):
        return reference.low_rank_product(parts, row_scales, terms, scales, ranks, dtype)
    from flatout.kernels.low_rank import triton

    out = _empty(parts, ranks, dtype, originals)
    triton.low_rank_product(parts, row_scales, terms, scales, ranks, out)
    return out
