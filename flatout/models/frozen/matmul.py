"""Products of one input with several frozen weights, alone or with their adapters' low-rank products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.fp8_matmul import scaled_product
from flatout.kernels.low_rank import low_rank_product
from flatout.kernels.segmented import segmented_product, sum_onto


class Operands(NamedTuple):
    """Operands of the sum of parts_i (..., K_i) weights_i.T, with weights_i (N, K_i), or (K_i, N) if `weights_kn`.

    float8 parts are (T, K_i) with `row_scales` fp32 (T, 1); their weights have `column_scales` fp32 (N,). A `bias` (N,)
    is added to the product of a single part without scales.
    """

    parts: Sequence[Tensor]
    weights: Sequence[Tensor]
    row_scales: Sequence[Tensor] = ()
    column_scales: Sequence[Tensor] = ()
    weights_kn: bool = False
    bias: Tensor | None = None

    def multiply(self, like: Tensor) -> Tensor:
        """Return the sum (..., N) in the dtype of `like` (..., any), one product after the other."""
        total = None
        for i, (part, weight) in enumerate(zip(self.parts, self.weights, strict=True)):
            if self.row_scales:
                product = scaled_product(part, weight, self.row_scales[i], self.column_scales[i], like.dtype)
                product = product.view(*like.shape[:-1], len(weight))
            else:
                product = part @ weight if self.weights_kn else F.linear(part, weight, self.bias)
            total = product if total is None else total + product
        assert total is not None
        return total

    def low_rank(self, terms: Tensor, scales: Tensor, ranks: Sequence[int], originals: Sequence[Tensor]) -> Tensor:
        """Return the products of float8 parts with an adapter's matrices (..., sum of `ranks`); see `low_rank_product`.

        `originals` (..., K_i) were quantized to the parts.
        """
        like = originals[0]
        low = low_rank_product(self.parts, self.row_scales, terms, scales, ranks, like.dtype, originals)
        return low.view(*like.shape[:-1], low.shape[-1])

    def multiply_with_lora(
        self, low: Tensor, wide: Tensor, columns: Sequence[int] = (0,), ranks: Sequence[int] = (), *, use_kernel: bool
    ) -> list[Tensor]:
        """Return the product plus low (..., R) wide (N, R).T, summed as `segmented_product` says. No bias.

        All `column_scales` are equal.
        """
        assert self.bias is None
        products = segmented_product(
            [part.flatten(0, -2) for part in self.parts], self.weights, low.flatten(0, -2), wide,
            row_scales=[scale.flatten() for scale in self.row_scales],
            column_scale=self.column_scales[0] if self.column_scales else None,
            first_columns=columns, first_ranks=ranks, weights_kn=self.weights_kn, use_kernel=use_kernel,
        )  # fmt: skip
        # no views, as a model may modify a layer's output in place (OLMo clips queries and keys)
        return [torch.ops.aten._unsafe_view(product, [*low.shape[:-1], product.shape[-1]]) for product in products]

    def multiply_and_add(self, start: Tensor) -> Tensor:
        """Return the product plus `start` (..., N), rounded once, to its dtype. No bias; `column_scales` are equal."""
        assert self.bias is None
        total = sum_onto(
            start.flatten(0, -2), [part.flatten(0, -2) for part in self.parts], self.weights,
            row_scales=[scale.flatten() for scale in self.row_scales],
            column_scale=self.column_scales[0] if self.column_scales else None, weights_kn=self.weights_kn,
        )  # fmt: skip
        return torch.ops.aten._unsafe_view(total, start.shape)


@dataclass(frozen=True)
class FrozenMatmul:
    """How one input is multiplied with frozen weights W_i (N_i, K), `sizes` N_i, which are stored as a list of tensors.

    `forward(x (..., K), *storage)` returns the operands of x W.T, all W_i concatenated; `backward(gradients (..., N_i),
    *storage)` those of the sum of dY_i W_i. `describe` names the product in the console's `fused` line. With
    `one_accumulator`, a kernel of `segmented_product` computes them with their adapters; `load_error` is the exception
    if it could not be loaded. The parts of `forward` and `backward` are float8 where `fp8_forward` and `fp8_backward`
    say so; with the first, gradients are multiplied by storage[0] (sum of N_i,) before they are quantized.
    """

    describe: str
    sizes: list[int]
    forward: Callable[..., Operands]
    backward: Callable[..., Operands]
    one_accumulator: bool = False
    load_error: Exception | None = None
    fp8_forward: bool = False
    fp8_backward: bool = False

    def outputs_with(self, operands: Operands, low: Tensor, b: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return x W_i.T + low_i b_i.T for each i, with `low` (..., R) and b_i the `blocks` of `b`."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        first_ranks = [sum(ranks[:i]) for i in range(len(ranks) + 1)]
        return operands.multiply_with_lora(low, b, starts, first_ranks, use_kernel=self.one_accumulator)


def blocks(b: Tensor, sizes: Sequence[int], ranks: Sequence[int]) -> list[Tensor]:
    """Return views (N_i, r_i) of a matrix (sum of N_i, sum of r_i) on its diagonal, or of (sum of N_i, largest r_i)."""
    products, row, column = [], 0, 0
    for size, rank in zip(sizes, ranks, strict=True):
        products.append(b[row : row + size, column : column + rank])
        row, column = row + size, column + (rank if b.shape[1] == sum(ranks) else 0)
    return products


class FrozenLinearFunction(torch.autograd.Function):
    """x W.T by a FrozenMatmul of one weight; saves only the storage, as dequantized weights would fill the memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matmul: FrozenMatmul, *storage: Tensor) -> Tensor:
        ctx.save_for_backward(*storage)
        ctx.matmul = matmul
        return matmul.forward(x, *storage).multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        storage = ctx.saved_tensors
        return ctx.matmul.backward(grads, *storage).multiply(grads[0]), None, *(None,) * len(storage)
