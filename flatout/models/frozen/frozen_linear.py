"""Frozen linear layers in every storage, and their products, alone or fused with other layers of the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatout.errors import Fix, ResourceError, UsageError
from flatout.kernels import low_rank, segmented
from flatout.kernels.fp8_matmul import bounded_scales, fp8_problem, quantize_rows, quantize_weight
from flatout.kernels.nf4 import dequantize
from flatout.kernels.nf4.reference import Nf4Weight, quantize, row_scale
from flatout.models.frozen.frozen_experts import FrozenExperts, HoldsNf4
from flatout.models.frozen.matmul import FrozenLinearFunction, FrozenMatmul, Operands


def _make_fp8_matmul(sizes: list[int]) -> FrozenMatmul:
    """Storage: scales fp32 (sum of N_i,) and e4m3 (sum of N_i, K)."""

    def weight(storage: Sequence[Tensor], in_backward: bool) -> Tensor:
        return storage[1].t().contiguous() if in_backward else storage[1]

    return _make_scaled_matmul("float8", sizes, weight)


def _make_nf4_matmul(sizes: list[int], in_features: int, *, fp8: bool = False) -> FrozenMatmul:
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

    if fp8:
        return _make_scaled_matmul("4-bit, float8 matmuls", sizes, in_float8)
    return _make_dense_matmul("4-bit", sizes, dense)


def _make_dense_matmul(
    describe: str, sizes: list[int], weight: Callable[[Sequence[Tensor], torch.dtype, bool], Tensor]
) -> FrozenMatmul:
    """Make a FrozenMatmul; `weight` turns the storage into (sum of N_i, K) in a dtype, for the backward pass or not."""
    return FrozenMatmul(
        describe,
        sizes,
        lambda x, *storage: Operands([x], [weight(storage, x.dtype, False)]),
        lambda grads, *storage: Operands(grads, weight(storage, grads[0].dtype, True).split(sizes), weights_kn=True),
    )


# of one layer of any size
_DENSE = FrozenMatmul(
    "dense",
    [],
    lambda x, weight: Operands([x], [weight]),
    lambda grads, weight: Operands(grads, [weight], weights_kn=True),
)


def _make_scaled_matmul(
    describe: str, sizes: list[int], weight: Callable[[Sequence[Tensor], bool], Tensor]
) -> FrozenMatmul:
    """Storage begins with the outputs' scales; `weight` makes e4m3 (sum of N_i, K), in backward (K, sum of N_i)."""

    def forward(x: Tensor, *storage: Tensor) -> Operands:
        quantized, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        return Operands([quantized], [weight(storage, False)], [scale], [storage[0]])

    def backward(grads: Sequence[Tensor], *storage: Tensor) -> Operands:
        # the outputs' scales are folded into the gradient before it is quantized, so the backward pass can use the
        # forward's bytes: dX = (dY * row_scale) @ bytes
        transposed = weight(storage, True)
        ones = torch.ones(len(transposed), dtype=torch.float32, device=transposed.device)
        scaled = [grad * scale.to(grad.dtype) for grad, scale in zip(grads, storage[0].split(sizes), strict=True)]
        return _quantized(scaled, transposed.split(sizes, dim=1), [ones] * len(sizes))

    return FrozenMatmul(describe, sizes, forward, backward, fp8_forward=True, fp8_backward=True)


def _make_fp8_backward_matmul(sizes: list[int]) -> FrozenMatmul:
    """Storage: dense (sum of N_i, K), a copy e4m3 (K, N_i) of each W_i, its scales fp32 (K,), and perhaps a bias.

    Only the input gradient is in float8. A scale is that of a column of W_i, so it multiplies the product, and the
    gradient is quantized as it is.
    """
    copies, scales = slice(1, 1 + len(sizes)), slice(1 + len(sizes), 1 + 2 * len(sizes))
    return FrozenMatmul(
        "dense, float8 input gradients",
        sizes,
        lambda x, *storage: Operands([x], [storage[0]], bias=next(iter(storage[scales.stop :]), None)),
        lambda grads, *storage: _quantized(grads, storage[copies], storage[scales]),
        fp8_backward=True,
    )


