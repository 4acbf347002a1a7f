"""One process on one device: nothing to sum. The other strategies are tested against this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from flatout.config.schema import Config
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Strategy, StrategyOptions


def make(rank: Rank, device: torch.device, config: Config, options: StrategyOptions) -> Strategy:
    """Create the strategy of a single process."""
    return Single(rank)


class Single(Strategy):
    """See Strategy for the methods."""

    def __init__(self, rank: Rank = Rank()) -> None:  # noqa: B008  (Rank is frozen)
        self.rank = rank

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, make_optimizer()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()
