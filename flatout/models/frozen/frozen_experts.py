"""Weights of all experts of a layer, frozen in every storage or trained, and their grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.errors import Fix, UsageError
from flatout.kernels.fp8_matmul import quantize_rows
from flatout.kernels.moe import Routing, grouped_linear, grouped_linear_dx, grouped_linear_fp8
from flatout.kernels.nf4 import dequantize, register_ops
from flatout.kernels.nf4.reference import BLOCK, NESTED_BLOCK, Nf4Weight, quantize


@dataclass(frozen=True)
class ExpertsMatmul:
    """Grouped products with one weight of all experts (E, out, in), which is stored as a list of tensors.

    `forward(x, storage, routing, **options)` and `backward(dy, storage, routing, **options)` take the options of
    `grouped_linear` and `grouped_linear_dx`. `input_scale(storage, in_backward)` is what sorted inputs are multiplied
    by in a float8 product before they are quantized, fp32 (E, K); None for other products. Then `quantized` is an
    option, see `grouped_linear_fp8`.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    input_scale: Callable[[Sequence[Tensor], bool], Tensor | None] = lambda storage, in_backward: None


DENSE = ExpertsMatmul(
    lambda x, storage, routing, **options: grouped_linear(x, storage[0], routing, **options),
    lambda dy, storage, routing, **options: grouped_linear_dx(dy, storage[0], routing, **options),
)


