"""One tile of logits to its loss and gradient in a single fused pass, made by the compiler; for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# the target of a row that only fills a tile up
NO_TARGET = -1
TileTerms = Callable[[Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]


def tile_terms(logits: Tensor, targets: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum (0-d fp32), rows that are right (0-d int64) and d loss / d logits (R, V) in the logits' dtype.

    logits (R, V) straight from the head's GEMM, targets int64 (R,). All arithmetic is fp32. A row of NO_TARGET counts
    nowhere; what its gradient is does not matter.
    """
    shaped = logits.float() * scale
    slope = None
    if softcap is not None:
        bent = torch.tanh(shaped / softcap)
        shaped, slope = bent * softcap, 1 - bent * bent
    log_total = shaped.logsumexp(-1, keepdim=True)
    picked = targets[:, None]
    loss_sum = torch.where(picked == NO_TARGET, 0.0, log_total - shaped.gather(-1, picked.clamp(min=0))).sum()
    num_correct = (shaped.argmax(-1, keepdim=True) == picked).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device)[None] == picked
    gradient = torch.exp(shaped - log_total) - is_target.float()
    gradient = gradient * scale if slope is None else gradient * slope * scale
    return loss_sum, num_correct, gradient.to(logits.dtype)


@cache
def compiled_tile_terms() -> TileTerms:
    """`tile_terms` compiled once a process, dynamic in rows."""
    compiled: TileTerms = torch.compile(tile_terms, dynamic=True)
    return compiled
