"""Several products and a low-rank one in a single sum: a frozen layer with its adapters, or its input gradient.

No rounding to 16 bits can swallow the adapters' part. If the frozen product were rounded before the part is added, a
part smaller than half a unit in the last place of the product would vanish, and early in training most are smaller.

reference.py defines the operation, and computes it where no kernel does; hopper.cu is its kernel for Hopper GPUs. It is
a custom operator without a derivative: after `register_ops`, torch.compile traces it, but neither fuses anything into
it nor takes it apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.capability import HOPPER, capability
from flatout.kernels.cuda_source import in_aligned_rows
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
    try:
        if capability(device) == HOPPER:
            hopper.load(device, fp8=fp8)
    except (ImportError, OSError, RuntimeError) as error:
        return error.with_traceback(None)
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
    use_kernel: bool = True,
) -> list[Tensor]:
    """Return the sum of `Segments` block by block, (M, N_i) contiguous; by default, `wide` is one block.

    low wide.T is the adapters' part: x A.T and the scaled B in the forward pass, dY B and A.T in the backward pass.
    `use_kernel` allows the kernel for Hopper GPUs, for operands that `fits`, with at most three parts and three blocks
    (one per adapter). Small results use torch's products all the same, whose tiles are smaller.
    """
    return torch.ops.flatout.segmented_product(
        list(parts), list(weights), list(row_scales), column_scale, low, wide, list(first_columns),
        list(first_ranks) or [0, wide.shape[1]], weights_kn, use_kernel,
    )  # fmt: skip


def sum_onto(
    start: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], *, row_scales: Sequence[Tensor] = (),
    column_scale: Tensor | None = None, weights_kn: bool = False,
) -> Tensor:  # fmt: skip
    """Return `start` (M, N) plus the frozen products of `Segments`, summed in fp32 and rounded to its dtype."""
    return torch.ops.flatout.sum_onto(start, list(parts), list(weights), list(row_scales), column_scale, weights_kn)


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.segmented_product and sum_onto; call before their first use."""
    schema = (
        "(Tensor[] parts, Tensor[] weights, Tensor[] row_scales, Tensor? column_scale, Tensor low, Tensor wide, "
        "int[] first_columns, int[] first_ranks, bool weights_kn, bool use_kernel) -> Tensor[]"
    )
    define_operator("flatout::segmented_product", schema, _product, _empty, _num_flops)
    schema = (
        "(Tensor start, Tensor[] parts, Tensor[] weights, Tensor[] row_scales, Tensor? column_scale, bool weights_kn) "
        "-> Tensor"
    )
    define_operator("flatout::sum_onto", schema, _sum_onto, lambda start, *_: start.new_empty(start.shape), _sum_flops)


def _num_flops(*shapes: Any, **_: Any) -> Any:
    """Count the FLOPs from `Segments` with shapes as its tensors; each adapter multiplies its own ranks only."""
    own: Any = Segments(*shapes[:-1])
    num_rows, num_columns = own.low[0], own.wide[0]
    widths = (end - start for start, end in pairwise([*own.first_columns, num_columns]))
    ranks = (end - start for start, end in pairwise(own.first_ranks))
    low_rank = sum(width * rank for width, rank in zip(widths, ranks, strict=True))
    return 2 * num_rows * (num_columns * sum(part[1] for part in own.parts) + low_rank)


def _sum_flops(start: Any, parts: Any, *_: Any, **__: Any) -> Any:
    return 2 * start[0] * start[1] * sum(part[1] for part in parts)


def _empty(*operands: Any) -> list[Tensor]:
    own = Segments(*operands[:-1])
    return [own.low.new_empty(own.low.shape[0], width) for width in own.widths]


def _product(*operands: Any) -> list[Tensor]:
    own, use_kernel = Segments(*operands[:-1]), operands[-1]
    if own.low.dtype.itemsize > 2:
        return reference.segmented_product(own)
    if use_kernel and capability(own.low.device) == HOPPER and _fills(own):
        outs = _empty(*operands)
        parts, weights, (low, wide) = (
            list(map(in_aligned_rows, each)) for each in (own.parts, own.weights, (own.low, own.wide))
        )
        hopper.launch(outs, own._replace(parts=parts, weights=weights, low=low, wide=wide))
        return outs
    return reference.in_turn(own)


def _fills(own: Segments) -> bool:
    """Whether the kernel's tiles of these results are at least half a wave of clusters."""
    enough = torch.cuda.get_device_properties(own.low.device).multi_processor_count // 4
    return hopper.num_tiles(own.low.shape[0], own.widths) >= enough


def _sum_onto(
    start: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], row_scales: Sequence[Tensor],
    column_scale: Tensor | None, weights_kn: bool,
) -> Tensor:  # fmt: skip
    out = start.clone(memory_format=torch.contiguous_format)
    if row_scales or start.dtype.itemsize > 2 or start.is_cuda:
        exact = torch.promote_types(start.dtype, torch.float32)
        return out.add_(reference.products(parts, weights, row_scales, column_scale, weights_kn, exact))
    for part, weight in zip(parts, weights, strict=True):
        out.addmm_(part, weight if weights_kn else weight.T)
    return out