def _make_fp8_experts_matmul(scales_inputs: bool) -> ExpertsMatmul:
    """Storage: e4m3 (E, out, in), scales fp32 (E, in) if `scales_inputs`, otherwise (E, out)."""

    def scales(storage: Sequence[Tensor], in_backward: bool) -> dict[str, Any]:
        # the sides change in the backward pass
        return {"in_scale" if scales_inputs != in_backward else "out_scale": storage[1]}

    def forward(x: Tensor, storage: Sequence[Tensor], routing: Routing, **options: Any) -> Tensor:
        return grouped_linear_fp8(x, storage[0], routing, **scales(storage, False), **options)

    def backward(
        dy: Tensor, storage: Sequence[Tensor], routing: Routing, *, low_weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        low_weight = None if low_weight is None else low_weight.transpose(1, 2)
        turned = storage[0].transpose(1, 2)
        return grouped_linear_fp8(dy, turned, routing, **scales(storage, True), low_weight=low_weight, **options)

    return ExpertsMatmul(forward, backward, lambda *call: scales(*call).get("in_scale"))


def _cast_forward(x: Tensor, storage: Sequence[Tensor], routing: Routing, **options: Any) -> Tensor:
    quantized, scale = quantize_rows(storage[0])
    return grouped_linear_fp8(x, quantized, routing, out_scale=scale[..., 0], **options)


def _cast_backward(
    dy: Tensor, storage: Sequence[Tensor], routing: Routing, *, low_weight: Tensor | None = None, **options: Any
) -> Tensor:
    low_weight = None if low_weight is None else low_weight.transpose(1, 2)
    turned, scale = quantize_rows(storage[0].transpose(1, 2))
    return grouped_linear_fp8(dy, turned, routing, out_scale=scale[..., 0], low_weight=low_weight, **options)


# of a trained weight: e4m3 in each pass, with scales per output in the forward and per input in the backward pass
CAST_TO_FP8 = ExpertsMatmul(_cast_forward, _cast_backward)


def _make_nf4_experts_matmul(shape: tuple[int, int, int]) -> ExpertsMatmul:
    """Storage: the tensors of an Nf4Weight of (E * out, in); the dense weight is made for each product."""
    num_experts, num_out, num_in = shape

    def dense(storage: Sequence[Tensor], dtype: torch.dtype, in_backward: bool) -> Tensor:
        weight = dequantize([Nf4Weight(*storage)], [num_experts * num_out], num_in, dtype, in_backward=in_backward)
        return weight.view(shape)

    def forward(x: Tensor, storage: Sequence[Tensor], routing: Routing, **options: Any) -> Tensor:
        return grouped_linear(x, dense(storage, x.dtype, False), routing, **options)

    def backward(dy: Tensor, storage: Sequence[Tensor], routing: Routing, **options: Any) -> Tensor:
        return grouped_linear_dx(dy, dense(storage, dy.dtype, True), routing, **options)

    return ExpertsMatmul(forward, backward)


class FrozenExperts(nn.Module):
    """A quantized weight of all experts, in place of the parameter of the same name; `shape` is (E, out, in).

    `dtype` is that of `weight` and of all other arithmetic.
    """

    shape: torch.Size
    dtype: torch.dtype
    matmul: ExpertsMatmul

    @property
    def storage(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The dense weight (E, out, in) in `dtype`, dequantized at each access."""
        raise NotImplementedError

    def sliceable(self, num_parts: int) -> tuple[str, ...]:
        """Return the names of the tensors that hold all experts along their first dimension, to be cut in equal parts.

        Raises UsageError if these parts do not belong to whole experts.
        """
        raise NotImplementedError

    def set_num_experts(self, num_experts: int) -> None:
        """Take note that the tensors hold so many experts now."""
        self.shape = torch.Size((num_experts, *self.shape[1:]))

    @property
    def device(self) -> torch.device:
        return self.storage[0].device

    def extra_repr(self) -> str:
        return f"shape={tuple(self.shape)}"


class Fp8Experts(FrozenExperts):
    """Float8 e4m3 with one scale per output of each expert, or with `scales_inputs` per input; see `fp8_problem`.

    Scales of the summed side multiply x before it is quantized; the others multiply the product. Up projections have
    scales per output and down projections per input. Then the tensor with one row per token, x or the gradient of the
    layer's output, is quantized before it is gathered.
    """

    bytes: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, *, scales_inputs: bool) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        side = weight.detach().transpose(1, 2) if scales_inputs else weight.detach()
        quantized, scale = zip(*map(quantize_rows, side), strict=True)
        stacked = torch.stack(quantized)
        self.bytes = nn.Parameter(
            (stacked.transpose(1, 2) if scales_inputs else stacked).contiguous(), requires_grad=False
        )
        self.register_buffer("scale", torch.stack(scale)[..., 0])
        self.scales_inputs = scales_inputs
        self.matmul = _make_fp8_experts_matmul(scales_inputs)

    @property
    def storage(self) -> list[Tensor]:
        """The bytes (E, out, in) and the scales."""
        return [self.bytes, self.scale]

    def sliceable(self, num_parts: int) -> tuple[str, ...]:
        return ("bytes", "scale")

    @property
    def weight(self) -> Tensor:
        scale = self.scale[:, None, :] if self.scales_inputs else self.scale[:, :, None]
        return (self.bytes.float() * scale).to(self.dtype)


class HoldsNf4(nn.Module):
    """Holds a weight in NF4 with double quantization (4.13 bits per weight).

    `packed` and `absmax` are frozen parameters, so that strategies can shard them like any weight: the bytes of
    `Nf4Weight` viewed as float8, as FSDP2 supports integers only from torch 2.12. The rest are buffers.
    """

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor
    nested_map: Tensor
    offset: Tensor

    def hold(self, stored: Nf4Weight) -> None:
        """Take these tensors."""
        register_ops()
        self.packed = nn.Parameter(stored.packed.view(torch.float8_e4m3fn), requires_grad=False)
        self.absmax = nn.Parameter(stored.absmax.view(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("nested_absmax", stored.nested_absmax)
        self.register_buffer("nested_map", stored.nested_map)
        self.register_buffer("offset", stored.offset)

    @property
    def stored(self) -> Nf4Weight:
        """The five tensors of the quantized weight, as the kernels expect them."""
        packed, absmax = self.packed.view(torch.uint8), self.absmax.view(torch.uint8)
        return Nf4Weight(packed, absmax, self.nested_absmax, self.nested_map, self.offset)


class Nf4Experts(HoldsNf4, FrozenExperts):
    """Experts in NF4, quantized one at a time."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        self.hold(quantize(weight.detach().reshape(-1, weight.shape[2])))
        self.set_num_experts(len(weight))

    def sliceable(self, num_parts: int) -> tuple[str, ...]:
        """The codes and the scales of both levels; UsageError if a second-level block belongs to several parts."""
        num_values = self.shape.numel() // num_parts
        if num_values % (BLOCK * NESTED_BLOCK):
            raise UsageError(
                f"base.storage: nf4 scales {BLOCK * NESTED_BLOCK:,} values at once; {num_values:,} a rank do not fit",
                [Fix({"base.storage": "fp8"}), Fix({"base.storage": "model"})],
            )
        return "packed", "absmax", "nested_absmax"

    def set_num_experts(self, num_experts: int) -> None:
        super().set_num_experts(num_experts)
        self.matmul = _make_nf4_experts_matmul((num_experts, self.shape[1], self.shape[2]))

    @property
    def storage(self) -> list[Tensor]:
        return list(self.stored)

    @property
    def weight(self) -> Tensor:
        num_experts, num_out, num_in = self.shape
        return dequantize([self.stored], [num_experts * num_out], num_in, self.dtype).view(self.shape)
