"""Few bits without bias: fp32 to bf16 by stochastic rounding, optimizer moments as 8-bit codes by blocks."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK_SIZE = 256
_LOW_32 = 0xFFFFFFFF
# odd, below 2^31, so that its product with a 32-bit number fits int64
_MULTIPLIER = 0x45D9F3B


def random_bits(like: Tensor, key: Tensor) -> Tensor:
    """int64 of 16 random bits each, in the shape (n,) of `like`: a function of `key` and the place alone.

    `key` is a 0-d int64 tensor in [0, 2^32).
    A counter hashed by two rounds of shift, exclusive or and multiply: no state to save, the same on every device.
    """
    number = (torch.arange(like.numel(), device=like.device) + key) & _LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & _LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & _LOW_32
    return (number ^ (number >> 16)) & 0xFFFF


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 values to one of their two bf16 neighbours, the nearer the likelier: the mean over `bits` is the value.

    `bits` are uniform in [0, 2^16), of the same shape. A number is rounded away from zero when its lower 16 bits plus
    the random ones carry over. Infinities and NaN stay what they are.
    """
    added = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    # a NaN's bits could carry over into the sign, and the NaN would become a zero
    return torch.where(values.isfinite(), added.view(torch.float32), values).to(torch.bfloat16)


@cache
def dynamic_table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of the dynamic 8-bit code, fp32 ascending, largest 1 (Dettmers et al. 2021, arXiv:2110.02861).

    Seven decades below 1, each with twice the values of the one below it, evenly spread; and 0. Unsigned codes have
    twice as many values a decade as signed ones have on each side.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        centres = [(0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (decade - 6) for place in range(count)]
        values += centres + [-centre for centre in centres] * signed
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def quantize_blocks(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes (n,) and fp32 scales (n / 256,) of `values` fp32 (n,): nearest entry of `table` times the scale.

    A scale is its block's largest magnitude; n is a multiple of 256.
    """
    blocks = values.view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1)
    borders = (table[1:] + table[:-1]) / 2
    # a block of zeros must not be divided by zero
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], borders)
    return codes.view(-1).to(torch.uint8), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """fp32 (n,): what `quantize_blocks` gave codes for."""
    return (table[codes.to(torch.int32)].view(-1, BLOCK_SIZE) * scales[:, None]).view(-1)
