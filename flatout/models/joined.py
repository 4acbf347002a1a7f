"""LoRA layers that read the same input run as one: one frozen product and one pass over the input for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.models.bases import FrozenProduct, join_bases
from flatout.models.head import hidden_states
from flatout.models.lora import LoraLinear, lora_layers
from flatout.models.packed import pack


class _Joined(torch.autograd.Function):
    """y_i = x W_i.T + (x A_i.T) B_i.T of all members i; x is (..., K).

    `narrow` holds all A one above the other; `rest` are the B (N_i, r_i), scaled, then the storage of the W, then the
    masters of all A and of all B, which get the gradients. Sums are plain additions of whole products: the compiler
    puts them into whatever reads the result, where a GEMM that adds to its output would read and write it once more.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, narrow: Tensor, product: FrozenProduct, ranks: tuple[int, ...], scaling: float,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        wides, storage, masters = rest[: len(ranks)], rest[len(ranks) : -2 * len(ranks)], rest[-2 * len(ranks) :]
        low = F.linear(x, narrow)
        outputs = product.forward(x, *storage)
        ctx.save_for_backward(x, low, narrow, *wides, *storage)
        ctx.product, ctx.ranks, ctx.scaling, ctx.dtype = product, ranks, scaling, masters[0].dtype
        return tuple(
            output + F.linear(part, wide)
            for output, part, wide in zip(outputs, low.split(ranks, dim=-1), wides, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, narrow, *tensors = ctx.saved_tensors
        wides, storage = tensors[: len(ctx.ranks)], tensors[len(ctx.ranks) :]
        low_grad = torch.cat([grad @ wide for grad, wide in zip(grads, wides, strict=True)], dim=-1)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = ctx.product.backward(grads, *storage) + low_grad @ narrow
        narrow_grads = _outer(low_grad, x).to(ctx.dtype).split(ctx.ranks)
        wide_grads = (
            _outer(grad, part).to(ctx.dtype) * ctx.scaling
            for grad, part in zip(grads, low.split(ctx.ranks, dim=-1), strict=True)
        )
        return x_grad, None, None, None, None, *(None,) * len(tensors), *narrow_grads, *wide_grads


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right over all tokens: (..., N), (..., K) to (N, K)."""
    return left.reshape(-1, left.shape[-1]).t() @ right.reshape(-1, right.shape[-1])


class JoinedLora(nn.Module):
    """Several LoRA layers that are given one input, computed together when the first of them is called.

    The members keep their names and trained masters; their frozen weights become parts of one storage. The products
    read copies of the masters in the compute dtype, which `JoinedLayers.refresh` makes.
    """

    narrow: Tensor

    def __init__(self, members: Sequence[LoraLinear], *, fp8: bool, turned: bool) -> None:
        super().__init__()
        first = members[0]
        self.scaling = first.scaling
        self.ranks = tuple(member.rank for member in members)
        self._members = tuple(members)
        self._pending: tuple[Tensor, tuple[Tensor, ...]] | None = None
        bases = [member.base for member in members]
        self.biases = [base.bias for base in bases]
        options: dict[str, Any] = {"dtype": first.compute_dtype, "device": first.lora_a.device}
        self.product, storage = join_bases(bases, fp8=fp8, turned=turned)
        self._num_storage = len(storage)
        for index, tensor in enumerate(storage):
            self.register_buffer(f"storage_{index}", tensor, persistent=False)
        narrow = torch.zeros(sum(self.ranks), first.in_features, **options)
        self.register_buffer("narrow", narrow, persistent=False)
        for index, member in enumerate(members):
            wide = torch.zeros(member.out_features, member.rank, **options)
            self.register_buffer(f"wide_{index}", wide, persistent=False)
            member.join(self, index)

    def narrow_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(copy, its master) of every A."""
        yield from zip(self.narrow.split(self.ranks), (member.lora_a for member in self._members), strict=True)

    def wide_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(copy, its master) of every B; a copy is its master times `scaling`."""
        for index, member in enumerate(self._members):
            yield getattr(self, f"wide_{index}"), member.lora_b

    def output(self, index: int, x: Tensor) -> Tensor:
        """What member `index` gives for x (..., K). The first member computes for all; the others take their part."""
        if index == 0:
            self._pending = (x, self._outputs(x))
        if self._pending is None or self._pending[0] is not x:
            raise UsageError("LoRA layers that shared an input at the start were given different ones; report this")
        part = self._pending[1][index]
        if index == len(self.ranks) - 1:
            self._pending = None
        return part

    def _outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        wides = [getattr(self, f"wide_{index}") for index in range(len(self.ranks))]
        storage = [getattr(self, f"storage_{index}") for index in range(self._num_storage)]
        masters = [member.lora_a for member in self._members] + [member.lora_b for member in self._members]
        outputs = _Joined.apply(x, self.narrow, self.product, self.ranks, self.scaling, *wides, *storage, *masters)
        return tuple(
            output if bias is None else output + bias for output, bias in zip(outputs, self.biases, strict=True)
        )


class JoinedLayers:
    """All joined layers of a model; `refresh` before the first forward after every change of the masters."""

    def __init__(self, joined: Sequence[JoinedLora]) -> None:
        self._joined = tuple(joined)
        self._narrows, self._narrow_masters = _sides(pair for group in joined for pair in group.narrow_copies())
        self._wides, self._wide_masters = _sides(pair for group in joined for pair in group.wide_copies())
        self._scalings = [group.scaling for group in joined for _ in group.ranks]
        kinds = {group.product.describe for group in joined}
        self.report = f"{len(self._narrows)} layers run as {len(joined)} products ({', '.join(sorted(kinds))})"

    def forget(self) -> None:
        """Drop what a forward pass that failed left behind: outputs that no member took hold its whole graph."""
        for group in self._joined:
            group._pending = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring every trained master into the copy that the products read."""
        if not self._joined:
            return
        torch._foreach_copy_(self._narrows, self._narrow_masters)
        torch._foreach_copy_(self._wides, torch._foreach_mul(self._wide_masters, self._scalings))


def _sides(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The copies and the masters of (copy, its master) pairs."""
    both = list(pairs)
    return [copy for copy, _ in both], [master for _, master in both]


def join_layers(model: PreTrainedModel, *, fp8: bool = False, turned: bool = False) -> JoinedLayers:
    """Join every LoRA layer of the decoder with those of the same module that read the same input tensor.

    Which ones do is seen in one small forward pass, so it holds for any architecture. Layers with dropout or DoRA,
    and those outside the decoder (an adapted head), keep their own products. `fp8` multiplies with 8-bit storage in
    float8; `turned` keeps float8 weights turned as well, for the backward pass, to the same bits. Changes no result
    beyond rounding.
    """
    groups: dict[tuple[str, int], list[LoraLinear]] = {}
    with _inputs_of(model) as inputs:
        for name, layer in lora_layers(model).items():
            if name in inputs and not layer.dropout and layer.magnitude is None:
                groups.setdefault((name.rpartition(".")[0], inputs[name]), []).append(layer)
    joined = JoinedLayers([JoinedLora(members, fp8=fp8, turned=turned) for members in groups.values()])
    joined.refresh()
    return joined


@contextmanager
def _inputs_of(model: PreTrainedModel) -> Iterator[dict[str, int]]:
    """A number for the input tensor of every LoRA layer in one small forward pass: equal numbers, same tensor."""
    inputs: dict[str, int] = {}
    kept: list[Tensor] = []

    def note(name: str, x: Tensor) -> None:
        # kept, or a later tensor could get the same number
        kept.append(x)
        inputs[name] = id(x)

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        for name, layer in lora_layers(model).items()
    ]
    batch = pack([(np.arange(16), np.ones(16, bool))]).to(model.device)
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            hidden_states(model, batch)
        yield inputs
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
