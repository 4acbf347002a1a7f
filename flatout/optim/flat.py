"""Trained parameters and gradients as one flat tensor each, so that clipping, updates and sums take one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn

# each parameter starts at a cache line of 128 bytes, which also suits kernels that read 16 bytes at a time
_LINE_BYTES = 128


def flatten(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Move parameters into one flat parameter (n,) per dtype, with a flat gradient of zeros.

    Each parameter keeps its identity and values, but its data and gradient become views of the flat ones. Gradients
    must be zeroed (`FlatOptimizer`), never set to None. Gaps between parameters are zeros with zero gradients, which
    AdamW and SGD leave at zero. Call this before a CUDA graph is captured, since addresses change.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    flats = []
    for dtype, group in by_dtype.items():
        line = _LINE_BYTES // dtype.itemsize
        offsets = [0, *accumulate(-(-parameter.numel() // line) * line for parameter in group)]
        flat = nn.Parameter(torch.zeros(offsets[-1], dtype=dtype, device=group[0].device))
        flat.grad = torch.zeros_like(flat)
        for parameter, offset in zip(group, offsets[:-1], strict=True):
            span = slice(offset, offset + parameter.numel())
            parameter.data = flat.data[span].view(parameter.shape).copy_(parameter.data)
            parameter.grad = flat.grad[span].view(parameter.shape)
        flats.append(flat)
    return flats


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer over flat parameters; gradients are views, so they are zeroed in place instead of set to None."""

    # the parameters whose gradients are views of the flat ones, and these views
    gradient_views: Sequence[tuple[nn.Parameter, Tensor]] = ()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set every gradient to zero; `set_to_none` is ignored."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()


@contextmanager
def foreach_accumulate(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Wrap a backward pass to add to flat gradients in one call; autograd would launch one kernel per parameter."""
    views = optimizer.gradient_views if isinstance(optimizer, FlatOptimizer) else ()
    for parameter, _ in views:
        parameter.grad = None
    try:
        yield
        pairs = [(view, parameter.grad) for parameter, view in views if parameter.grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
    finally:
        for parameter, view in views:
            parameter.grad = view


def owners(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, tuple[nn.Parameter, int]]:
    """Return, by name, the optimizer's parameter that holds each one (a flat one, or itself), and its element offset.

    Raises KeyError for a parameter that the optimizer does not hold.
    """
    optimized: set[nn.Parameter] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    flats = {flat.untyped_storage().data_ptr(): flat for flat in optimized.difference(named.values())}
    owners_by_name: dict[str, tuple[nn.Parameter, int]] = {}
    for name, parameter in named.items():
        if parameter in optimized:
            owners_by_name[name] = parameter, 0
        else:
            owners_by_name[name] = flats[parameter.untyped_storage().data_ptr()], int(parameter.storage_offset())
    return owners_by_name
