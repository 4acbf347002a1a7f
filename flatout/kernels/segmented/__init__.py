"""Several products and a low-rank one in a single accumulator: a frozen layer with its adapters, or its input gradient.

Computed separately, each product is written to memory and read again to be added. reference.py defines the operation
and runs everywhere; hopper.cu is its equivalent on Hopper GPUs. It is a custom operator without a derivative: after
`register_ops`, torch.compile traces it, but fuses nothing into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flatout.kernels.capability import HOPPER, capability
from flatout.kernels.cuda_source import error_of, in_aligned_rows
from flatout.kernels.fp8 import scaled_product
from flatout.kernels.operators import define_operator
from flatout.kernels.segmented import hopper, reference
from flatout.kernels.segmented.reference import Segments

# rows of so many elements begin at multiples of 16 bytes, which TMA needs: of e4m3 and of bf16
SIZE_MULTIPLE = 16
RANK_MULTIPLE = 8


def fits(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int], in_features: int, ranks: Sequence[int]
) -> bool:
    """Whether the kernel computes layers (sizes_i, in_features) with adapters of these ranks, in both passes."""
    return (
        capability(device) == HOPPER
        and dtype == torch.bfloat16
        and len(sizes) <= hopper.MAX_SEGMENTS
        and not any(size % SIZE_MULTIPLE for size in (*sizes, in_features))
        and sum(ranks) % RANK_MULTIPLE == 0
    )


@cache
def load_error(device: torch.device, *, fp8: bool) -> Exception | None:
    """Return why a Hopper GPU cannot run the kernel, which is compiled and loaded; None if it can, or elsewhere."""
    return error_of(hopper.load, device, fp8=fp8) if capability(device) == HOPPER else None


def segmented_product(
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    low: Tensor,
    wide: Tensor,
    *,
    row_scales: Sequence[Tensor] = (),
    column_scale: Tensor | None = None,
    first_columns: Sequence[int] = (0,),
    first_ranks: Sequence[int] = (),
    weights_kn: bool = False,
) -> list[Tensor]:
    """Return the sum of `Segments` block by block, (M, N_i) contiguous; by default, `wide` is one block.

    low wide.T is the adapters' part: x A.T and the scaled B in the forward pass, dY B and A.T in the backward pass. At
    most three parts and three blocks (one per adapter). Small results use separate matmuls of torch, whose tiles are
    smaller.
    """
    results: list[Tensor] = torch.ops.flatout.segmented_product(
        list(parts), list(weights), list(row_scales), column_scale, low, wide, list(first_columns),
        list(first_ranks) or [0, wide.shape[1]], weights_kn,
    )  # fmt: skip
    return results


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.segmented_product; call before the first use of `segmented_product`."""
    schema = (
        "(Tensor[] parts, Tensor[] weights, Tensor[] row_scales, Tensor? column_scale, Tensor low, Tensor wide, "
        "int[] first_columns, int[] first_ranks, bool weights_kn) -> Tensor[]"
    )
    operator = define_operator("flatout::segmented_product", schema, _product, _empty)
    # without it, `recompute: budget` would take the product for free
    register_flop_formula(operator)(_num_flops)


def _num_flops(*shapes: Any, **_: Any) -> Any:
    """Count the FLOPs from `Segments` with shapes as its tensors; each adapter multiplies its own ranks only."""
    own: Any = Segments(*shapes)
    num_rows, num_columns = own.low[0], own.wide[0]
    widths = (end - start for start, end in pairwise([*own.first_columns, num_columns]))
    ranks = (end - start for start, end in pairwise(own.first_ranks))
    low_rank = sum(width * rank for width, rank in zip(widths, ranks, strict=True))
    return 2 * num_rows * (num_columns * sum(part[1] for part in own.parts) + low_rank)


def _empty(*operands: Any) -> list[Tensor]:
    own = Segments(*operands)
    return [own.low.new_empty(own.low.shape[0], width) for width in own.widths]


def _product(*operands: Any) -> list[Tensor]:
    own = Segments(*operands)
    device = own.low.device
    if device.type != "cuda":
        return reference.segmented_product(own)
    # half a wave of clusters
    enough = torch.cuda.get_device_properties(device).multi_processor_count // 4
    if capability(device) != HOPPER or hopper.num_tiles(own.low.shape[0], own.widths) < enough:
        return _separately(own)
    outs = _empty(*own)
    parts, weights, (low, wide) = (
        list(map(in_aligned_rows, each)) for each in (own.parts, own.weights, (own.low, own.wide))
    )
    hopper.launch(outs, own._replace(parts=parts, weights=weights, low=low, wide=wide))
    return outs


def _separately(own: Segments) -> list[Tensor]:
    """Compute the products one by one with torch, which has smaller tiles for few rows or columns."""
    total = own.low @ own.wide.T
    for i, (part, weight) in enumerate(zip(own.parts, own.weights, strict=True)):
        if own.column_scale is None:
            total.addmm_(part, weight if own.weights_kn else weight.T)
        else:
            total += scaled_product(part, weight, own.row_scales[i][:, None], own.column_scale, own.low.dtype)
    return reference.apart(total, own.widths)
