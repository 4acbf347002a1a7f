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
from flatout.kernels.fp8 import scaled_product
from flatout.kernels.operators import define_operator
from flatout.kernels.segmented import hopper, reference

# addresses and row strides that TMA can read; 16 elements of e4m3 and 8 of bf16 are as many bytes
ALIGN_BYTES = 16
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
        and problem(device) is None
    )


@cache
def problem(device: torch.device) -> str | None:
    """Return why a Hopper GPU cannot run the kernel, which is compiled and loaded; None if it can, or elsewhere."""
    if capability(device) != HOPPER:
        return None
    try:
        hopper.load(device)
    except (ImportError, OSError, RuntimeError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
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
    weights_kn: bool = False,
) -> Tensor:
    """Return `reference.segmented_product`, (M, N) contiguous.

    low (M, R) wide (N, R).T is the adapters' part: x A.T and the scaled B in the forward pass, dY B and A.T in the
    backward pass. `wide` may be block-diagonal over several adapters: `first_columns` are each one's first output
    column, `first_ranks` its first rank, then R. By default it is one adapter. At most three parts and adapters.
    Results of few tiles are computed separately, in torch's smaller ones.
    """
    result: Tensor = torch.ops.flatout.segmented_product(
        list(parts), list(weights), list(row_scales), column_scale, low, wide, list(first_columns),
        list(first_ranks) or [0, wide.shape[1]], weights_kn,
    )  # fmt: skip
    return result


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.segmented_product; call before the first use of `segmented_product`."""
    schema = (
        "(Tensor[] parts, Tensor[] weights, Tensor[] row_scales, Tensor? column_scale, Tensor low, Tensor wide, "
        "int[] first_columns, int[] first_ranks, bool weights_kn) -> Tensor"
    )
    operator = define_operator("flatout::segmented_product", schema, _product, _empty)
    # without it, `recompute: budget` would take the product for free
    register_flop_formula(operator)(_num_flops)


def _num_flops(parts: list[torch.Size], *rest: Any, out_shape: torch.Size, **_: Any) -> int:
    """Count the FLOPs from the shapes of the operator's arguments; each adapter multiplies its own ranks only."""
    first_columns, first_ranks = rest[5:7]
    num_rows, num_columns = out_shape
    widths = (end - start for start, end in pairwise([*first_columns, num_columns]))
    ranks = (end - start for start, end in pairwise(first_ranks))
    low_rank = sum(width * rank for width, rank in zip(widths, ranks, strict=True))
    num_products: int = num_rows * (num_columns * sum(shape[1] for shape in parts) + low_rank)
    return 2 * num_products


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
    weights_kn: bool,
) -> Tensor:
    if low.device.type != "cuda":
        return reference.segmented_product(parts, weights, row_scales, column_scale, low, wide, weights_kn)
    shape = low.shape[0], wide.shape[0]
    # half a wave of clusters
    enough = torch.cuda.get_device_properties(low.device).multi_processor_count // 4
    if capability(low.device) != HOPPER or hopper.num_tiles(*shape) < enough:
        return _separately(parts, weights, row_scales, column_scale, low, wide, weights_kn)
    out = low.new_empty(shape)
    parts, weights, (low, wide) = ([_in_rows(own) for own in each] for each in (parts, weights, [low, wide]))
    hopper.launch(out, parts, weights, row_scales, column_scale, low, wide, first_columns, first_ranks, weights_kn)
    return out


def _separately(
    parts: list[Tensor],
    weights: list[Tensor],
    row_scales: list[Tensor],
    column_scale: Tensor | None,
    low: Tensor,
    wide: Tensor,
    weights_kn: bool,
) -> Tensor:
    """Compute the products one by one with torch, which has smaller tiles for few rows or columns."""
    total = low @ wide.T
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if column_scale is None:
            total.addmm_(part, weight if weights_kn else weight.T)
        else:
            total += scaled_product(part, weight, row_scales[i][:, None], column_scale, low.dtype)
    return total


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a matrix as it is if its rows are contiguous and begin at multiples of 16 bytes, else a copy."""
    pitch, size = tensor.stride(0) * tensor.element_size(), tensor.shape[1] * tensor.element_size()
    aligned = pitch % ALIGN_BYTES == 0 and tensor.data_ptr() % ALIGN_BYTES == 0
    fits = aligned and tensor.stride(1) == 1 and pitch >= size
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
