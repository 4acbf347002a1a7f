"""Data parallelism: parameters are replicated, and gradients summed once per step, in or after the last backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from flatout.errors import ResourceError
from flatout.parallel.process_group import share_weights
from flatout.parallel.strategies.buckets import BucketedSum
from flatout.parallel.strategies.protocol import Strategy


class DDP(Strategy):
    """Gradients stay local while they accumulate, and are then summed in buckets, in the dtype of `comm.compress`.

    With full fine-tuning this overlaps with the last backward pass; adapters' gradients are small and sent after it.
    """

    _buckets: BucketedSum | None = None

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        share_weights(model)
        if self._config.method == "full":
            trained = [held for held in model.parameters() if held.requires_grad]
            self._buckets = BucketedSum(trained, compress=self._config.comm.compress)
        return model, make_optimizer()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        if self._buckets is not None:
            self._buckets.start(last=last)
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._buckets is None or not self._buckets.sums:
                raise
            raise ResourceError(
                f"rank {self.rank.index}: out of GPU memory during the gradient all-reduce, so the step "
                "cannot be repeated with smaller micro-batches; lower batch.micro_batch_tokens or memory, or set "
                "recompute: full"
            ) from error

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._buckets is None:
            self._buckets = BucketedSum(parameters, compress=self._config.comm.compress, overlap=False)
        self._buckets.finish()
