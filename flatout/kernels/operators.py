"""Register functions as operators of torch, which compiled layers call without looking inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

# an operator is there as long as the library that it was registered with
_libraries: dict[str, torch.library.Library] = {}


def define_operator(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    num_flops: Callable[..., Any] | None = None,
) -> Any:
    """Register and return torch.ops.NAMESPACE.OPERATOR of `name` "NAMESPACE::OPERATOR", with this schema.

    `compute` is called on every device; `fake` returns empty results with the same shapes, dtypes and strides. It has
    no derivative: call it in a `torch.autograd.Function`. torch's `custom_op` takes several times as long per call,
    which short micro-batches cannot hide. `num_flops` takes the arguments with shapes in place of tensors; an operator
    without it computes no product. By these FLOPs `recompute: budget` chooses what the backward pass computes again.
    """
    namespace, operator = name.split("::")
    # a second definition replaces the first
    _libraries.pop(name, None)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(operator + schema)
    library.impl(operator, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    _libraries[name] = library
    packet = getattr(getattr(torch.ops, namespace), operator)
    flop_registry.pop(packet, None)
    if num_flops is not None:
        register_flop_formula(packet)(num_flops)
    return packet
