"""NF4 with double quantization in bitsandbytes' format: the definition, in plain torch, on any device.

A weight is flattened and split into blocks of 64. Each block has its largest absolute value (absmax), and each element
one of 16 levels, quantiles of a normal distribution (QLoRA, arXiv:2305.14314), packed two per byte, the first in the
high bits. The absmax, less their mean (`offset`), are split into blocks of 256 and stored as one byte each on the
dynamic 8-bit map of "8-bit Approximations for Parallelism in Deep Learning" (arXiv:1511.04561), with one fp32 absmax
per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
NESTED_BLOCK = 256
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP8_MAX = 448.0
# weights are quantized in pieces of this many elements, so that temporaries stay small compared with a weight
_PIECE = 1 << 24


class Nf4Weight(NamedTuple):
    """A weight of n elements, B = ceil(n / 64) blocks."""

    packed: Tensor  # uint8 (ceil(n / 2),)
    absmax: Tensor  # uint8 (B,)
    nested_absmax: Tensor  # fp32 (ceil(B / 256),)
    nested_map: Tensor  # fp32 (256,)
    offset: Tensor  # fp32 ()


def nf4_levels(device: torch.device) -> Tensor:
    """Return the 16 levels, fp32, ascending."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)


def dynamic_map() -> Tensor:
    """Return the signed dynamic 8-bit map, fp32 (256,) on the CPU, ascending.

    For the powers of ten from 1e-6 to 1, the interval from 0.1 to 1 times the power is split into 1, 2, 4, .. 64 equal
    parts, whose midpoints are levels, with both signs; in addition 0 and 1.
    """
    levels = [0.0, 1.0]
    for exponent in range(7):
        boundaries = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = (boundaries[:-1] + boundaries[1:]) / 2.0
        levels += (10 ** (exponent - 6) * middles).tolist() + (-(10 ** (exponent - 6)) * middles).tolist()
    return torch.tensor(sorted(levels), dtype=torch.float32)


def quantize(weight: Tensor) -> Nf4Weight:
    """Quantize a weight of any shape and float dtype, flattened; on the weight's device."""
    flat = weight.detach().reshape(-1)
    absmax, codes = _quantize_blocks(flat, nf4_levels(weight.device), BLOCK)
    if len(codes) % 2:
        # an odd element is paired with the value 0, which is level 7
        codes = torch.cat([codes, codes.new_full((1,), 7)])
    offset = absmax.mean()
    nested_map = dynamic_map().to(weight.device)
    nested_absmax, absmax_codes = _quantize_blocks(absmax - offset, nested_map, NESTED_BLOCK)
    return Nf4Weight((codes[::2] << 4) | codes[1::2], absmax_codes, nested_absmax, nested_map, offset)


def _quantize_blocks(flat: Tensor, levels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (absmax of each block, fp32; index of the nearest level for each element, uint8)."""
    boundaries = (levels[:-1] + levels[1:]) / 2
    absmax, codes = [], []
    for piece in flat.split(_PIECE):
        values = torch.nn.functional.pad(piece.float(), (0, -len(piece) % block)).view(-1, block)
        largest = values.abs().amax(dim=1)
        # bitsandbytes multiplies by the reciprocal in fp32; a block of zeros keeps absmax 0
        scaled = values * (1.0 / largest.clamp(min=1e-38))[:, None]
        numbers = torch.bucketize(scaled.clamp(-1, 1), boundaries, out_int32=True).to(torch.uint8)
        absmax.append(largest)
        codes.append(numbers.view(-1)[: len(piece)])
    return torch.cat(absmax), torch.cat(codes)


def dequantize_absmax(weight: Nf4Weight) -> Tensor:
    """Return the absmax of each block, fp32 (B,): map * nested absmax, rounded, then plus the offset."""
    num_blocks = len(weight.absmax)
    scales = weight.nested_absmax.repeat_interleave(NESTED_BLOCK)[:num_blocks]
    return weight.nested_map[weight.absmax.int()] * scales + weight.offset


def row_scale(weight: Nf4Weight, num_rows: int, num_columns: int) -> Tensor:
    """Return each row's scale for float8_e4m3fn, fp32 (num_rows,): the largest absmax of its blocks / 448, never 0."""
    absmax = dequantize_absmax(weight).abs()
    if num_columns % BLOCK == 0:
        largest = absmax.view(num_rows, -1).amax(dim=1)
    else:
        columns = torch.arange(num_columns, device=absmax.device)
        largest = torch.stack([absmax[(row * num_columns + columns) // BLOCK].amax() for row in range(num_rows)])
    return (largest / FP8_MAX).clamp(min=1e-12)


def dequantize(
    weight: Nf4Weight, num_rows: int, num_columns: int, dtype: torch.dtype, scale: Tensor | None = None
) -> Tensor:
    """Return the dense weight (num_rows, num_columns): level * absmax in fp32, then rounded to `dtype`.

    With each row's `scale`, fp32 (num_rows,), it is level * (absmax / scale).
    """
    absmax = dequantize_absmax(weight)
    whole_blocks = num_columns % BLOCK == 0
    if scale is not None and whole_blocks:
        absmax = absmax / scale.repeat_interleave(num_columns // BLOCK)
    codes = torch.stack([weight.packed >> 4, weight.packed & 15], dim=1).view(-1)[: num_rows * num_columns]
    values = nf4_levels(codes.device)[codes.int()]
    dense = (values * absmax.repeat_interleave(BLOCK)[: len(values)]).view(num_rows, num_columns)
    if scale is not None and not whole_blocks:
        dense = dense / scale[:, None]
    return dense.to(dtype)
