"""Several products and a low-rank one in a single accumulator: a frozen layer with its adapters, or its input gradient.

Apart, each product is written and read once more to be added. reference.py defines the operation and runs everywhere;
hopper.cu is its equivalent on Hopper GPUs. It is opaque to torch.compile, not differentiable, and traceable after
`register_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.capability import HOPPER, capability
from flatout.kernels.fp8 import scaled_product
from flatout.kernels.operators import define_operator
from flatout.kernels.segmented import reference

MAX_SEGMENTS = 3
# TMA needs rows of whole 16 bytes
MULTIPLE = 16
RANK_MULTIPLE = 8


def fits(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int], in_features: int, ranks: Sequence[int]
) -> bool:
    """Whether the kernel computes layers (sizes_i, in_features) with adapters of these ranks, in both passes."""
    return (
        capability(device) == HOPPER
        and dtype == torch.bfloat16
        and len(sizes) <= MAX_SEGMENTS
        and not any(size % MULTIPLE for size in (*sizes, in_features))
        and sum(ranks) % RANK_MULTIPLE == 0
        and missing(device) is None
    )


@cache
def missing(device: torch.device) -> str | None:
    """Return what the kernel needs and does not find on a Hopper GPU; None if nothing, or elsewhere."""
    if capability(device) != HOPPER:
        return None
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return "NVRTC, which cuda-bindings loads,"
    return None


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
    by_rows: bool = False,
) -> Tensor:
    """Return `reference.segmented_product`, (M, N) contiguous.

    `wide` may be of several adapters, each with columns of `low` and rows of its own: `first_columns` are the first of
    the N columns of each adapter, `first_ranks` the first of its R ranks, then R; elsewhere `wide` is 0. None: one
    adapter. At most three parts and adapters.
    """
    result: Tensor = torch.ops.flatout.segmented_product(
        list(parts), list(weights), list(row_scales), column_scale, low, wide, list(first_columns),
        list(first_ranks) or [0, wide.shape[1]], by_rows,
    )  # fmt: skip
    return result


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.segmented_product; call before the first use of `segmented_product`."""
    schema = (
        "(Tensor[] parts, Tensor[] weights, Tensor[] row_scales, Tensor? column_scale, Tensor low, Tensor wide, "
        "int[] first_columns, int[] first_ranks, bool by_rows) -> Tensor"
    )
    define_operator("flatout::segmented_product", schema, _product, _empty)


def _empty(parts: list[Tensor], weights: list[Tensor], *rest: Any) -> Tensor:
    low, wide = rest[2:4]
    out: Tensor = low.new_empty(low.shape[0], wide.shape[0])
    return out


def _product(
    parts: list[Tensor],
    weights: list[Tensor],
    row_scales: list[Tensor],
    column_scale: Tensor | None,
    low: Tensor,
    wide: Tensor,
    first_columns: list[int],
    first_ranks: list[int],
    by_rows: bool,
) -> Tensor:
    if low.device.type != "cuda":
        return reference.segmented_product(parts, weights, row_scales, column_scale, low, wide, by_rows)
    from flatout.kernels.segmented.hopper import launch, num_tiles

    shape = low.shape[0], wide.shape[0]
    if num_tiles(*shape) < torch.cuda.get_device_properties(low.device).multi_processor_count // 4:
        return _apart(parts, weights, row_scales, column_scale, low, wide, by_rows)
    out = low.new_empty(shape)
    parts, weights, (low, wide) = ([_in_rows(own) for own in each] for each in (parts, weights, [low, wide]))
    launch(out, parts, weights, row_scales, column_scale, low, wide, first_columns, first_ranks, by_rows)
    return out


def _apart(
    parts: list[Tensor],
    weights: list[Tensor],
    row_scales: list[Tensor],
    column_scale: Tensor | None,
    low: Tensor,
    wide: Tensor,
    by_rows: bool,
) -> Tensor:
    """Compute the products one by one with torch, which has smaller tiles for few rows or columns."""
    total = low @ wide.T
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if column_scale is None:
            total.addmm_(part, weight if by_rows else weight.T)
        else:
            total += scaled_product(part, weight, row_scales[i][:, None], column_scale, low.dtype)
    return total


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a matrix as it is if its rows are contiguous and begin at multiples of 16 bytes, else a copy."""
    pitch = tensor.stride(0) * tensor.element_size()
    fitting = tensor.stride(1) == 1 and pitch % MULTIPLE == 0 and tensor.data_ptr() % MULTIPLE == 0
    return tensor if fitting else tensor.contiguous()
