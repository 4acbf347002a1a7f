"""Products of routed tokens with experts' weights, without host synchronization where the device allows it.

reference.py defines every operation and runs everywhere. The Triton files are its equivalent on CUDA in 16 bits; where
they do not fit, torch's grouped product is. The operations are opaque to torch.compile, not differentiable, and
traceable after `register_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.capability import has_triton
from flatout.kernels.fp8_matmul import has_fp8
from flatout.kernels.moe import reference
from flatout.kernels.moe.reference import Routing as Routing
from flatout.kernels.operators import define_operator


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort the slots of `top_k_index` (T, k) by expert; see `reference.route`."""
    routing = reference.route(top_k_index, num_experts)
    return routing._replace(tiles=torch.ops.flatout.moe_tiles(routing.offsets, routing.order.shape[0]))


def grouped_linear(
    x: Tensor, weight: Tensor, routing: Routing, *, gather: bool = False, low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x_i W_e^T + low_i V_e^T for each sorted row i of expert e, (S, N); see `reference.grouped_linear`."""
    return torch.ops.flatout.moe_linear(*routing, x, weight, gather, None, low, low_weight)


def grouped_linear_fp8(
    x: Tensor, weight: Tensor, routing: Routing, *, gather: bool = False, scatter: int | None = None,
    in_scale: Tensor | None = None, out_scale: Tensor | None = None, low: Tensor | None = None,
    low_weight: Tensor | None = None, quantized: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """Return `grouped_linear` with a float8 weight (E, N, K), contiguous or a transposed view; see `reference`."""
    return torch.ops.flatout.moe_linear_fp8(
        *routing, x, weight, gather, scatter, in_scale, out_scale, low, low_weight, *(quantized or (None, None))
    )


def grouped_linear_dx(
    dy: Tensor, weight: Tensor, routing: Routing, *, gather: bool = False, scatter: int | None = None,
    low: Tensor | None = None, low_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return dy_i W_e + low_i V_e for each sorted row i of expert e, (S, K), or each token's sum of `scatter` rows.

    `weight` is (E, N, K), `low` (S, r) and `low_weight` (E, r, K): those of the forward product.
    """
    turned = None if low_weight is None else low_weight.transpose(1, 2)
    return torch.ops.flatout.moe_linear(*routing, dy, weight.transpose(1, 2), gather, scatter, low, turned)


def grouped_outer(
    x: Tensor, dy: Tensor, routing: Routing, *, gather_x: bool = False, gather_dy: bool = False
) -> Tensor:
    """Return each expert's sum of dy_i^T x_i, (E, N, K); see `reference.grouped_outer`."""
    return torch.ops.flatout.moe_outer(*routing, x, dy, gather_x, gather_dy)


def combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its sorted rows, (T, N); see `reference.combine`."""
    return torch.ops.flatout.moe_combine(*routing, y, weights)


def swiglu(rows: Tensor, routing: Routing, in_scale: Tensor | None = None) -> list[Tensor]:
    """Return silu(gate) * up (S, I) of sorted `rows` (S, 2 I), with `in_scale` quantized as well; see `reference`."""
    return torch.ops.flatout.moe_swiglu(*routing, rows, in_scale)


def swiglu_backward(
    rows: Tensor, grad: Tensor, row_weights: Tensor, routing: Routing, in_scale: Tensor | None = None
) -> list[Tensor]:
    """Return the product again, and the gradients of rows and of their weights; see `reference.swiglu_backward`."""
    return torch.ops.flatout.moe_swiglu_backward(*routing, rows, grad, row_weights, in_scale)


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.moe_*; call before the first use of these operations."""
    define_operator("flatout::moe_tiles", "(Tensor offsets, SymInt num_rows) -> Tensor", _tiles, _empty_tiles)
    product, low = "Tensor x, Tensor weight, bool gather, SymInt? scatter", "Tensor? low, Tensor? low_weight"
    fp8 = f"Tensor? in_scale, Tensor? out_scale, {low}, Tensor? quantized, Tensor? row_scale"
    wide = "Tensor rows, Tensor grad, Tensor row_weights, Tensor? in_scale"
    operators: dict[str, tuple[str, str, Callable[..., Any], Callable[..., Any], Callable[..., Any] | None]] = {
        "linear": (f"{product}, {low}", "Tensor", _linear, _empty_linear, _linear_flops),
        "linear_fp8": (f"{product}, {fp8}", "Tensor", _linear_fp8, _empty_linear, _linear_fp8_flops),
        "outer": ("Tensor x, Tensor dy, bool gather_x, bool gather_dy", "Tensor", _outer, _empty_outer, _outer_flops),
        "combine": ("Tensor y, Tensor weights", "Tensor", _combine, _empty_combine, None),
        "swiglu": ("Tensor rows, Tensor? in_scale", "Tensor[]", _swiglu, _empty_swiglu, None),
        "swiglu_backward": (wide, "Tensor[]", _swiglu_backward, _empty_swiglu_backward, None),
    }
    for name, (arguments, result, run, fake, num_flops) in operators.items():
        schema = f"({', '.join(f'Tensor {field}' for field in Routing._fields)}, {arguments}) -> {result}"
        flops = None if num_flops is None else _after_routing(num_flops)
        define_operator(f"flatout::moe_{name}", schema, _after_routing(run), _after_routing(fake), flops)


def _after_routing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose first arguments are the fields of the routing that `function` takes."""
    count = len(Routing._fields)
    return lambda *arguments, **_: function(Routing(*arguments[:count]), *arguments[count:])


def _has_kernels(*sides: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: 16 bits, on a GPU that has them."""
    return all(has_triton(side.device) and side.element_size() == 2 and side.is_floating_point() for side in sides)


def _tiles(offsets: Tensor, num_rows: int) -> Tensor:
    if not has_triton(offsets.device):
        return _empty_tiles(offsets, num_rows)
    from flatout.kernels.moe.triton import make_tiles

    return make_tiles(offsets, num_rows)


def _empty_tiles(offsets: Tensor, num_rows: int) -> Tensor:
    # the first tile of each expert and their number, then the most tiles that these rows can have
    return offsets.new_empty(offsets.shape[0] + num_rows // reference.TILE_ROWS + offsets.shape[0] - 1)


def _linear(
    routing: Routing, x: Tensor, weight: Tensor, gather: bool, scatter: int | None, low: Tensor | None,
    low_weight: Tensor | None,
) -> Tensor:  # fmt: skip
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
    routing: Routing, x: Tensor, weight: Tensor, gather: bool, scatter: int | None, *_: Tensor | None
) -> Tensor:
    rows = routing.order.shape[0] if scatter is None else routing.order.shape[0] // scatter
    return x.new_empty(rows, weight.shape[1])


def _linear_flops(routing: Any, x: Any, weight: Any, gather: bool, scatter: Any, low: Any, low_weight: Any) -> Any:
    return 2 * routing.order[0] * weight[1] * (weight[2] + (0 if low is None else low[1]))


def _linear_fp8_flops(routing: Any, *arguments: Any) -> Any:
    x, weight, gather, scatter, _in_scale, _out_scale, *low, _quantized, _row_scale = arguments
    return _linear_flops(routing, x, weight, gather, scatter, *low)


def _linear_fp8(
    routing: Routing, x: Tensor, weight: Tensor, gather: bool, scatter: int | None, in_scale: Tensor | None,
    out_scale: Tensor | None, low: Tensor | None, low_weight: Tensor | None, quantized: Tensor | None,
    row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
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


def _outer(routing: Routing, x: Tensor, dy: Tensor, gather_x: bool, gather_dy: bool) -> Tensor:
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


def _empty_outer(routing: Routing, x: Tensor, dy: Tensor, *_: bool) -> Tensor:
    return x.new_empty(routing.offsets.shape[0] - 1, dy.shape[1], x.shape[1])


def _outer_flops(routing: Any, x: Any, dy: Any, *_: Any) -> Any:
    return 2 * routing.order[0] * x[1] * dy[1]


def _combine(routing: Routing, y: Tensor, weights: Tensor) -> Tensor:
    return _sum_slots(y, routing, weights.shape[1], weights)


def _empty_combine(routing: Routing, y: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty(weights.shape[0], y.shape[1])


def _sum_slots(y: Tensor, routing: Routing, k: int, weights: Tensor | None = None) -> Tensor:
    return _row_kernels(None, y).sum_slots(y, routing, k, weights)


def _row_kernels(in_scale: Tensor | None, *sides: Tensor) -> Any:
    """Return the module that computes row by row: with `in_scale`, in float8 as well."""
    if not _has_kernels(*sides) or not (in_scale is None or has_fp8(sides[0].device)):
        return reference
    from flatout.kernels.moe import triton_rows

    return triton_rows


def _swiglu(routing: Routing, rows: Tensor, in_scale: Tensor | None) -> list[Tensor]:
    return _row_kernels(in_scale, rows).swiglu(rows, routing, in_scale)


def _empty_swiglu(routing: Routing, rows: Tensor, in_scale: Tensor | None) -> list[Tensor]:
    hidden = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    return [hidden] if in_scale is None else [hidden, *reference.empty_float8(hidden)]


def _swiglu_backward(
    routing: Routing, rows: Tensor, grad: Tensor, row_weights: Tensor, in_scale: Tensor | None
) -> list[Tensor]:
    kernels = _row_kernels(in_scale, rows, grad)
    return kernels.swiglu_backward(rows, grad, row_weights, routing, in_scale)


def _empty_swiglu_backward(
    routing: Routing, rows: Tensor, grad: Tensor, row_weights: Tensor, in_scale: Tensor | None
) -> list[Tensor]:
    wide = torch.promote_types(rows.dtype, torch.float32)
    grads = [torch.empty_like(grad), torch.empty_like(rows), grad.new_empty(grad.shape[0], dtype=wide)]
    return grads if in_scale is None else [*grads, *reference.empty_float8(rows)]