def _quantized(grads: Sequence[Tensor], transposed: Sequence[Tensor], scales: Sequence[Tensor]) -> Operands:
    """Return the operands of the sum of dY_i W_i (T, K): gradients dY_i (..., N_i) are quantized by row.

    W_i are `transposed` e4m3 (K, N_i) with `scales` fp32 (K,).
    """
    rows = [quantize_rows(grad.reshape(-1, grad.shape[-1])) for grad in grads]
    return Operands([part for part, _ in rows], transposed, [scale for _, scale in rows], scales)


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
        quantized, scale = quantize_weight(weight.detach())
        self.bytes = nn.Parameter(quantized, requires_grad=False)
        self.register_buffer("row_scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.matmul = _make_fp8_matmul([self.out_features])

    @property
    def weight(self) -> Tensor:
        """The dense weight (out, in) in `dtype`, dequantized at each access."""
        return (self.bytes.float() * self.row_scale[:, None]).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = FrozenLinearFunction.apply(x, self.matmul, self.row_scale, self.bytes)
        return output if self.bias is None else output + self.bias


class Fp8BackwardLinear(nn.Linear):
    """A frozen linear layer with an exact forward pass, whose input gradient is a float8 product (`base.backward`).

    It takes over the weight (out, in) and bias of `linear`. Beside them it keeps `transposed` e4m3 (in, out), a
    quantized copy of the weight, and its scales, `column_scale` fp32 (in,); neither is saved.
    """

    transposed: Tensor
    column_scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        transposed, scale = quantize_rows(linear.weight.detach().t().contiguous())
        self.register_buffer("transposed", transposed, persistent=False)
        self.register_buffer("column_scale", scale[:, 0], persistent=False)
        self.matmul = _make_fp8_backward_matmul([self.out_features])

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), bitwise as nn.Linear does; differentiable in x only."""
        bias = () if self.bias is None else (self.bias,)
        return FrozenLinearFunction.apply(x, self.matmul, self.weight, self.transposed, self.column_scale, *bias)


class Nf4Linear(HoldsNf4):
    """A frozen linear layer stored in NF4, dequantized in every pass.

    More buffers are row_scale fp32 (out,) for float8 products and bias (out,) or None. `dtype` is that of `weight`.
    """

    row_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, stored: Nf4Weight, bias: Tensor | None, *, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.hold(stored)
        self.register_buffer("row_scale", bounded_scales(row_scale(stored, out_features, in_features)))
        self.register_buffer("bias", bias)
        self.matmul = _make_nf4_matmul([out_features], in_features)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None) -> Nf4Linear:
        """Quantize a dense weight (out, in) on its device; `dtype` becomes the weight's. The bias is not quantized."""
        out_features, in_features = weight.shape
        bias = None if bias is None else bias.detach()
        return cls(quantize(weight), bias, in_features=in_features, out_features=out_features, dtype=weight.dtype)

    @property
    def weight(self) -> Tensor:
        """The dense weight (out, in) in `dtype`, dequantized at each access."""
        return dequantize([self.stored], [self.out_features], self.in_features, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), in x's dtype; differentiable in x only."""
        product: Tensor = FrozenLinearFunction.apply(x, self.matmul, *self.stored)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


FrozenLinear = nn.Linear | Fp8Linear | Nf4Linear


def is_plain_linear(module: nn.Module) -> TypeGuard[FrozenLinear]:
    """Whether a module computes only x W.T + b; some routers inherit from nn.Linear and do more."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return isinstance(module, Fp8Linear | Nf4Linear)


def product_of(base: FrozenLinear) -> tuple[FrozenMatmul, list[Tensor]]:
    """Return the product of one frozen layer, without its bias, and the tensors that it takes."""
    if isinstance(base, Fp8BackwardLinear):
        return base.matmul, [base.weight, base.transposed, base.column_scale]
    if isinstance(base, Fp8Linear):
        return base.matmul, [base.row_scale, base.bytes]
    return (base.matmul, list(base.stored)) if isinstance(base, Nf4Linear) else (_DENSE, [base.weight])


def num_weights(model: nn.Module) -> int:
    """Count a model's weights; quantized weights count like dense ones."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, Fp8Linear | Nf4Linear | FrozenExperts):
            count = sum(parameter.numel() for parameter in module.parameters())
            dense = (
                module.shape.numel() if isinstance(module, FrozenExperts) else module.in_features * module.out_features
            )
            total += dense - count
    return total


