"""Products of one frozen layer with its adapter, in one sum, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.models.frozen.matmul import FrozenMatmul


class LoraProduct(torch.autograd.Function):
    """x W.T + low B.T with low = scaling * D(x) A.T, no small part of which is rounded away; x is (..., K).

    D drops values of x with the probability `dropout`. A (r, K) and B (N, r) are masters, cast to x's dtype; their
    gradients have the masters' dtype, and on CUDA their sums over tokens are not rounded to x's. `storage` is that of
    W. With `exact`, fp32 or fp64, the results are the terms that DoRA scales before it adds and rounds them: x W.T in
    that dtype, D(x) W.T if there is dropout, and low B.T.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float, exact: torch.dtype | None,
        matmul: FrozenMatmul, *storage: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        dropped, mask = torch.native_dropout(x, dropout, True) if dropout else (x, None)
        master_dtype, a, b = a.dtype, a.to(x.dtype), b.to(x.dtype)
        low = F.linear(dropped, a) * scaling
        ctx.save_for_backward(dropped, mask, low, a, b, *storage)
        ctx.matmul, ctx.scaling, ctx.dropout, ctx.dtype = matmul, scaling, dropout, master_dtype
        operands = matmul.forward(x, *storage)
        if exact is None:
            (output,) = operands.multiply_with_lora(low, b, use_kernel=False)
            return output
        frozen = operands.multiply_and_add(x.new_zeros(*x.shape[:-1], len(b), dtype=exact))
        of_dropped = [matmul.forward(dropped, *storage).multiply(dropped)] if dropout else []
        return frozen, *of_dropped, F.linear(low, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dropped, mask, low, a, b, *storage = ctx.saved_tensors
        # with a single result, all of it is the sum
        grad, adapter_grad = grads[0].to(dropped.dtype), grads[-1]
        low_grad = (adapter_grad @ b) * ctx.scaling
        x_grad = None
        if ctx.needs_input_grad[0]:
            operands = ctx.matmul.backward([grad], *storage)
            if mask is None:
                (x_grad,) = operands.multiply_with_lora(low_grad, a.t(), use_kernel=False)
            else:
                grad_in = low_grad @ a
                for dropped_grad in grads[1:-1]:
                    grad_in = ctx.matmul.backward([dropped_grad], *storage).multiply_and_add(grad_in)
                grad_in = torch.ops.aten.native_dropout_backward(grad_in, mask, 1 / (1 - ctx.dropout))
                x_grad = operands.multiply_and_add(grad_in)
        a_grad = over_tokens(low_grad, dropped, ctx.dtype)
        return x_grad, a_grad, over_tokens(adapter_grad, low, ctx.dtype), *(None,) * (4 + len(storage))


def over_tokens(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left.T right (N, K) of left (..., N) and right (..., K), summed over all tokens, in `dtype`."""
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    if left.is_cuda and left.dtype != dtype == torch.float32:
        # not rounded to the compute dtype
        return torch.mm(left.t(), right, out_dtype=dtype)
    return (left.t() @ right).to(dtype)
