"""Products of routed tokens with experts' weights: the definition, in plain torch, on any device and in any dtype.

T tokens each choose k of E experts, which makes S = T k slots; slot t k + j is token t's j-th choice. Slots are sorted
by expert, so that each expert's rows are consecutive. Sorted rows of no expert are undefined, and never read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.capability import AMPERE, capability
from flatout.kernels.fp8_matmul import quantize_rows

# rows of a kernel's tile, which belongs to one expert; the widest narrow side of an outer product in registers
TILE_ROWS = 128
MAX_NARROW = 64


class Routing(NamedTuple):
    """Which sorted rows belong to which expert; int32. The fields hold for any device, without host synchronization."""

    order: Tensor
    """(S,) slot of each sorted row."""
    offsets: Tensor
    """(E + 1,) first sorted row of each expert; the last is the number of rows that have an expert."""
    inverse: Tensor
    """(S,) sorted row of each slot."""
    tiles: Tensor
    """Tiles of the sorted rows, see `triton.make_tiles`; empty where no kernel reads them."""


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort the slots of `top_k_index` (T, k) stably by expert; ids from `num_experts` on are of no expert here."""
    # the narrower the keys, the fewer passes of a radix sort
    dtype = torch.uint8 if num_experts <= 255 else torch.int32
    experts, order = top_k_index.flatten().clamp(max=num_experts).to(dtype).sort(stable=True)
    boundaries = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, boundaries, out_int32=True)
    rows = torch.arange(len(order), device=order.device, dtype=torch.int32)
    inverse = torch.empty_like(rows).scatter_(0, order, rows)
    return Routing(order.to(torch.int32), offsets, inverse, offsets.new_empty(0))


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: int | None = None,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> Tensor:
    """Return x_i W_e^T + low_i V_e^T for each sorted row i of expert e, (S, N).

    `x` is sorted (S, K), or with `gather` has one row per token, (T, K); `weight` W is (E, N, K) with any strides.
    `low` (S, r) and `low_weight` V (E, N, r) add a second, narrow product. With `scatter`, which is k, each token's
    rows are summed, (T, N).
    """
    rows = token_rows(x, routing) if gather else x
    out = x.new_zeros(len(routing.order), weight.shape[1])
    for expert, part in _experts(routing):
        if low is None or low_weight is None:
            out[part] = rows[part] @ weight[expert].T
        elif x.dtype.itemsize > 2:
            out[part] = rows[part] @ weight[expert].T + low[part] @ low_weight[expert].T
        else:
            # the narrow product first, so that no rounding loses it (see `flatout.kernels.segmented`)
            out[part] = (low[part] @ low_weight[expert].T).addmm_(rows[part], weight[expert].T)
    return out if scatter is None else sum_slots(out, routing, scatter)


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
    """Return `grouped_linear` with a float8 weight (E, N, K), of which x is a multiple of row-wise float8, too.

    The weight's scales belong to its inputs, `in_scale` fp32 (E, K), or to its outputs, `out_scale` fp32 (E, N): x is
    multiplied by the first before it is quantized, the product by the second. With `in_scale`, x is sorted. `quantized`
    is the result of `quantize_inputs`, if known.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    values, scale = quantized or quantize_inputs(x, routing, in_scale)
    dense = weight.to(exact) if out_scale is None else weight.to(exact) * out_scale.to(exact)[..., None]
    extra = [None if side is None else side.to(exact) for side in (low, low_weight)]
    product = grouped_linear(
        values.to(exact) * scale.to(exact)[:, None], dense, routing, gather=gather, scatter=scatter,
        low=extra[0], low_weight=extra[1],
    )  # fmt: skip
    return product.to(x.dtype)


def quantize_inputs(x: Tensor, routing: Routing, in_scale: Tensor | None = None) -> list[Tensor]:
    """Return rows of x, times their expert's `in_scale` fp32 (E, K) if given, in float8 (R, K), and scales (R,)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(exact) if in_scale is None else x.to(exact) * in_scale.to(exact)[row_experts(routing)]
    quantized, scale = quantize_rows(scaled)
    return [quantized, scale[:, 0]]


def grouped_outer(
    x: Tensor, dy: Tensor, routing: Routing, *, gather_x: bool = False, gather_dy: bool = False
) -> Tensor:
    """Return the sum of dy_i^T x_i over each expert's rows, (E, N, K): a weight gradient; zeros for unused experts.

    `x` (S, K) and `dy` (S, N) are sorted, or with `gather_x` and `gather_dy` have one row per token.
    """
    x, dy = (token_rows(rows, routing) if gather else rows for rows, gather in ((x, gather_x), (dy, gather_dy)))
    out = x.new_zeros(len(routing.offsets) - 1, dy.shape[1], x.shape[1])
    for expert, part in _experts(routing):
        out[expert] = dy[part].T @ x[part]
    return out


def combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Return each token's sum of sorted rows `y` (S, N) times its `weights` (T, k): (T, N), summed in at least fp32."""
    return sum_slots(y, routing, weights.shape[1], weights)


def sum_slots(y: Tensor, routing: Routing, k: int, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's `k` sorted rows, (T, N), optionally weighted; always in the same order."""
    wide = torch.promote_types(y.dtype, torch.float32)
    slots = y[routing.inverse].to(wide).masked_fill(without_expert(routing)[:, None], 0).view(-1, k, y.shape[1])
    total = slots.sum(1) if weights is None else (slots * weights.to(wide)[:, :, None]).sum(1)
    return total.to(y.dtype)


def swiglu(rows: Tensor, routing: Routing, in_scale: Tensor | None = None) -> list[Tensor]:
    """Return h = silu(gate) * up (S, I) of sorted `rows` (S, 2 I): the gates, then the ups.

    With `in_scale` (E, I), followed by `quantize_inputs(h, routing, in_scale)`.
    """
    gate, up = rows.to(torch.promote_types(rows.dtype, torch.float32)).chunk(2, -1)
    hidden = (F.silu(gate) * up).to(rows.dtype)
    return [hidden] if in_scale is None else [hidden, *quantize_inputs(hidden, routing, in_scale)]


def swiglu_backward(
    rows: Tensor, grad: Tensor, row_weights: Tensor, routing: Routing, in_scale: Tensor | None = None
) -> list[Tensor]:
    """Return `swiglu(rows)` again, the gradient of `rows` (S, 2 I), and that of `row_weights` (S,), in at least fp32.

    `grad` (S, I) is the gradient of the weighted product, before it is multiplied by the weights. With `in_scale`
    (E, 2 I), the gradient of `rows` follows as by `quantize_inputs`.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    gate, up = rows.to(wide).chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    hidden, weighted = gate * sigmoid * up, grad.to(wide) * row_weights.to(wide)[:, None]
    both = [weighted * up * sigmoid * (1 + gate * (1 - sigmoid)), weighted * gate * sigmoid]
    rows_grad = torch.cat(both, -1).to(rows.dtype)
    quantized = [] if in_scale is None else quantize_inputs(rows_grad, routing, in_scale)
    return [hidden.to(rows.dtype), rows_grad, (hidden * grad.to(wide)).sum(1), *quantized]


def empty_float8(values: Tensor) -> list[Tensor]:
    """Return tensors for float8 values and the scales of their rows."""
    return [torch.empty_like(values, dtype=torch.float8_e4m3fn), values.new_empty(values.shape[0], dtype=torch.float32)]


def without_expert(routing: Routing) -> Tensor:
    """Return whether each slot has no expert here, bool (S,)."""
    return routing.inverse >= routing.offsets[-1]


def row_experts(routing: Routing) -> Tensor:
    """Return the expert of each sorted row, (S,); the last expert for rows without one."""
    rows = torch.arange(len(routing.order), device=routing.order.device, dtype=torch.int32)
    experts = torch.searchsorted(routing.offsets[1:], rows, right=True)
    return experts.clamp_(max=len(routing.offsets) - 2)


def grouped_mm(x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """Return torch's grouped product of sorted rows `x` (S, K) with `weight` (E, N, K): (S, N)."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=routing.offsets[1:])


def grouped_mm_outer(x: Tensor, dy: Tensor, routing: Routing) -> Tensor:
    """Return torch's grouped form of `grouped_outer` for sorted rows."""
    ends = routing.offsets[1:]
    product: Tensor = torch._grouped_mm(dy.t(), x, offs=ends)
    return product.masked_fill((ends == routing.offsets[:-1])[:, None, None], 0)


def fits_grouped_mm(*sides: Tensor) -> bool:
    """Whether torch's grouped product takes these: bf16 on Ampere GPUs or newer, strides in multiples of 16 bytes."""
    return all(
        side.is_cuda
        and side.dtype == torch.bfloat16
        and capability(side.device) >= AMPERE
        and sorted(stride % 8 for stride in side.stride())[:-1] == [0] * (side.dim() - 1)
        and min(side.stride()) == 1
        and side.data_ptr() % 16 == 0
        for side in sides
    )


def token_rows(x: Tensor, routing: Routing) -> Tensor:
    """Return the token row of each sorted row, (S, K), from one row per token, (T, K)."""
    return x[routing.order // (len(routing.order) // len(x))]


def _experts(routing: Routing) -> Iterator[tuple[int, slice]]:
    offsets = routing.offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            yield expert, slice(start, end)
