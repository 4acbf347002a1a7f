"""One process on one device: the strategy that does nothing, and the truth the others are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from flatout.parallel.rank import Rank
from flatout.parallel.strategy import local_grad_norm


class Single:
    """See Strategy for the methods."""

    def __init__(self, rank: Rank = Rank()) -> None:  # noqa: B008  (Rank is frozen)
        self.rank = rank

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, make_optimizer()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return local_grad_norm(parameters)

    def sum_values(self, values: Tensor) -> Tensor:
        return values
