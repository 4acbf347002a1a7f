"""Frozen linear layers in every storage: their products, alone or fused with other layers of the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from flatout.errors import ResourceError, UsageError
from flatout.kernels.fp8 import fp8_problem
from flatout.kernels.fp8.reference import quantize_rows
from flatout.kernels.nf4 import dequantize, register_ops
from flatout.kernels.nf4.reference import Nf4Weight, quantize, row_scale
from flatout.models.bases.matmul import FrozenLinearFunction, FrozenMatmul, dense_matmul, fp8_matmul, nf4_matmul


class Fp8Linear(nn.Module):
    """A frozen linear layer with a float8 e4m3 weight, one scale per row; forward and input gradient in float8.

    Made from a weight (out, in) of any float dtype and its bias. `bytes` e4m3 (out, in) is a frozen parameter, which
    strategies can shard like any weight; `row_scale` fp32 (out,) and `bias` (out,) or None are buffers. `dtype` is that
    of `weight` and of all other arithmetic.
    """

    bytes: Tensor
    row_scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        quantized, scale = quantize_rows(weight.detach())
        self.bytes = nn.Parameter(quantized, requires_grad=False)
        self.register_buffer("row_scale", scale[:, 0])
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._matmul = fp8_matmul([self.out_features])

    @property
    def weight(self) -> Tensor:
        """The dense weight (out, in) in `dtype`, dequantized at each access."""
        return (self.bytes.float() * self.row_scale[:, None]).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        output: Tensor = FrozenLinearFunction.apply(x, self._matmul, self.row_scale, self.bytes)
        return output if self.bias is None else output + self.bias


class Nf4Linear(nn.Module):
    """A frozen linear layer stored in NF4 with double quantization (4.13 bits per weight), dequantized in every pass.

    `packed` and `absmax` are frozen parameters, so that strategies can shard them like any weight: the bytes of
    `Nf4Weight` viewed as float8, as FSDP2 supports integers only from torch 2.12. Buffers: nested_absmax fp32,
    nested_map fp32 (256,), offset fp32 (), row_scale fp32 (out,) for float8 products, bias (out,) or None. `dtype` is
    that of `weight`.
    """

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor
    nested_map: Tensor
    offset: Tensor
    row_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, stored: Nf4Weight, bias: Tensor | None, *, in_features: int, out_features: int, dtype: torch.dtype
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
    def from_dense(cls, weight: Tensor, bias: Tensor | None) -> Nf4Linear:
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
    def weight(self) -> Tensor:
        """The dense weight (out, in) in `dtype`, dequantized at each access."""
        return dequantize([self.stored], [self.out_features], self.in_features, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), in x's dtype; differentiable in x only."""
        product: Tensor = FrozenLinearFunction.apply(x, self._matmul, *self.stored)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


FrozenLinear = nn.Linear | Fp8Linear | Nf4Linear


def is_plain_linear(module: nn.Module) -> TypeGuard[FrozenLinear]:
    """Whether a module computes only x W.T + b; some routers inherit from nn.Linear and do more."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return isinstance(module, Fp8Linear | Nf4Linear)


def num_weights(model: nn.Module) -> int:
    """Count a model's weights; quantized weights count like dense ones."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, Fp8Linear | Nf4Linear):
            held = sum(parameter.numel() for parameter in module.parameters())
            total += module.in_features * module.out_features - held
    return total


def fuse_bases(
    bases: Sequence[FrozenLinear], *, fp8: bool, transposed: bool = False
) -> tuple[FrozenMatmul, list[Tensor]]:
    """Return one product for several frozen layers of the same input, and its tensors, whose memory the layers share.

    `fp8` multiplies NF4 weights in float8; float8 weights always are, and `transposed` keeps a second, transposed copy
    of their bytes for the backward pass, with bitwise equal results. Raises UsageError for layers of mixed storage, and
    ResourceError if the device or a layer's size does not support float8 products.
    """
    sizes, in_features = [base.out_features for base in bases], bases[0].in_features
    if isinstance(bases[0], Fp8Linear) or (fp8 and isinstance(bases[0], Nf4Linear)):
        device = next(bases[0].buffers()).device
        for size in sizes:
            if problem := fp8_problem(device, size, in_features):
                raise ResourceError(f"base.compute: {problem}; use base.storage: nf4 with base.compute: model")
    fp8_bases = [base for base in bases if isinstance(base, Fp8Linear)]
    nf4_bases = [base for base in bases if isinstance(base, Nf4Linear)]
    dense_bases = [base for base in bases if isinstance(base, nn.Linear)]
    if len(bases) not in (len(fp8_bases), len(nf4_bases), len(dense_bases)):
        kinds = ", ".join(type(base).__name__ for base in bases)
        raise UsageError(f"linear layers of one input have different storage ({kinds}); leave some out of lora.targets")
    if nf4_bases:
        scales = [torch.cat([base.row_scale for base in nf4_bases])] if fp8 else []
        stored = [tensor.detach() for base in nf4_bases for tensor in base.stored]
        return nf4_matmul(sizes, in_features, fp8=fp8), [*scales, *stored]
    if fp8_bases:
        scale = torch.cat([base.row_scale for base in fp8_bases])
        whole = torch.cat([base.bytes.detach() for base in fp8_bases])
        for base, part, own_scale in zip(fp8_bases, whole.split(sizes), scale.split(sizes), strict=True):
            base.bytes, base.row_scale = nn.Parameter(part, requires_grad=False), own_scale
        kept = [whole.t().contiguous()] if transposed else []
        return fp8_matmul(sizes, transposed=transposed), [scale, whole, *kept]
    whole = torch.cat([base.weight.detach() for base in dense_bases])
    for linear, part in zip(dense_bases, whole.split(sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return dense_matmul(sizes), [whole]
