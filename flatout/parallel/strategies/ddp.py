"""Data parallelism: parameters are replicated, and gradients summed once per step, in or after the last backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from flatout.config.schema import Config
from flatout.errors import ResourceError
from flatout.parallel.process_group import join_group, share_weights
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.buckets import BucketedSum
from flatout.parallel.strategies.protocol import Strategy, StrategyOptions


def make(rank: Rank, device: torch.device, config: Config, options: StrategyOptions) -> Strategy:
    """Create the strategy; `comm.compress` sets the dtype in which gradients are sent."""
    compress = torch.bfloat16 if config.comm.compress == "bf16" else None
    return DDP(rank, device, overlap=config.method == "full", compress=compress)


class DDP(Strategy):
    """See Strategy for the methods. Gradients stay local while they accumulate.

    They are summed in buckets: with `overlap`, during the last backward pass (for full fine-tuning), otherwise after it
    (for adapters, whose gradients are small). `compress` is the dtype in which they are sent and summed (None: theirs).
    """

    def __init__(
        self, rank: Rank, device: torch.device, *, overlap: bool = False, compress: torch.dtype | None = None
    ) -> None:
        self.rank = rank
        self._overlap, self._compress = overlap, compress
        self._buckets: BucketedSum | None = None
        join_group(rank, device)

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        share_weights(model)
        if self._overlap:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._buckets = BucketedSum(trained, compress=self._compress)
        return model, make_optimizer()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        if self._buckets is not None:
            self._buckets.start(last=last)
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._buckets is None or not self._buckets.num_started:
                raise
            raise ResourceError(
                f"rank {self.rank.index}: out of GPU memory while gradients were being summed over ranks, so the step "
                "cannot be taken again in smaller micro-batches; lower batch.micro_batch_tokens or memory, or set "
                "recompute: full"
            ) from error

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._buckets is None:
            self._buckets = BucketedSum(parameters, compress=self._compress, overlap=False)
        self._buckets.finish()
