"""Adapters beside float8 products: x A.T, dY B and gradients from the frozen products' bytes, and copies of A and B.

The narrow products of an adapter take as long as reading their input, so an input of one byte per value halves that.
Its matrix is kept as two float8 terms, whose sum is more exact than bfloat16. reference.py defines the operations and
runs everywhere; triton.py and gradient.cu compute them on CUDA. The operators have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.capability import HOPPER, capability, has_triton
from flatout.kernels.cuda_source import error_of
from flatout.kernels.fp8_matmul import MULTIPLE
from flatout.kernels.low_rank import gradient, reference
from flatout.kernels.low_rank.reference import MatrixCopy
from flatout.kernels.operators import define_operator

# two accumulators of a tile must fit in registers
MAX_RANK = 128
# of one adapter; with more ranks, bfloat16 matmuls are faster than `lora_weight_grad`
MAX_GRADIENT_RANK = 16


def fits(device: torch.device, dtype: torch.dtype, rank: int) -> bool:
    """Whether a kernel multiplies float8 inputs with matrices of this rank; it was measured on Hopper GPUs only."""
    return capability(device) == HOPPER and dtype == torch.bfloat16 and rank <= MAX_RANK and has_triton(device)


@cache
def load_error(device: torch.device, ranks: tuple[int, ...]) -> Exception | None:
    """Return why a Hopper GPU cannot load the kernels of `lora_weight_grad` for layers with these ranks, else None."""
    if capability(device) != HOPPER or max(ranks) > MAX_GRADIENT_RANK:
        return None
    errors = (error_of(gradient.load, device, rank) for rank in {sum(ranks), *ranks})
    return next((error for error in errors if error is not None), None)


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


def lora_weight_grad(
    part: Tensor, row_scale: Tensor, low: Tensor, dtype: torch.dtype, *, column_scale: Tensor | None = None,
    ranks_first: bool = False,
) -> Tensor:  # fmt: skip
    """Return (part * row_scale * column_scale).T low, summed over all tokens, as (C, R), or (R, C) if `ranks_first`.

    part e4m3 (T, C) with row_scale fp32 (T, 1) and perhaps column_scale fp32 (C,) is an input or an output's gradient,
    low (T, R) the other factor of the gradient of A or B. The result has the masters' `dtype`.
    """
    return torch.ops.flatout.lora_weight_grad(part, row_scale, low, column_scale, ranks_first, dtype)


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
    """Register torch.ops.flatout.low_rank_product and lora_weight_grad; call before their first use."""
    schema = (
        "(Tensor[] parts, Tensor[] row_scales, Tensor terms, Tensor scales, int[] ranks, ScalarType dtype, "
        "Tensor[] originals) -> Tensor"
    )
    define_operator("flatout::low_rank_product", schema, _product, _empty, _num_flops)
    schema = "(Tensor part, Tensor row_scale, Tensor low, Tensor? column_scale, bool ranks_first, ScalarType dtype)"
    schema += " -> Tensor"
    define_operator("flatout::lora_weight_grad", schema, _gradient, _empty_gradient, _gradient_flops)


def _num_flops(parts: Any, *shapes: Any, **_: Any) -> Any:
    ranks = shapes[-3]
    return sum(2 * part[0] * part[1] * rank for part, rank in zip(parts, ranks, strict=True))


def _gradient_flops(part: Any, row_scale: Any, low: Any, *_: Any, **__: Any) -> Any:
    return 2 * part[0] * part[1] * low[1]


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


def _empty_gradient(part: Tensor, row_scale: Tensor, low: Tensor, *rest: Any) -> Tensor:
    *_, ranks_first, dtype = rest
    shape = part.shape[1], low.shape[1]
    return part.new_empty(shape[::-1] if ranks_first else shape, dtype=dtype)


def _gradient(
    part: Tensor, row_scale: Tensor, low: Tensor, column_scale: Tensor | None, ranks_first: bool, dtype: torch.dtype
) -> Tensor:
    out = _empty_gradient(part, row_scale, low, ranks_first, dtype)
    by_column = out.t() if ranks_first else out
    is_fp32, is_aligned = dtype == torch.float32, part.shape[1] % MULTIPLE == 0
    if part.is_cuda and is_fp32 and is_aligned and fits(part.device, low.dtype, low.shape[1]):
        gradient.launch(part, row_scale, low, column_scale, by_column)
    else:
        by_column.copy_(reference.lora_weight_grad(part, row_scale, low, column_scale, dtype))
    return out
