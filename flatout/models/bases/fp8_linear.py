"""Trained linear layers with float8 products for output and input gradient, with one scale per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatout.kernels.fp8 import quantize_rows, scaled_product


class _Fp8Product(torch.autograd.Function):
    """x W.T for x (..., K) and a trained W (N, K), both quantized by row (arXiv:2209.05433); returns (..., N).

    The scales of W's rows are folded into the output's gradient before that is quantized by row, so both products have
    the same bytes: dX = (dY * scale) @ bytes. They are made twice rather than kept, which costs less than their memory.
    dW = dY.T x is computed in x's dtype: its sum runs over tokens, so float8 would need scales per column, which take
    another pass over both, and transposed copies of both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        quantized, scale = quantize_rows(weight)
        x_quantized, x_scale = quantize_rows(rows)
        ctx.save_for_backward(rows, weight)
        return scaled_product(x_quantized, quantized, x_scale, scale[:, 0], x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            quantized, scale = quantize_rows(weight)
            ones = torch.ones(quantized.shape[1], dtype=torch.float32, device=grad.device)
            grad_quantized, grad_scale = quantize_rows(grad * scale[:, 0].to(grad.dtype))
            x_grad = scaled_product(grad_quantized, quantized.t().contiguous(), grad_scale, ones, grad.dtype)
            x_grad = x_grad.view(*grads[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            weight_grad = (grad.t() @ rows).to(weight.dtype)
        return x_grad, weight_grad


class Fp8Linear(nn.Linear):
    """An nn.Linear that computes as `_Fp8Product`; under autocast, inputs are cast to its dtype.

    An existing layer becomes one by its `__class__`, so parameters and names stay.
    """

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        output: Tensor = _Fp8Product.apply(x, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)
