"""Fuse LoRA layers that read the same input: one frozen product and one pass over the input for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import UsageError, first_line
from flatout.kernels import low_rank
from flatout.kernels.low_rank.reference import MatrixCopy
from flatout.models.blocks import hidden_states
from flatout.models.frozen.frozen_linear import fuse_frozen
from flatout.models.frozen.matmul import FrozenMatmul, blocks
from flatout.models.lora.layer import LoraLinear, lora_layers, over_tokens
from flatout.models.packed import flatten_samples
from flatout.models.probe import evaluating


class _Copies(NamedTuple):
    """An adapted group's matrices in the forms that its matmuls read; a field is None if no matmul reads it.

    a (R, K) is all A concatenated, a_t its copy (K, R); b has the scaled B (see `blocks`). a_terms e4m3 (2, R, K) with
    a_scales fp32 (1, R), and b_terms (2, largest r_i, sum of N_i) with b_scales (number of members, largest r_i), are A
    and the transposed scaled B for `low_rank_product`.
    """

    b: Tensor
    a: Tensor | None
    a_t: Tensor | None
    a_terms: Tensor | None
    a_scales: Tensor | None
    b_terms: Tensor | None
    b_scales: Tensor | None


class _FusedLora(torch.autograd.Function):
    """y_i = x W_i.T + (x A_i.T) B_i.T of all members i; x is (..., K).

    `rest` is the `_Copies`, the storage of the W, then the masters of all A and all B, which receive the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, product: FrozenMatmul, ranks: tuple[int, ...], scaling: float, *rest: Any
    ) -> tuple[Tensor, ...]:
        num_copies = len(_Copies._fields)
        copies, storage = _Copies(*rest[:num_copies]), rest[num_copies : -2 * len(ranks)]
        operands = product.forward(x, *storage)
        if copies.a_terms is not None and copies.a_scales is not None:
            low = operands.low_rank(copies.a_terms, copies.a_scales, [sum(ranks)], [x])
        else:
            assert copies.a is not None
            low = F.linear(x, copies.a)
        ctx.save_for_backward(x, low, *copies, *storage)
        ctx.product, ctx.ranks, ctx.scaling, ctx.dtype = product, ranks, scaling, rest[-1].dtype
        return tuple(product.outputs_with(operands, low, copies.b, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, *rest = ctx.saved_tensors
        num_copies = len(_Copies._fields)
        copies, storage = _Copies(*rest[:num_copies]), rest[num_copies:]
        operands = ctx.product.backward(grads, *storage) if ctx.needs_input_grad[0] else None
        if operands is not None and copies.b_terms is not None and copies.b_scales is not None:
            low_grad = operands.low_rank(copies.b_terms, copies.b_scales, ctx.ranks, grads)
        else:
            all_b = blocks(copies.b, ctx.product.sizes, ctx.ranks)
            low_grad = torch.cat([grad @ b for grad, b in zip(grads, all_b, strict=True)], dim=-1)
        x_grad = None
        if operands is not None:
            a_t = copies.a.t() if copies.a_t is None and copies.a is not None else copies.a_t
            assert a_t is not None
            (x_grad,) = operands.multiply_with_lora(low_grad, a_t, use_kernel=ctx.product.one_accumulator)
        low_grad = low_grad.flatten(0, -2)
        a_grad = over_tokens(low_grad, x, ctx.dtype)
        lows = low.flatten(0, -2).split(ctx.ranks, dim=-1)
        b_grads = [over_tokens(grad, low_part, ctx.dtype) for grad, low_part in zip(grads, lows, strict=True)]
        b_grads = b_grads if ctx.scaling == 1 else [grad * ctx.scaling for grad in b_grads]
        return x_grad, *(None,) * (3 + len(rest)), *a_grad.split(ctx.ranks), *b_grads


class FusedLora(nn.Module):
    """Several LoRA layers with the same input, computed together when the first of them is called.

    The members keep their names and trained masters; their frozen weights share one storage. The products use copies
    of the masters in the compute dtype, which `FusedLayers.refresh` updates.
    """

    def __init__(self, members: Sequence[LoraLinear], *, fp8: bool) -> None:
        super().__init__()
        first = members[0]
        self.scaling = first.scaling
        self.ranks = tuple(member.rank for member in members)
        self.members = tuple(members)
        # an input, and the members' outputs for it
        self.pending: tuple[Tensor, tuple[Tensor, ...]] | None = None
        bases = [member.base for member in members]
        self.biases = [base.bias for base in bases]
        self.product, storage = fuse_frozen(bases, fp8=fp8, ranks=self.ranks)
        self._num_storage = len(storage)
        for index, tensor in enumerate(storage):
            self.register_buffer(f"storage_{index}", tensor, persistent=False)
        for name, copy in self._empty_copies()._asdict().items():
            self.register_buffer(name, copy, persistent=False)
        for index, member in enumerate(members):
            member.computed_by = (self, index)
        # registered as a submodule once, so that it is counted once
        first.fused = self

    def _empty_copies(self) -> _Copies:
        first, rank, columns = self.members[0], sum(self.ranks), sum(self.product.sizes)
        depth, dtype, device = first.in_features, first.compute_dtype, first.lora_a.device
        joined = self.product.one_accumulator
        in_terms = joined and low_rank.fits(device, dtype, rank)
        terms_forward, terms_backward = (
            in_terms and float8 for float8 in (self.product.fp8_forward, self.product.fp8_backward)
        )

        def zeros(*shape: int, dtype: torch.dtype = dtype, needed: bool = True) -> Tensor | None:
            return torch.zeros(*shape, dtype=dtype, device=device) if needed else None

        fp8, scale_dtype, largest = torch.float8_e4m3fn, torch.float32, max(self.ranks)
        return _Copies(
            b=torch.zeros(columns, rank if joined else largest, dtype=dtype, device=device),
            a=zeros(rank, depth, needed=not terms_forward),
            a_t=zeros(depth, rank, needed=joined),
            a_terms=zeros(2, rank, depth, dtype=fp8, needed=terms_forward),
            a_scales=zeros(1, rank, dtype=scale_dtype, needed=terms_forward),
            b_terms=zeros(2, largest, columns, dtype=fp8, needed=terms_backward),
            b_scales=zeros(len(self.ranks), largest, dtype=scale_dtype, needed=terms_backward),
        )

    @property
    def _copies(self) -> _Copies:
        return _Copies(*(getattr(self, name) for name in _Copies._fields))

    def matrix_copies(self) -> list[MatrixCopy]:
        """Describe how to write the copies from the masters."""
        copies, current, rank, column = self._copies, [], 0, 0
        all_b = blocks(copies.b, self.product.sizes, self.ranks)
        for index, (member, b) in enumerate(zip(self.members, all_b, strict=True)):
            ranks, columns = slice(rank, rank + member.rank), slice(column, column + member.out_features)
            targets = [] if copies.a is None else [copies.a[ranks]]
            targets += [] if copies.a_t is None else [copies.a_t[:, ranks].t()]
            a_copy = MatrixCopy(member.lora_a, 1.0, targets)
            if copies.a_terms is not None and copies.a_scales is not None:
                a_copy = a_copy._replace(terms=copies.a_terms[:, ranks], scales=copies.a_scales[0, ranks])
            b_copy = MatrixCopy(member.lora_b, member.scaling, [b.t()], transposed=True)
            if copies.b_terms is not None and copies.b_scales is not None:
                divisor = None
                if self.product.fp8_forward:  # the weights' scales, rounded as when they multiply outputs' gradients
                    divisor = self.get_buffer("storage_0")[columns].to(member.compute_dtype).float()
                terms, scales = copies.b_terms[:, : member.rank, columns], copies.b_scales[index, : member.rank]
                b_copy = b_copy._replace(terms=terms, scales=scales, divisor=divisor)
            current += [a_copy, b_copy]
            rank, column = ranks.stop, columns.stop
        return current

    def output(self, index: int, x: Tensor) -> Tensor:
        """Return member `index`'s output for x (..., K); the first member computes the outputs of all."""
        if index == 0:
            storage = [getattr(self, f"storage_{index}") for index in range(self._num_storage)]
            masters = [member.lora_a for member in self.members] + [member.lora_b for member in self.members]
            outputs = _FusedLora.apply(x, self.product, self.ranks, self.scaling, *self._copies, *storage, *masters)
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
        num_layers = sum(len(group.members) for group in fused)
        self._copies = low_rank.MatrixCopies([copy for group in fused for copy in group.matrix_copies()])
        kinds = {group.product.describe for group in fused}
        self.report = f"{num_layers} layers run as {len(fused)} matmuls ({', '.join(sorted(kinds))})"
        if errors := [group.product.load_error for group in fused if group.product.load_error is not None]:
            why = first_line(errors[0])
            self.report += f"; torch's products sum layers and adapters, as the kernel for one accumulator fails: {why}"

    def forget(self) -> None:
        """Drop unused outputs of a failed forward pass, which keep its whole graph alive."""
        for group in self._fused:
            group.pending = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies that the products use from the trained masters."""
        self._copies.write()


def fuse_layers(model: PreTrainedModel, *, fp8: bool = False) -> FusedLayers:
    """Fuse the decoder's LoRA layers that are in the same module and read the same input tensor.

    They are found in one small forward pass, so this works for any architecture. Layers with dropout or DoRA, and those
    outside the decoder (an adapted head), are not fused. `fp8` is that of `fuse_frozen`. Results change by
    rounding only.
    """
    layers = {name: layer for name, layer in lora_layers(model).items() if isinstance(layer, LoraLinear)}
    # hold the tensors themselves, as the id of a freed one may be reused
    inputs: dict[str, Tensor | None] = {}

    def record(name: str, x: Tensor) -> None:
        # a layer that is called more than once is not fused
        inputs[name] = None if name in inputs else x

    # a row, which every model takes
    batch = flatten_samples([(np.arange(16), np.ones(16, bool))], row_length=16).to(model.device)
    with ExitStack() as hooks, torch.no_grad(), evaluating(model):
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: record(name, args[0]))
            hooks.enter_context(hook)
        hidden_states(model, batch)
    groups: dict[tuple[str, int, float], list[LoraLinear]] = {}
    # in call order, as the first member computes for all
    for name, x in inputs.items():
        if x is not None and not layers[name].dropout and layers[name].magnitude is None:
            key = (name.rpartition(".")[0], id(x), layers[name].scaling)
            groups.setdefault(key, []).append(layers[name])
    fused = FusedLayers([FusedLora(members, fp8=fp8) for members in groups.values()])
    fused.refresh()
    return fused
