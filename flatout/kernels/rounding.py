"""Random bits without a state, and fp32 values at random places within the rounding of a narrower dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF
# odd, below 2^31, so that its product with a 32-bit number fits int64
_MULTIPLIER = 0x45D9F3B
# odd numbers, one for each dimension of an index
_STRIDES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
# bits of an fp32 mantissa that a narrower dtype does not have
_LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}
_CHUNK_ELEMENTS = 1 << 24


def hash_32(number: Tensor) -> Tensor:
    """Mix the bits of int64 numbers in [0, 2^32) by two rounds of shift, xor and multiply."""
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & LOW_32
    return number ^ (number >> 16)


@torch.no_grad()
def dither_within_rounding(masters: Tensor, dtype: torch.dtype, *, seed: int, offset: Sequence[int] = ()) -> None:
    """Move fp32 values that are exactly values of `dtype` (bf16, fp16) to random places that round to the same value.

    Works in place. Places are uniform over what rounds to nearest to the value. They depend on `seed` and an element's
    index in the whole tensor, so a part of it, which begins at `offset`, gets the places of the whole. Other values,
    zeros and what is not finite are left alone; subnormal values of fp16 move less. Up to four dimensions.
    """
    offset = tuple(offset) or (0,) * masters.dim()
    if masters.numel() > _CHUNK_ELEMENTS and len(masters) > 1:
        # in parts: the bits take eight bytes an element
        num_rows = max(1, _CHUNK_ELEMENTS * len(masters) // masters.numel())
        for begin, part in zip(
            range(offset[0], offset[0] + len(masters), num_rows), masters.split(num_rows), strict=True
        ):
            dither_within_rounding(part, dtype, seed=seed, offset=(begin, *offset[1:]))
        return
    number = torch.full((), seed & LOW_32, dtype=torch.int64, device=masters.device)
    for dim, (size, begin) in enumerate(zip(masters.shape, offset, strict=True)):
        index = torch.arange(begin, begin + size, device=masters.device) * _STRIDES[masters.dim() - 1 - dim]
        number = number + index.view(-1, *[1] * (masters.dim() - 1 - dim))
    half = 1 << (_LOST_BITS[dtype] - 1)
    bits = hash_32(number & LOW_32).bitwise_and_(2 * half - 1).sub_(half).to(torch.int32)
    moved = (masters.view(torch.int32) + bits).view(torch.float32)
    narrow = masters.to(dtype)
    keeps = (narrow == masters) & (moved.to(dtype) == narrow) & (masters != 0) & masters.isfinite()
    masters.copy_(torch.where(keeps, moved, masters))
