"""Trained parameters and their gradients as one tensor each: one launch to clip, to update, to sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor, nn

# kernels read 16 bytes at once and memory comes in lines of 128; a parameter starts at such a line
_LINE_BYTES = 128


def flatten(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Move parameters into one flat parameter (n,) for each dtype, with a flat gradient of zeros.

    Each parameter keeps its identity and values, but its data and gradient become views of the flat ones, which must be
    zeroed (`KeepsGradients`), never set to None. Gaps between
    parameters are zeros with zero gradients, which AdamW and SGD leave at zero. Call it before a CUDA graph is
    recorded: the addresses change.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [_flatten(group) for group in by_dtype.values()]


def _flatten(parameters: list[nn.Parameter]) -> nn.Parameter:
    line = _LINE_BYTES // parameters[0].element_size()
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += -(-parameter.numel() // line) * line
    flat = nn.Parameter(torch.zeros(end, dtype=parameters[0].dtype, device=parameters[0].device))
    flat.grad = torch.zeros_like(flat)
    for parameter, offset in zip(parameters, offsets, strict=True):
        place = slice(offset, offset + parameter.numel())
        data = flat.data[place].view(parameter.shape)
        parameter.data = data.copy_(parameter.data)
        parameter.grad = flat.grad[place].view(parameter.shape)
    return flat


class KeepsGradients(torch.optim.Optimizer):
    """An optimizer over flat parameters: gradients are views that outlive the step, so they are zeroed in place."""

    _places: Sequence[tuple[nn.Parameter, Tensor]] = ()

    def over(self, parameters: Iterable[nn.Parameter]) -> Self:
        """Note whose gradients are parts of the flat ones, for `adding_at_once`."""
        self._places = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        return self

    @contextmanager
    def adding_at_once(self) -> Iterator[None]:
        """Around a backward pass: autograd would add each of hundreds of small gradients by a launch of its own."""
        for parameter, _ in self._places:
            parameter.grad = None
        try:
            yield
            found = [(place, parameter.grad) for parameter, place in self._places if parameter.grad is not None]
            if found:
                torch._foreach_add_([place for place, _ in found], [grad for _, grad in found])
        finally:
            for parameter, place in self._places:
                parameter.grad = place

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set every gradient to zero, whatever `set_to_none` says."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()


def adding_at_once(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """`KeepsGradients.adding_at_once` of an optimizer that has it."""
    return optimizer.adding_at_once() if isinstance(optimizer, KeepsGradients) else nullcontext()


class FlatAdamW(KeepsGradients, torch.optim.AdamW):
    """torch's AdamW over flat parameters."""


class FlatSGD(KeepsGradients, torch.optim.SGD):
    """torch's SGD over flat parameters."""


def owners(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, tuple[nn.Parameter, int]]:
    """For each name the optimizer's parameter that holds it (a flat one, or itself), and its offset there in elements.

    Raises KeyError when the optimizer does not hold one of them.
    """
    held: set[nn.Parameter] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    flats = {flat.untyped_storage().data_ptr(): flat for flat in held.difference(named.values())}
    places: dict[str, tuple[nn.Parameter, int]] = {}
    for name, parameter in named.items():
        if parameter in held:
            places[name] = parameter, 0
        else:
            places[name] = flats[parameter.untyped_storage().data_ptr()], int(parameter.storage_offset())
    return places
