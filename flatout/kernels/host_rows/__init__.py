"""Rows of a table in host memory, read directly by the GPU: `table[ids]` without synchronizing the host.

The reference is `torch.nn.functional.embedding`; triton.py is its equivalent for a pinned table and ids on CUDA.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.capability import has_triton


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather rows of a table (V, W) in host memory by `ids` (...,) int64; return (..., W) on the device of `ids`.

    The table must be pinned if `ids` are on CUDA. Without triton, the host waits for the ids and copies the rows.
    """
    if has_triton(ids.device):
        from flatout.kernels.host_rows.triton import gather_pinned_rows

        return gather_pinned_rows(table, ids)
    return F.embedding(ids.to(table.device), table).to(ids.device)
