"""A frozen linear layer whose weight is stored in NF4 with double quantization (4.13 bits per weight)."""

from __future__ import annotations

import torch
from torch import nn

from flatout.kernels.nf4 import Nf4Weight, dequantize, quantize, register_ops, row_scale
from flatout.models.bases.matmul import FrozenLinearFunction, nf4_matmul


class Nf4Linear(nn.Module):
    """y = x W^T + bias with W (out, in) dequantized in every pass and never saved; differentiable in x only.

    `packed` and `absmax` are frozen parameters, so that strategies can shard them like any weight: the bytes of
    `Nf4Weight` viewed as float8, as FSDP2 supports integers only from torch 2.12. Buffers: nested_absmax fp32,
    nested_map fp32 (256,), offset fp32 (), row_scale fp32 (out,) for float8 products, bias (out,) or None. `dtype` is
    that of `weight`.
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
        self._matmul = nf4_matmul([out_features], in_features)

    @classmethod
    def from_dense(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Nf4Linear:
        """Quantize a dense weight (out, in) on its device; `dtype` becomes the weight's. The bias is not quantized."""
        out_features, in_features = weight.shape
        bias = None if bias is None else bias.detach()
        return cls(quantize(weight), bias, in_features=in_features, out_features=out_features, dtype=weight.dtype)

    @property
    def stored(self) -> Nf4Weight:
        """The five tensors of the quantized weight, as the kernels expect them."""
        packed, absmax = self.packed.view(torch.uint8), self.absmax.view(torch.uint8)
        return Nf4Weight(packed, absmax, self.nested_absmax, self.nested_map, self.offset)

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight (out, in) in `dtype`, dequantized at each access."""
        return dequantize([self.stored], [self.out_features], self.in_features, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., in) to (..., out), in x's dtype."""
        product: torch.Tensor = FrozenLinearFunction.apply(x, self._matmul, *self.stored)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
