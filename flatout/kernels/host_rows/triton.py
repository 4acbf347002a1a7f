"""Gather rows of a pinned host tensor through the unified address space of host and GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gather(table, ids, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row)
    values = tl.load(table + source * width + columns, mask=columns < width)
    tl.store(out + row * width + columns, values, mask=columns < width)


def gather_pinned_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather rows of a pinned table (V, W) by ids (...,) on CUDA; return (..., W). Raises ValueError if not pinned."""
    if not table.is_pinned():
        raise ValueError("the table is not in pinned host memory, which the GPU cannot read")
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=ids.device)
    with torch.cuda.device(ids.device):
        _gather[ids.numel(), triton.cdiv(table.shape[1], _BLOCK)](table, ids, out, table.shape[1], BLOCK=_BLOCK)
    return out
