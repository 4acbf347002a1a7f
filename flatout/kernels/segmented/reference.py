"""Several products and a low-rank one in a single sum: the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels.fp8_matmul import scaled_product

# columns of an input that a product on a GPU carries an adapter's part with
_CARRIED = 64


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

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each block's columns of the sum, with its own (M, r_i) of `low` and (N_i, r_i) of `wide`."""
        is_diagonal = self.wide.shape[1] == self.low.shape[1]
        for first, width, (start, end) in zip(self.first_columns, self.widths, pairwise(self.first_ranks), strict=True):
            columns = slice(first, first + width)
            ranks = slice(start, end) if is_diagonal else slice(end - start)
            yield columns, self.low[:, start:end], self.wide[columns, ranks]


def segmented_product(own: Segments) -> list[Tensor]:
    """Return the sum of `Segments` block by block, (M, N_i), in fp32 (fp64 for fp64) until it is rounded."""
    exact = torch.promote_types(own.low.dtype, torch.float32)
    total = products(own.parts, own.weights, own.row_scales, own.column_scale, own.weights_kn, exact)
    return [
        (total[:, columns] + low.to(exact) @ wide.to(exact).T).to(own.low.dtype) for columns, low, wide in own.blocks()
    ]


def in_turn(own: Segments) -> list[Tensor]:
    """Return the sum of `Segments` in 16 bits by torch's products, each block (M, N_i) in memory of its own.

    On a CPU, torch adds a product to what is there in one sum. On a GPU it rounds the product first, and would lose a
    small adapters' part: so the part is computed together with the last `_CARRIED` columns of the first input. Their
    sum spans many units in the last place of the result, and so whatever is added to it later keeps the part in the
    mean, as a single rounding does.
    """
    on_cpu, is_scaled = own.low.device.type == "cpu", own.column_scale is not None
    if (on_cpu and is_scaled) or (not on_cpu and own.parts[0].shape[1] < 4 * _CARRIED):
        total = products(own.parts, own.weights, own.row_scales, own.column_scale, own.weights_kn, torch.float32)
        return [(total[:, columns] + low @ wide.T).to(low.dtype) for columns, low, wide in own.blocks()]
    return [_block_in_turn(own, *block, carries=not on_cpu) for block in own.blocks()]


def _block_in_turn(own: Segments, columns: slice, low: Tensor, wide: Tensor, *, carries: bool) -> Tensor:
    parts = list(own.parts)
    weights = [weight[:, columns].T if own.weights_kn else weight[columns] for weight in own.weights]
    column_scale = None if own.column_scale is None else own.column_scale[columns]
    if carries:
        first = parts[0].shape[1] - _CARRIED
        carried, carrier = parts[0][:, first:], weights[0][:, first:]
        if column_scale is not None:
            carried = (carried.float() * own.row_scales[0][:, None]).to(low.dtype)
            carrier = (carrier.float() * column_scale[:, None]).to(low.dtype)
        parts[0], weights[0] = parts[0][:, :first], weights[0][:, :first]
        low, wide = torch.cat([carried, low], dim=1), torch.cat([carrier, wide], dim=1)
    out = low @ wide.T
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if column_scale is None:
            out.addmm_(part, weight.T)
        else:
            out += scaled_product(part, weight, own.row_scales[i][:, None], column_scale, low.dtype)
    return out


def products(
    parts: Sequence[Tensor], weights: Sequence[Tensor], row_scales: Sequence[Tensor], column_scale: Tensor | None,
    weights_kn: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the sum of the frozen products alone, (M, N), in fp32 or fp64; see `Segments`."""
    total = None
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        turned = weight if weights_kn else weight.T
        if column_scale is not None:
            product = scaled_product(part, weight, row_scales[i][:, None], column_scale, dtype)
        elif part.is_cuda and part.dtype.itemsize == 2 and dtype == torch.float32:
            product = torch.mm(part, turned, out_dtype=dtype)
        else:
            product = part.to(dtype) @ turned.to(dtype)
        total = product if total is None else total + product
    assert total is not None
    return total
