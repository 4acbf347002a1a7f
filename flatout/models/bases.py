"""Frozen weights of linear layers in every storage: their products, alone and joined with others of one input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.errors import ResourceError, UsageError
from flatout.kernels.fp8 import fp8_problem, quantise_rows, scaled_product
from flatout.kernels.nf4 import Nf4Weight, dequantise, dequantise_fp8
from flatout.models.nf4 import Nf4Linear


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight is float8 e4m3 with one scale a row; forward and input gradient in float8.

    `bytes` e4m3 (out, in) is a frozen parameter, which strategies cut like any weight; `row_scale` fp32 (out,) and
    `bias` (out,) or None are buffers. `dtype` is what it stands for and computes with outside the products.
    """

    bytes: Tensor
    row_scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        quantised, scale = quantise_rows(weight.detach())
        self.bytes = nn.Parameter(quantised, requires_grad=False)
        self.register_buffer("row_scale", scale[:, 0])
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None) -> Fp8Linear:
        """From a weight (out, in) of any float dtype and its bias."""
        return cls(weight, bias)

    @property
    def weight(self) -> Tensor:
        """What the bytes stand for, (out, in) in `dtype`; made anew at every call."""
        return (self.bytes.float() * self.row_scale[:, None]).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        output: Tensor = _Fp8Product.apply(x, self.bytes, self.row_scale)
        return output if self.bias is None else output + self.bias


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row_scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, row_scale)
        return _fp8_forward(x, weight, row_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, row_scale = ctx.saved_tensors
        return _fp8_backward(grads, weight.t().contiguous(), row_scale), None, None


FROZEN_LINEARS = (nn.Linear, Fp8Linear, Nf4Linear)
FrozenLinear = nn.Linear | Fp8Linear | Nf4Linear


def num_weights(model: nn.Module) -> int:
    """Parameters of a model, quantised ones as many as they stand for."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, (Fp8Linear, Nf4Linear)):
            held = sum(parameter.numel() for parameter in module.parameters())
            total += module.in_features * module.out_features - held
    return total


@dataclass(frozen=True)
class FrozenProduct:
    """Products with several frozen weights W_i (N_i, K) of one input, kept as some tensors.

    `forward(x (..., K), *storage)` gives x W_i.T for each i; `backward(gradients (..., N_i), *storage)` the sum of
    dY_i W_i. `describe` is a word for the console.
    """

    describe: str
    forward: Callable[..., Sequence[Tensor]]
    backward: Callable[..., Tensor]


def join_bases(bases: Sequence[FrozenLinear], *, fp8: bool, turned: bool = False) -> tuple[FrozenProduct, list[Tensor]]:
    """One product for several frozen layers of one input, and the tensors it works on; the layers share their memory.

    `fp8` multiplies NF4 weights in float8; float8 weights always are, and `turned` keeps a second, turned copy of their
    bytes for the backward pass. Raises UsageError for layers of mixed storage, and ResourceError where the device or a
    layer's size has no float8 products.
    """
    sizes, in_features = [base.out_features for base in bases], bases[0].in_features
    if isinstance(bases[0], Fp8Linear) or (fp8 and isinstance(bases[0], Nf4Linear)):
        device = next(bases[0].buffers()).device
        for size in sizes:
            if problem := fp8_problem(device, size, in_features):
                raise ResourceError(f"base.compute: {problem}; use base.storage: nf4 with base.compute: model")
    if all(isinstance(base, Fp8Linear) for base in bases):
        return _join_fp8(cast(Sequence[Fp8Linear], bases), sizes, turned=turned)
    if all(isinstance(base, Nf4Linear) for base in bases):
        return _join_nf4(cast(Sequence[Nf4Linear], bases), sizes, in_features, fp8=fp8)
    if not all(isinstance(base, nn.Linear) for base in bases):
        kinds = ", ".join(type(base).__name__ for base in bases)
        raise UsageError(f"linear layers of one input have different storage ({kinds}); leave some out of lora.targets")
    return _join_dense(cast(Sequence[nn.Linear], bases), sizes)


def _join_dense(bases: Sequence[nn.Linear], sizes: list[int]) -> tuple[FrozenProduct, list[Tensor]]:
    whole = torch.cat([base.weight.detach() for base in bases])
    for base, part in zip(bases, whole.split(sizes), strict=True):
        base.weight = nn.Parameter(part, requires_grad=False)

    def forward(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        return _split(F.linear(x, weight), sizes)

    def backward(grads: Sequence[Tensor], weight: Tensor) -> Tensor:
        return _dense_backward(grads, weight.split(sizes))

    return FrozenProduct("dense", forward, backward), [whole]


def _join_fp8(bases: Sequence[Fp8Linear], sizes: list[int], *, turned: bool) -> tuple[FrozenProduct, list[Tensor]]:
    storage = [torch.cat([base.bytes.detach() for base in bases]), torch.cat([base.row_scale for base in bases])]
    for base, weight, scale in zip(bases, storage[0].split(sizes), storage[1].split(sizes), strict=True):
        base.bytes, base.row_scale = nn.Parameter(weight, requires_grad=False), scale

    def forward(x: Tensor, weight: Tensor, scale: Tensor, *_: Tensor) -> Sequence[Tensor]:
        return _split(_fp8_forward(x, weight, scale), sizes)

    def backward(grads: Sequence[Tensor], weight: Tensor, scale: Tensor) -> Tensor:
        # turned in scratch memory, one layer at a time: for when the plan found no room for a second copy
        return _fp8_backward(grads, weight.t().contiguous(), scale)

    def backward_turned(grads: Sequence[Tensor], weight: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
        return _fp8_backward(grads, kept, scale)

    if turned:
        storage.append(storage[0].t().contiguous())
        return FrozenProduct("float8, turned once", forward, backward_turned), storage
    return FrozenProduct("float8", forward, backward), storage


def _join_nf4(
    bases: Sequence[Nf4Linear], sizes: list[int], in_features: int, *, fp8: bool
) -> tuple[FrozenProduct, list[Tensor]]:
    """4-bit weights keep their own tensors (each has its own offset) and are dequantised into one for each product."""
    fields = len(Nf4Weight._fields)

    def weights(tensors: Sequence[Tensor]) -> list[Nf4Weight]:
        return [Nf4Weight(*tensors[start : start + fields]) for start in range(0, fields * len(sizes), fields)]

    def forward(x: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        dense = dequantise(weights(tensors), sizes, in_features, x.dtype)
        return _split(F.linear(x, dense), sizes)

    def backward(grads: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        dense = dequantise(weights(tensors), sizes, in_features, grads[0].dtype, in_backward=True)
        return _dense_backward(grads, dense.split(sizes))

    def forward_fp8(x: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        scale = tensors[-1]
        weight = dequantise_fp8(weights(tensors), scale.split(sizes), sizes, in_features)
        return _split(_fp8_forward(x, weight, scale), sizes)

    def backward_fp8(grads: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        scale = tensors[-1]
        turned = dequantise_fp8(
            weights(tensors), scale.split(sizes), sizes, in_features, transposed=True, in_backward=True
        )
        return _fp8_backward(grads, turned, scale)

    stored = [tensor.detach() for base in bases for tensor in base.stored]
    if not fp8:
        return FrozenProduct("4-bit", forward, backward), stored
    return FrozenProduct("4-bit, float8 products", forward_fp8, backward_fp8), [
        *stored,
        torch.cat([base.row_scale for base in bases]),
    ]


def _split(output: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = output.split(sizes, dim=-1)
    return parts


def _dense_backward(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total = total + grad @ weight
    return total


def _fp8_forward(x: Tensor, weight: Tensor, row_scale: Tensor) -> Tensor:
    """x (..., K) @ W.T for W = weight * row_scale: weight e4m3 (N, K), row_scale fp32 (N,)."""
    quantised, scale = quantise_rows(x.reshape(-1, x.shape[-1]))
    product = scaled_product(quantised, weight, scale, row_scale, x.dtype)
    return product.view(*x.shape[:-1], len(row_scale))


def _fp8_backward(grads: Sequence[Tensor], turned: Tensor, row_scale: Tensor) -> Tensor:
    """The sum of dY_i W_i from the bytes of all W the other way round, `turned` (K, sum of N_i).

    The weights' scale of each output is folded into the gradient before that is quantised, so the bytes of the
    forward serve the backward: dX = (dY * row_scale) @ bytes.
    """
    sizes = [grad.shape[-1] for grad in grads]
    ones = torch.ones(len(turned), dtype=torch.float32, device=turned.device)
    total = None
    for grad, weight, scale in zip(grads, turned.split(sizes, dim=1), row_scale.split(sizes), strict=True):
        quantised, grad_scale = quantise_rows((grad * scale.to(grad.dtype)).reshape(-1, grad.shape[-1]))
        product = scaled_product(quantised, weight, grad_scale, ones, grad.dtype).view(*grad.shape[:-1], len(turned))
        total = product if total is None else total + product
    assert total is not None
    return total
