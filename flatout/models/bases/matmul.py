"""Products with frozen weights in every storage: forward and input gradient, for one weight or several fused ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.fp8 import scaled_product
from flatout.kernels.fp8.reference import quantize_rows
from flatout.kernels.nf4 import dequantize
from flatout.kernels.nf4.reference import Nf4Weight


@dataclass(frozen=True)
class FrozenMatmul:
    """Products of one input with several frozen weights W_i (N_i, K), which are stored as a list of tensors.

    `forward(x (..., K), *storage)` returns x W_i.T for each i; `backward(gradients (..., N_i), *storage)` the sum of
    dY_i W_i. `describe` is a word for the console.
    """

    describe: str
    forward: Callable[..., Sequence[Tensor]]
    backward: Callable[..., Tensor]


class FrozenLinearFunction(torch.autograd.Function):
    """x W.T by a FrozenMatmul of one weight; saves only the storage, as dequantized weights would fill the memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matmul: FrozenMatmul, *storage: Tensor) -> Tensor:
        ctx.save_for_backward(*storage)
        ctx.matmul = matmul
        (output,) = matmul.forward(x, *storage)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        storage = ctx.saved_tensors
        return ctx.matmul.backward(grads, *storage), None, *(None,) * len(storage)


def dense_matmul(sizes: list[int]) -> FrozenMatmul:
    """Storage: the concatenated weights, (sum of N_i, K)."""
    return _matmul("dense", sizes, lambda storage, dtype, in_backward: storage[0])


def fp8_matmul(sizes: list[int], *, transposed: bool = False) -> FrozenMatmul:
    """Storage: scales fp32 (sum of N_i,), e4m3 (sum of N_i, K) and, if `transposed`, a copy as (K, sum of N_i)."""

    def weight(storage: Sequence[Tensor], in_backward: bool) -> Tensor:
        if in_backward and transposed:
            return storage[2]
        # transposed into a temporary, one layer at a time, if memory does not fit a second copy
        return storage[1].t().contiguous() if in_backward else storage[1]

    return _fp8_matmul("float8, transposed once" if transposed else "float8", sizes, weight)


def nf4_matmul(sizes: list[int], in_features: int, *, fp8: bool = False) -> FrozenMatmul:
    """Storage: the tensors of each Nf4Weight; for `fp8` first scales fp32 (sum of N_i,).

    Each weight has its own offset, so all of them are dequantized into one tensor for each product.
    """
    fields = len(Nf4Weight._fields)

    def dense(storage: Sequence[Tensor], dtype: torch.dtype, in_backward: bool, **options: Any) -> Tensor:
        weights = [Nf4Weight(*storage[start : start + fields]) for start in range(0, fields * len(sizes), fields)]
        return dequantize(weights, sizes, in_features, dtype, in_backward=in_backward, **options)

    def in_float8(storage: Sequence[Tensor], in_backward: bool) -> Tensor:
        scales = storage[0].split(sizes)
        return dense(storage[1:], torch.float8_e4m3fn, in_backward, scales=scales, transposed=in_backward)

    return _fp8_matmul("4-bit, float8 products", sizes, in_float8) if fp8 else _matmul("4-bit", sizes, dense)


def _matmul(
    describe: str, sizes: list[int], weight: Callable[[Sequence[Tensor], torch.dtype, bool], Tensor]
) -> FrozenMatmul:
    """Make a FrozenMatmul; `weight` turns the storage into (sum of N_i, K) in a dtype, for the backward pass or not."""

    def forward(x: Tensor, *storage: Tensor) -> Sequence[Tensor]:
        return _split(F.linear(x, weight(storage, x.dtype, False)), sizes)

    def backward(grads: Sequence[Tensor], *storage: Tensor) -> Tensor:
        weights = weight(storage, grads[0].dtype, True).split(sizes)
        total: Tensor = grads[0] @ weights[0]
        for grad, own in zip(grads[1:], weights[1:], strict=True):
            total = total + grad @ own
        return total

    return FrozenMatmul(describe, forward, backward)


def _fp8_matmul(describe: str, sizes: list[int], weight: Callable[[Sequence[Tensor], bool], Tensor]) -> FrozenMatmul:
    """Storage begins with the outputs' scales; `weight` makes e4m3 (sum of N_i, K), in backward (K, sum of N_i)."""

    def forward(x: Tensor, *storage: Tensor) -> Sequence[Tensor]:
        quantized, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        product = scaled_product(quantized, weight(storage, False), scale, storage[0], x.dtype)
        return _split(product.view(*x.shape[:-1], sum(sizes)), sizes)

    def backward(grads: Sequence[Tensor], *storage: Tensor) -> Tensor:
        # the outputs' scales are folded into the gradient before it is quantized, so the backward pass can use the
        # forward's bytes: dX = (dY * row_scale) @ bytes
        transposed = weight(storage, True)
        ones = torch.ones(len(transposed), dtype=torch.float32, device=transposed.device)
        total = None
        for grad, own, scale in zip(grads, transposed.split(sizes, dim=1), storage[0].split(sizes), strict=True):
            quantized, grad_scale = quantize_rows((grad * scale.to(grad.dtype)).reshape(-1, grad.shape[-1]))
            product = scaled_product(quantized, own, grad_scale, ones, grad.dtype)
            product = product.view(*grad.shape[:-1], len(transposed))
            total = product if total is None else total + product
        assert total is not None
        return total

    return FrozenMatmul(describe, forward, backward)


def _split(output: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    # not a view: views returned by an autograd function cannot be modified in place
    return [output] if len(sizes) == 1 else output.split(sizes, dim=-1)
