"""Products of routed tokens with experts' weights, without host synchronization where the device allows it.

reference.py defines every operation and runs everywhere; torch's grouped product is its equivalent on CUDA in bf16.
The operations are opaque to torch.compile, not differentiable, and traceable after `register_ops`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flatout.kernels.moe import reference
from flatout.kernels.moe.reference import Routing, route

__all__ = ["Routing", "combine", "grouped_linear", "grouped_linear_dx", "grouped_outer", "register_ops", "route"]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> Tensor:
    """Return x_i W_e^T + low_i V_e^T for each sorted row i of expert e, (S, N); see `reference.grouped_linear`."""
    result: Tensor = torch.ops.flatout.moe_linear(x, weight, *routing, gather, None, low, low_weight)
    return result


def grouped_linear_dx(
    dy: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: int | None = None,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> Tensor:
    """Return dy_i W_e + low_i V_e for each sorted row i of expert e, (S, K), or each token's sum of `scatter` rows.

    `weight` is (E, N, K), `low` (S, r) and `low_weight` (E, r, K): those of the forward product.
    """
    turned = None if low_weight is None else low_weight.transpose(1, 2)
    result: Tensor = torch.ops.flatout.moe_linear(dy, weight.transpose(1, 2), *routing, gather, scatter, low, turned)
    return result


def grouped_outer(
    x: Tensor, dy: Tensor, routing: Routing, *, gather_x: bool = False, gather_dy: bool = False
) -> Tensor:
    """Return each expert's sum of dy_i^T x_i, (E, N, K); see `reference.grouped_outer`."""
    result: Tensor = torch.ops.flatout.moe_outer(x, dy, *routing, gather_x, gather_dy)
    return result


def combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its sorted rows, (T, N); see `reference.combine`."""
    result: Tensor = torch.ops.flatout.moe_combine(y, *routing, weights)
    return result


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.moe_*; call before the first use of this package's operations."""
    routing = "Tensor order, Tensor offsets, Tensor inverse"
    linear = torch.library.custom_op(
        "flatout::moe_linear", _linear, mutates_args=(),
        schema=f"(Tensor x, Tensor weight, {routing}, bool gather, SymInt? scatter, Tensor? low, Tensor? low_weight)"
        " -> Tensor",
    )  # fmt: skip
    linear.register_fake(_empty_linear)
    outer = torch.library.custom_op(
        "flatout::moe_outer", _outer, mutates_args=(),
        schema=f"(Tensor x, Tensor dy, {routing}, bool gather_x, bool gather_dy) -> Tensor",
    )  # fmt: skip
    outer.register_fake(lambda x, dy, order, offsets, *_: x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1]))
    combined = torch.library.custom_op(
        "flatout::moe_combine", _combine, mutates_args=(), schema=f"(Tensor y, {routing}, Tensor weights) -> Tensor"
    )
    combined.register_fake(lambda y, order, offsets, inverse, weights: y.new_empty(weights.shape[0], y.shape[1]))


def _linear(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, gather: bool, scatter: int | None,
    low: Tensor | None, low_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    routing = Routing(order, offsets, inverse)
    sides = [side for side in (x, weight, low, low_weight) if side is not None]
    if not reference.fits_grouped_mm(*sides):
        return reference.grouped_linear(
            x, weight, routing, gather=gather, scatter=scatter, low=low, low_weight=low_weight
        )
    out = reference.grouped_mm(reference.token_rows(x, routing) if gather else x, weight, routing)
    if low is not None and low_weight is not None:
        out += reference.grouped_mm(low, low_weight, routing)
    return out if scatter is None else reference.sum_slots(out, routing, scatter)


def _empty_linear(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, gather: bool, scatter: int | None,
    low: Tensor | None, low_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    rows = order.shape[0] if scatter is None else order.shape[0] // scatter
    return x.new_empty(rows, weight.shape[1])


def _outer(
    x: Tensor, dy: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, gather_x: bool, gather_dy: bool
) -> Tensor:
    routing = Routing(order, offsets, inverse)
    if not reference.fits_grouped_mm(x, dy):
        return reference.grouped_outer(x, dy, routing, gather_x=gather_x, gather_dy=gather_dy)
    x = reference.token_rows(x, routing) if gather_x else x
    dy = reference.token_rows(dy, routing) if gather_dy else dy
    return reference.grouped_mm_outer(x, dy, routing)


def _combine(y: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    return reference.combine(y, Routing(order, offsets, inverse), weights)
