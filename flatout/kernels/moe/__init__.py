"""Products of routed tokens with experts' weights, without host synchronization where the device allows it.

reference.py defines every operation and runs everywhere. The Triton files are its equivalent on CUDA in 16 bits; where
they do not fit, torch's grouped product is. The operations are opaque to torch.compile, not differentiable, and
traceable after `register_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.fp8_matmul import has_fp8
from flatout.kernels.moe import reference
from flatout.kernels.moe.reference import Routing as Routing
from flatout.kernels.operators import define_operator


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort the slots of `top_k_index` (T, k) by expert; see `reference.route`."""
    routing = reference.route(top_k_index, num_experts)
    return routing._replace(tiles=torch.ops.flatout.moe_tiles(routing.offsets, routing.order.shape[0]))


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


def grouped_linear_fp8(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: int | None = None,
    in_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
    quantized: Sequence[Tensor] = (),
) -> Tensor:
    """Return `grouped_linear` with a float8 weight (E, N, K), contiguous or a transposed view; see `reference`."""
    result: Tensor = torch.ops.flatout.moe_linear_fp8(
        x, weight, *routing, gather, scatter, in_scale, out_scale, low, low_weight, *(quantized or (None, None))
    )
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


def swiglu(rows: Tensor, routing: Routing, in_scale: Tensor | None = None) -> list[Tensor]:
    """Return silu(gate) * up (S, I) of sorted `rows` (S, 2 I), with `in_scale` quantized as well; see `reference`."""
    result: list[Tensor] = torch.ops.flatout.moe_swiglu(rows, *routing, in_scale)
    return result


def swiglu_backward(
    rows: Tensor, grad: Tensor, row_weights: Tensor, routing: Routing, in_scale: Tensor | None = None
) -> list[Tensor]:
    """Return the product again, and the gradients of rows and of their weights; see `reference.swiglu_backward`."""
    result: list[Tensor] = torch.ops.flatout.moe_swiglu_backward(rows, grad, row_weights, *routing, in_scale)
    return result


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.moe_*; call before the first use of these operations."""
    routing = "Tensor order, Tensor offsets, Tensor inverse, Tensor tiles"
    how = "bool gather, SymInt? scatter"
    low = "Tensor? low, Tensor? low_weight"
    fp8 = "Tensor? quantized, Tensor? row_scale"
    operators: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], Callable[..., Any] | None]] = {
        "tiles": ("Tensor offsets, SymInt num_rows", _tiles, _empty_tiles, None),
        "linear": (f"Tensor x, Tensor weight, {routing}, {how}, {low}", _linear, _empty_linear, _linear_flops),
        "linear_fp8": (
            f"Tensor x, Tensor weight, {routing}, {how}, Tensor? in_scale, Tensor? out_scale, {low}, {fp8}",
            _linear_fp8, _empty_linear, _linear_fp8_flops,
        ),
        "outer": (f"Tensor x, Tensor dy, {routing}, bool gather_x, bool gather_dy", _outer, _empty_outer, _outer_flops),
        "combine": (f"Tensor y, {routing}, Tensor weights", _combine, _empty_combine, None),
        "swiglu": (f"Tensor rows, {routing}, Tensor? in_scale", _swiglu, _empty_swiglu, None),
        "swiglu_backward": (
            f"Tensor rows, Tensor grad, Tensor row_weights, {routing}, Tensor? in_scale",
            _swiglu_backward, _empty_swiglu_backward, None,
        ),
    }  # fmt: skip
    for name, (arguments, run, fake, num_flops) in operators.items():
        result = "Tensor[]" if name.startswith("swiglu") else "Tensor"
        define_operator(f"flatout::moe_{name}", f"({arguments}) -> {result}", run, fake, num_flops)


def _has_kernels(*sides: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: 16 bits, on a GPU that has them."""
    return all(side.is_cuda and side.element_size() == 2 and side.is_floating_point() for side in sides) and (
        find_spec("triton") is not None
    )


def _tiles(offsets: Tensor, num_rows: int) -> Tensor:
    if not offsets.is_cuda or find_spec("triton") is None:
        return _empty_tiles(offsets, num_rows)
    from flatout.kernels.moe.triton import make_tiles

    return make_tiles(offsets, num_rows)


