"""Low-precision formats: stochastic rounding from fp32 to bf16, and block-wise 8-bit codes for optimizer moments."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK_SIZE = 256
_LOW_32 = 0xFFFFFFFF
# odd, below 2^31, so that its product with a 32-bit number fits int64
_MULTIPLIER = 0x45D9F3B


def random_bits(like: Tensor, key: Tensor) -> Tensor:
    """Return 16 random bits per element as int64 (n,), the shape of `like`, from only `key` and the element's index.

    `key` is a 0-d int64 tensor in [0, 2^32). The bits are a counter hashed by two rounds of shift, xor and multiply, so
    there is no state to save and they are the same on every device.
    """
    number = (torch.arange(like.numel(), device=like.device) + key) & _LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & _LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & _LOW_32
    return (number ^ (number >> 16)) & 0xFFFF


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values stochastically to one of their two bf16 neighbors, so that the mean over `bits` is the value.

    `bits` are uniform in [0, 2^16), of the same shape. A value is rounded away from zero when its lower 16 bits plus
    the random bits carry over. Infinities and NaN are kept.
    """
    added = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    # a NaN's bits could carry over into the sign, which would turn the NaN into a zero
    return torch.where(values.isfinite(), added.view(torch.float32), values).to(torch.bfloat16)


@cache
def dynamic_table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 fp32 values of the dynamic 8-bit code, ascending up to 1.

    The code is that of Dettmers et al. 2021, arXiv:2110.02861. The values are 0, 1 and seven decades below 1, each with
    twice as many evenly spaced values as the one below it. Unsigned codes have twice as many values per decade as
    signed ones have on each side of zero.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        centres = [(0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (decade - 6) for place in range(count)]
        values += centres + [-centre for centre in centres] * signed
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def quantize_blocks(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize fp32 `values` (n,) to uint8 codes (n,) for the nearest entries of `table`, and fp32 scales (n / 256,).

    A block's scale is its largest magnitude; n must be a multiple of 256.
    """
    blocks = values.view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1)
    boundaries = (table[1:] + table[:-1]) / 2
    # clamp, so that a block of zeros is not divided by zero
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], boundaries)
    return codes.view(-1).to(torch.uint8), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return the fp32 values (n,) that the codes and scales of `quantize_blocks` stand for."""
    return (table[codes.to(torch.int32)].view(-1, BLOCK_SIZE) * scales[:, None]).view(-1)
