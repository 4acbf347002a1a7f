"""How state and gradients are spread over ranks: one small protocol, so that the loop never asks which."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from flatout.parallel.rank import Rank


class Strategy(Protocol):
    """Gradients are always summed over ranks, never averaged: the loss is already divided by the global label count."""

    rank: Rank

    def prepare(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Wrap or shard the model; `blocks` are its decoder layers."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch's forward and backward; `last` says that gradients are complete after it."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last micro-batch: every rank holds the sum of all ranks' gradients."""

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """L2 norm over all parameters of all ranks, a 0-d fp32 (fp64 for fp64 gradients) tensor."""

    def sum_values(self, values: Tensor) -> Tensor:
        """Element-wise sum of a small tensor over ranks."""

    def close(self) -> None:
        """Leave the group of ranks."""


def local_grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """L2 norm of the gradients on this rank; zero when there are none."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, dtype=wide)))
    return norm
