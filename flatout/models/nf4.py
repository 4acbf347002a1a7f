"""A frozen linear layer whose weight is stored in NF4 with double quantisation (4.13 bits a weight)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.kernels.nf4 import Nf4Weight, dequantise, quantise, register_ops, row_scale


class Nf4Linear(nn.Module):
    """y = x W^T + bias with W (out, in) dequantised in every pass and kept by none; differentiable in x only.

    Frozen parameters, so that strategies cut them like any weight: packed and absmax, the bytes of `Nf4Weight` under
    the name of float8, as FSDP2 takes integers only from torch 2.12 on. Buffers: nested_absmax fp32, nested_map fp32
    (256,), offset fp32 (), row_scale fp32 (out,) for float8 products, bias (out,) or None. `dtype` is what `dense()`
    returns.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor
    nested_map: torch.Tensor
    offset: torch.Tensor
    row_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, stored: Nf4Weight, bias: torch.Tensor | None, *, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        register_ops()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.packed = nn.Parameter(stored.packed.view(torch.float8_e4m3fn), requires_grad=False)
        self.absmax = nn.Parameter(stored.absmax.view(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("nested_absmax", stored.nested_absmax)
        self.register_buffer("nested_map", stored.nested_map)
        self.register_buffer("offset", stored.offset)
        self.register_buffer("row_scale", row_scale(stored, out_features, in_features))
        self.register_buffer("bias", bias)

    @classmethod
    def from_dense(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Nf4Linear:
        """Quantise a dense weight (out, in) on its device; `dtype` becomes the weight's. The bias is kept as it is."""
        out_features, in_features = weight.shape
        bias = None if bias is None else bias.detach()
        return cls(quantise(weight), bias, in_features=in_features, out_features=out_features, dtype=weight.dtype)

    @property
    def stored(self) -> Nf4Weight:
        """The five tensors of the quantised weight, as the kernels take them."""
        packed, absmax = self.packed.view(torch.uint8), self.absmax.view(torch.uint8)
        return Nf4Weight(packed, absmax, self.nested_absmax, self.nested_map, self.offset)

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight, made anew at each access: for models that read a linear layer's dtype or device."""
        return self.dense()

    def dense(self) -> torch.Tensor:
        """The dense weight (out, in) in `dtype`, a new tensor."""
        return dequantise([self.stored], [self.out_features], self.in_features, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) to (..., out), in x's dtype."""
        product: torch.Tensor = _Nf4Product.apply(x, *self.stored, self.out_features)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Nf4Product(torch.autograd.Function):
    """x W^T; the backward pass dequantises W again, as saving it would keep the dense model in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *stored_and_rows: Any) -> torch.Tensor:
        *stored, ctx.num_rows = stored_and_rows
        ctx.save_for_backward(*stored)
        return F.linear(x, dequantise([Nf4Weight(*stored)], [ctx.num_rows], x.shape[-1], x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        stored = Nf4Weight(*ctx.saved_tensors)
        num_columns = 2 * len(stored.packed) // ctx.num_rows
        dense = dequantise([stored], [ctx.num_rows], num_columns, gradient.dtype, in_backward=True)
        return gradient @ dense, *[None] * 6