def _empty_tiles(offsets: Tensor, num_rows: int) -> Tensor:
    # the first tile of each expert and their number, then the most tiles that these rows can have
    return offsets.new_empty(offsets.shape[0] + num_rows // reference.TILE_ROWS + offsets.shape[0] - 1)


def _linear(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor, gather: bool,
    scatter: int | None, low: Tensor | None, low_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    routing = Routing(order, offsets, inverse, tiles)
    sides = [side for side in (x, weight, low, low_weight) if side is not None]
    if _has_kernels(*sides):
        from flatout.kernels.moe.triton import fits_product, grouped_product

        if fits_product(x, weight):
            out = grouped_product(x, weight, routing, gather=gather, low=low, low_weight=low_weight)
            return out if scatter is None else _sum_slots(out, routing, scatter)
    if not reference.fits_grouped_mm(*sides):
        return reference.grouped_linear(
            x, weight, routing, gather=gather, scatter=scatter, low=low, low_weight=low_weight
        )
    rows = reference.token_rows(x, routing) if gather else x
    if low is not None and low_weight is not None:
        # one product over both, so that the sum is rounded once
        rows, weight = torch.cat([rows, low], dim=1), torch.cat([weight, low_weight], dim=2)
    out = reference.grouped_mm(rows, weight, routing)
    return out if scatter is None else _sum_slots(out, routing, scatter)


def _empty_linear(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor, gather: bool,
    scatter: int | None, *_: Tensor | None,
) -> Tensor:  # fmt: skip
    rows = order.shape[0] if scatter is None else order.shape[0] // scatter
    return x.new_empty(rows, weight.shape[1])


def _linear_flops(x: Any, weight: Any, order: Any, *rest: Any, **_: Any) -> Any:
    *_ignored, low, _low_weight = rest
    return 2 * order[0] * weight[1] * (weight[2] + (0 if low is None else low[1]))


def _linear_fp8_flops(*arguments: Any, **_: Any) -> Any:
    *given, _quantized, _row_scale = arguments
    return _linear_flops(*given)


def _linear_fp8(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor, gather: bool,
    scatter: int | None, in_scale: Tensor | None, out_scale: Tensor | None, low: Tensor | None,
    low_weight: Tensor | None, quantized: Tensor | None, row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    routing = Routing(order, offsets, inverse, tiles)
    given = () if quantized is None or row_scale is None else (quantized, row_scale)
    if not _has_kernels(x) or not has_fp8(x.device):
        return reference.grouped_linear_fp8(
            x, weight, routing, gather=gather, scatter=scatter, in_scale=in_scale, out_scale=out_scale, low=low,
            low_weight=low_weight, quantized=given,
        )  # fmt: skip
    from flatout.kernels.moe.triton import grouped_product
    from flatout.kernels.moe.triton_rows import quantize_rows, transpose_bytes

    if not weight.is_contiguous():
        # float8 products read both sides along the summed dimension; the copy is temporary
        weight = transpose_bytes(weight.transpose(1, 2))
    values, scale = given or quantize_rows(x, routing, in_scale)
    out = grouped_product(
        values, weight, routing, gather=gather, row_scale=scale, column_scale=out_scale, low=low,
        low_weight=low_weight, dtype=x.dtype,
    )  # fmt: skip
    return out if scatter is None else _sum_slots(out, routing, scatter)


def _outer(
    x: Tensor, dy: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor, gather_x: bool,
    gather_dy: bool,
) -> Tensor:  # fmt: skip
    routing = Routing(order, offsets, inverse, tiles)
    if _has_kernels(x, dy):
        from flatout.kernels.moe.triton import narrow_outer

        if dy.shape[1] <= reference.MAX_NARROW and not gather_dy:
            return narrow_outer(x, dy, routing, gather=gather_x, transposed=True)
        if x.shape[1] <= reference.MAX_NARROW and not gather_x:
            return narrow_outer(dy, x, routing, gather=gather_dy, transposed=False)
    if not reference.fits_grouped_mm(x, dy):
        return reference.grouped_outer(x, dy, routing, gather_x=gather_x, gather_dy=gather_dy)
    x = reference.token_rows(x, routing) if gather_x else x
    dy = reference.token_rows(dy, routing) if gather_dy else dy
    return reference.grouped_mm_outer(x, dy, routing)


def _empty_outer(x: Tensor, dy: Tensor, order: Tensor, offsets: Tensor, *_: object) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])


def _outer_flops(x: Any, dy: Any, order: Any, *_: Any, **__: Any) -> Any:
    return 2 * order[0] * x[1] * dy[1]


def _combine(y: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor, weights: Tensor) -> Tensor:
    return _sum_slots(y, Routing(order, offsets, inverse, tiles), weights.shape[1], weights)


def _empty_combine(y: Tensor, *routing_and_weights: Tensor) -> Tensor:
    return y.new_empty(routing_and_weights[-1].shape[0], y.shape[1])


def _sum_slots(y: Tensor, routing: Routing, k: int, weights: Tensor | None = None) -> Tensor:
    if not _has_kernels(y):
        return reference.sum_slots(y, routing, k, weights)
    from flatout.kernels.moe.triton_rows import sum_slots

    return sum_slots(y, routing, k, weights)


def _swiglu(
    rows: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor, in_scale: Tensor | None
) -> list[Tensor]:
    routing = Routing(order, offsets, inverse, tiles)
    if not _has_kernels(rows) or not (in_scale is None or has_fp8(rows.device)):
        return reference.swiglu(rows, routing, in_scale)
    from flatout.kernels.moe.triton_rows import swiglu

    return swiglu(rows, routing, in_scale)


def _empty_swiglu(rows: Tensor, *routing_and_scale: Tensor | None) -> list[Tensor]:
    hidden = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    return [hidden] if routing_and_scale[-1] is None else [hidden, *reference.empty_float8(hidden)]


def _swiglu_backward(
    rows: Tensor, grad: Tensor, row_weights: Tensor, order: Tensor, offsets: Tensor, inverse: Tensor, tiles: Tensor,
    in_scale: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    routing = Routing(order, offsets, inverse, tiles)
    if not _has_kernels(rows, grad) or not (in_scale is None or has_fp8(rows.device)):
        return reference.swiglu_backward(rows, grad, row_weights, routing, in_scale)
    from flatout.kernels.moe.triton_rows import swiglu_backward

    return swiglu_backward(rows, grad, row_weights, routing, in_scale)


def _empty_swiglu_backward(
    rows: Tensor, grad: Tensor, row_weights: Tensor, *routing_and_scale: Tensor | None
) -> list[Tensor]:
    wide = torch.promote_types(rows.dtype, torch.float32)
    grads = [torch.empty_like(grad), torch.empty_like(rows), grad.new_empty(grad.shape[0], dtype=wide)]
    return grads if routing_and_scale[-1] is None else [*grads, *reference.empty_float8(rows)]
