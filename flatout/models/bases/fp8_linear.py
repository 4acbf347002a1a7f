"""Trained linear layers with float8 products for output, input gradient and weight gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.kernels.fp8 import MULTIPLE, quantize_rows, scaled_product


class _Fp8Product(torch.autograd.Function):
    """x W.T for x (..., K) and a trained W (N, K), both quantized by row (arXiv:2209.05433); returns (..., N).

    The scales of W's rows are folded into the output's gradient before that is quantized by row, so both products with
    W have the same bytes: dX = (dY * scale) @ bytes. They are made twice rather than kept, which costs less than their
    memory.
    dW = dY.T x takes the bytes of x of the forward pass, so only they are saved (`_product_over_tokens`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        quantized, scale = quantize_rows(weight)
        x_quantized, x_scale = quantize_rows(x.flatten(0, -2))
        ctx.save_for_backward(x_quantized, x_scale, weight)
        return scaled_product(x_quantized, quantized, x_scale, scale[:, 0], x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_quantized, x_scale, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            quantized, scale = quantize_rows(weight)
            grad_quantized, grad_scale = quantize_rows(grad * scale[:, 0].to(grad.dtype))
            ones = torch.ones(quantized.shape[1], dtype=torch.float32, device=grad.device)
            x_grad = scaled_product(grad_quantized, quantized.t().contiguous(), grad_scale, ones, grad.dtype)
            x_grad = x_grad.view(*grads[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            weight_grad = _product_over_tokens(grad, x_quantized, x_scale).to(weight.dtype)
        return x_grad, weight_grad


def _product_over_tokens(grad: Tensor, x: Tensor, x_scale: Tensor) -> Tensor:
    """Return grad.T (x * x_scale) for grad (T, N), x e4m3 (T, K) and fp32 x_scale (T, 1): (N, K) in grad's dtype.

    The sum runs over tokens, so their scales cannot be taken out of it. They go into grad, which is quantized to e5m2
    with one scale: it holds numbers over 31 powers of 2, so tokens of small scales still count.
    """
    scale = (grad.abs().amax(dim=-1, keepdim=True).float() * x_scale).amax().clamp(min=1e-12) / 57344.0
    narrow = (grad.float() * (x_scale / scale)).to(torch.float8_e5m2)
    ones = torch.ones(x.shape[1], dtype=torch.float32, device=x.device)
    scales = scale.expand(grad.shape[1], 1).contiguous()
    return scaled_product(_transposed(narrow), _transposed(x), scales, ones, grad.dtype, is_long=True)


def _transposed(values: Tensor) -> Tensor:
    """Copy float8 (T, C) as contiguous (C, T), with zeros up to a multiple of 16, which float8 products need."""
    return F.pad(values.view(torch.int8).t(), (0, -len(values) % MULTIPLE)).contiguous().view(values.dtype)


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
