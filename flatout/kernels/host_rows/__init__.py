"""Rows of a table that stays in host memory, read by the GPU itself: `table[ids]` without a wait of the host.

The truth is `torch.nn.functional.embedding`; triton.py is its twin for a pinned table and ids on CUDA.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch.nn.functional as F
from torch import Tensor

__all__ = ["gather_rows"]


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table (V, W) in host memory, pinned where `ids` (...,) int64 are on CUDA; returns (..., W) on the ids' device.

    Without triton the host waits for the ids and copies the rows.
    """
    if ids.device.type == "cuda" and find_spec("triton") is not None:
        from flatout.kernels.host_rows.triton import gather_pinned_rows

        return gather_pinned_rows(table, ids)
    return F.embedding(ids.to(table.device), table).to(ids.device)
