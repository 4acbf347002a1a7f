"""Collectives over some of the ranks, which compiled layers can contain and the host does not wait for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RankGroup(NamedTuple):
    """N ranks that compute something together: the name of their process group, N, and this rank's index in it."""

    name: str
    size: int
    rank: int


def all_gather(x: Tensor, group: RankGroup) -> Tensor:
    """Start to gather `x` (T, ...) of all ranks, (N T, ...), which is undefined before `wait`."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size, group.name)


def reduce_scatter(x: Tensor, group: RankGroup) -> Tensor:
    """Start to sum `x` (N T, ...) over ranks, of which this one gets its (T, ...), undefined before `wait`."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)


def wait(x: Tensor) -> Tensor:
    """Let the device's stream wait for a started collective; the host does not."""
    return torch.ops._c10d_functional.wait_tensor(x)
