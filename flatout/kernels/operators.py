"""Register functions as operators of torch, which compiled layers call without looking inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# an operator is there as long as the library that it was registered with
_libraries: dict[str, torch.library.Library] = {}


def define_operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register and return torch.ops.NAMESPACE.OPERATOR of `name` "NAMESPACE::OPERATOR", with this schema.

    `run` computes it on every device; `fake` returns empty results with the same shapes, dtypes and strides. It has no
    derivative: call it in a `torch.autograd.Function`. torch's `custom_op` takes several times as long per call, which
    short micro-batches cannot hide.
    """
    namespace, operator = name.split("::")
    # a second definition replaces the first
    _libraries.pop(name, None)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(operator + schema)
    library.impl(operator, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    _libraries[name] = library
    return getattr(getattr(torch.ops, namespace), operator)