def fuse_frozen(
    layers: Sequence[FrozenLinear], *, fp8: bool, ranks: Sequence[int] = ()
) -> tuple[FrozenMatmul, list[Tensor]]:
    """Return one product for several frozen layers of the same input, and its tensors, whose memory the layers share.

    `fp8` multiplies NF4 weights in float8; float8 weights always are. One kernel computes products and adapters of
    these `ranks` where there is one. Raises UsageError for layers of mixed storage, and ResourceError if the device or
    a layer's size does not support float8 products.
    """
    sizes, in_features, first = [base.out_features for base in layers], layers[0].in_features, layers[0]
    device, dtype = next(first.parameters()).device, first.weight.dtype if isinstance(first, nn.Linear) else first.dtype
    low_rank.register_ops()
    fits = bool(ranks) and segmented.fits(device, dtype, sizes, in_features, ranks)
    load_error = segmented.load_error(device, fp8=fp8 or isinstance(first, Fp8Linear)) if fits else None
    one_accumulator = fits and load_error is None
    backward = [base for base in layers if isinstance(base, Fp8BackwardLinear)]
    if len(layers) == len(backward) > 1:
        # quantized again, as one sum needs the same scales (K,) for all layers
        quantized, scale = quantize_rows(torch.cat([base.weight.detach() for base in backward]).t())
        for base, part in zip(backward, quantized.split([base.out_features for base in backward], dim=1), strict=True):
            base.transposed.copy_(part)
            base.column_scale.copy_(scale[:, 0])
    matmul, storage = _joined(layers, fp8=fp8)
    if one_accumulator:
        matmul = replace(matmul, describe=f"{matmul.describe}, one accumulator", one_accumulator=True)
    return replace(matmul, load_error=load_error), storage


def _joined(layers: Sequence[FrozenLinear], *, fp8: bool) -> tuple[FrozenMatmul, list[Tensor]]:
    sizes, in_features = [base.out_features for base in layers], layers[0].in_features
    if isinstance(layers[0], Fp8Linear) or (fp8 and isinstance(layers[0], Nf4Linear)):
        device = next(layers[0].buffers()).device
        for size in sizes:
            if problem := fp8_problem(device, size, in_features):
                raise ResourceError(f"base.compute: {problem}", [Fix({"base.storage": "nf4", "base.compute": "model"})])
    fp8_layers = [base for base in layers if isinstance(base, Fp8Linear)]
    nf4_layers = [base for base in layers if isinstance(base, Nf4Linear)]
    backward_layers = [base for base in layers if isinstance(base, Fp8BackwardLinear)]
    dense_layers = [base for base in layers if isinstance(base, nn.Linear)]
    num_plain = len(dense_layers) - len(backward_layers)
    if len(layers) not in (len(fp8_layers), len(nf4_layers), len(backward_layers), num_plain):
        kinds = ", ".join(type(base).__name__ for base in layers)
        raise UsageError(f"linear layers of one input differ in storage ({kinds}); remove some from lora.targets")
    if nf4_layers:
        scales = [torch.cat([base.row_scale for base in nf4_layers])] if fp8 else []
        stored = [tensor.detach() for base in nf4_layers for tensor in base.stored]
        return _make_nf4_matmul(sizes, in_features, fp8=fp8), [*scales, *stored]
    if fp8_layers:
        scale = torch.cat([base.row_scale for base in fp8_layers])
        fused = torch.cat([base.bytes.detach() for base in fp8_layers])
        for base, part, own_scale in zip(fp8_layers, fused.split(sizes), scale.split(sizes), strict=True):
            base.bytes, base.row_scale = nn.Parameter(part, requires_grad=False), own_scale
        return _make_fp8_matmul(sizes), [scale, fused]
    fused = torch.cat([base.weight.detach() for base in dense_layers])
    for linear, part in zip(dense_layers, fused.split(sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    if backward_layers:
        copies = [base.transposed for base in backward_layers] + [base.column_scale for base in backward_layers]
        return _make_fp8_backward_matmul(sizes), [fused, *copies]
    return _make_dense_matmul("dense", sizes, lambda storage, dtype, in_backward: storage[0]), [fused]
