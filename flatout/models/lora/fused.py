"""Fuse LoRA layers that read the same input: one frozen product and one pass over the input for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import UsageError, first_line
from flatout.models.bases.frozen_linear import fuse_bases
from flatout.models.bases.matmul import FrozenMatmul, blocks
from flatout.models.blocks import hidden_states
from flatout.models.lora.layer import LoraLinear, lora_layers
from flatout.models.packed import flatten_samples


class _FusedLora(torch.autograd.Function):
    """y_i = x W_i.T + (x A_i.T) B_i.T of all members i; x is (..., K).

    `narrow` (R, K) is all A concatenated, `narrow_t` its copy (K, R) or None, `wide` has the scaled B (see
    `blocks`). `rest` is the storage of the W, then the masters of all A and all B, which receive the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, narrow: Tensor, narrow_t: Tensor | None, wide: Tensor, product: FrozenMatmul,
        ranks: tuple[int, ...], scaling: float, *rest: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        storage, masters = rest[: -2 * len(ranks)], rest[-2 * len(ranks) :]
        low = F.linear(x, narrow)
        ctx.save_for_backward(x, low, narrow, narrow_t, wide, *storage)
        ctx.product, ctx.ranks, ctx.scaling, ctx.dtype = product, ranks, scaling, masters[0].dtype
        return tuple(product.outputs_with(product.forward(x, *storage), low, wide, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, narrow, narrow_t, wide, *storage = ctx.saved_tensors
        wides = blocks(wide, ctx.product.sizes, ctx.ranks)
        low_grad = torch.cat([grad @ own for grad, own in zip(grads, wides, strict=True)], dim=-1)
        x_grad = None
        if ctx.needs_input_grad[0]:
            operands = ctx.product.backward(grads, *storage)
            apart = narrow_t is None
            x_grad = operands.total(x) + low_grad @ narrow if apart else operands.total_with(low_grad, narrow_t)
        # summed over all tokens: (..., N), (..., K) to (N, K)
        narrow_grads = (low_grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.dtype).split(ctx.ranks)
        wide_grads = (
            (grad.flatten(0, -2).t() @ part.flatten(0, -2)).to(ctx.dtype) * ctx.scaling
            for grad, part in zip(grads, low.split(ctx.ranks, dim=-1), strict=True)
        )
        return x_grad, *(None,) * (6 + len(storage)), *narrow_grads, *wide_grads


class FusedLora(nn.Module):
    """Several LoRA layers with the same input, computed together when the first of them is called.

    The members keep their names and trained masters; their frozen weights share one storage. The products use copies
    of the masters in the compute dtype, which `FusedLayers.refresh` updates.
    """

    narrow: Tensor
    narrow_t: Tensor | None
    wide: Tensor

    def __init__(self, members: Sequence[LoraLinear], *, fp8: bool, transposed: bool) -> None:
        super().__init__()
        first = members[0]
        self.scaling = first.scaling
        self.ranks = tuple(member.rank for member in members)
        self.members = tuple(members)
        # an input, and the members' outputs for it
        self.pending: tuple[Tensor, tuple[Tensor, ...]] | None = None
        bases = [member.base for member in members]
        self.biases = [base.bias for base in bases]
        options: dict[str, Any] = {"dtype": first.compute_dtype, "device": first.lora_a.device}
        self.product, storage = fuse_bases(bases, fp8=fp8, transposed=transposed, ranks=self.ranks)
        self._num_storage = len(storage)
        for index, tensor in enumerate(storage):
            self.register_buffer(f"storage_{index}", tensor, persistent=False)
        rank, joined = sum(self.ranks), self.product.one_accumulator
        narrow_t = torch.zeros(first.in_features, rank, **options) if joined else None
        self.register_buffer("narrow", torch.zeros(rank, first.in_features, **options), persistent=False)
        self.register_buffer("narrow_t", narrow_t, persistent=False)
        width = rank if joined else max(self.ranks)
        self.register_buffer("wide", torch.zeros(sum(self.product.sizes), width, **options), persistent=False)
        for index, member in enumerate(members):
            member.computed_by = (self, index)
        # registered as a submodule once, so that it is counted once
        first.fused = self

    @property
    def wides(self) -> list[Tensor]:
        """Views of the copies of every B, times `scaling`."""
        return blocks(self.wide, self.product.sizes, self.ranks)

    def output(self, index: int, x: Tensor) -> Tensor:
        """Return member `index`'s output for x (..., K); the first member computes the outputs of all."""
        if index == 0:
            storage = [getattr(self, f"storage_{index}") for index in range(self._num_storage)]
            masters = [member.lora_a for member in self.members] + [member.lora_b for member in self.members]
            outputs = _FusedLora.apply(
                x, self.narrow, self.narrow_t, self.wide, self.product, self.ranks, self.scaling, *storage, *masters
            )
            biased = (y if bias is None else y + bias for y, bias in zip(outputs, self.biases, strict=True))
            self.pending = (x, tuple(biased))
        if self.pending is None or self.pending[0] is not x:
            raise UsageError("LoRA layers that shared an input at the start got different inputs; please report this")
        part = self.pending[1][index]
        if index == len(self.ranks) - 1:
            self.pending = None
        return part


class FusedLayers:
    """All fused layers of a model; call `refresh` after every change of the masters, before the next forward."""

    def __init__(self, fused: Sequence[FusedLora]) -> None:
        self._fused = tuple(fused)
        members = [member for group in fused for member in group.members]
        self._narrow_masters: list[Tensor] = [member.lora_a for member in members]
        self._wide_masters: list[Tensor] = [member.lora_b for member in members]
        self._scalings = [member.scaling for member in members]
        self._narrows = [narrow for group in fused for narrow in group.narrow.split(group.ranks)]
        self._wides = [wide for group in fused for wide in group.wides]
        narrow_t = [(group.narrow_t, group.narrow) for group in fused if group.narrow_t is not None]
        self._narrows_t = [own for own, _ in narrow_t]
        self._transposes = [narrow.t() for _, narrow in narrow_t]
        kinds = {group.product.describe for group in fused}
        self.report = f"{len(self._narrows)} layers run as {len(fused)} matmuls ({', '.join(sorted(kinds))})"
        if errors := [group.product.load_error for group in fused if group.product.load_error is not None]:
            why = first_line(errors[0])
            self.report += f"; adapters are added one by one, as the kernel for one accumulator fails: {why}"

    def forget(self) -> None:
        """Drop unused outputs of a failed forward pass, which keep its whole graph alive."""
        for group in self._fused:
            group.pending = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies that the products use from the trained masters."""
        if self._fused:
            torch._foreach_copy_(self._narrows, self._narrow_masters)
            torch._foreach_copy_(self._wides, torch._foreach_mul(self._wide_masters, self._scalings))
        if self._narrows_t:
            torch._foreach_copy_(self._narrows_t, self._transposes)


def fuse_layers(model: PreTrainedModel, *, fp8: bool = False, transposed: bool = False) -> FusedLayers:
    """Fuse the decoder's LoRA layers that are in the same module and read the same input tensor.

    They are found in one small forward pass, so this works for any architecture. Layers with dropout or DoRA, and those
    outside the decoder (an adapted head), are not fused. `fp8` and `transposed` are those of `fuse_bases`. Results
    change by rounding only.
    """
    layers = {name: layer for name, layer in lora_layers(model).items() if isinstance(layer, LoraLinear)}
    # hold the tensors themselves, as the id of a freed one may be reused
    inputs: dict[str, Tensor | None] = {}

    def record(name: str, x: Tensor) -> None:
        # a layer that is called more than once is not fused
        inputs[name] = None if name in inputs else x

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: record(name, args[0]))
        for name, layer in layers.items()
    ]
    # a row, which every model takes
    batch = flatten_samples([(np.arange(16), np.ones(16, bool))], row_length=16).to(model.device)
    was_training = model.training
    try:
        with torch.no_grad():
            hidden_states(model.eval(), batch)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[str, int, float], list[LoraLinear]] = {}
    # in call order, as the first member computes for all
    for name, x in inputs.items():
        if x is not None and not layers[name].dropout and layers[name].magnitude is None:
            key = (name.rpartition(".")[0], id(x), layers[name].scaling)
            groups.setdefault(key, []).append(layers[name])
    fused = FusedLayers([FusedLora(members, fp8=fp8, transposed=transposed) for members in groups.values()])
    fused.refresh()
    return fused
