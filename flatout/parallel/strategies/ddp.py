"""Data parallelism: parameters are replicated, and gradients summed once per step, in or after the last backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from flatout.parallel.process_group import share_weights
from flatout.parallel.shards import is_slice, replicas_of
from flatout.parallel.strategies.buckets import BucketedSum
from flatout.parallel.strategies.protocol import Strategy, out_of_memory


class DDP(Strategy):
    """Gradients stay local while they accumulate, and are then summed in buckets, in the dtype of `comm.compress`.

    With full fine-tuning this overlaps with the last backward pass; adapters' gradients are small and sent after it.
    """

    _sums: Sequence[BucketedSum] = ()

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        share_weights(model)
        # it may load the weights
        optimizer = make_optimizer()
        if self._config.method == "full":
            self._sums = self._make_sums(
                [parameter for parameter in model.parameters() if parameter.requires_grad], overlap=True
            )
        return model, optimizer

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        for buckets in self._sums:
            buckets.start(last=last)
        try:
            yield
        except torch.OutOfMemoryError as error:
            passes_alone = self.expert_mesh is None and self.context_mesh is None
            if passes_alone and not any(buckets.sums for buckets in self._sums):
                raise
            shared = "the gradient all-reduce" if passes_alone else "a pass with other ranks"
            raise out_of_memory(self.rank, shared) from error

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self._sums = self._sums or self._make_sums(parameters, overlap=False)
        for buckets in self._sums:
            buckets.finish()

    def _make_sums(self, parameters: Sequence[nn.Parameter], *, overlap: bool) -> list[BucketedSum]:
        """Return the sums over all ranks and, for slices of experts, over the ranks that hold the same ones."""
        parts = [[parameter for parameter in parameters if is_slice(parameter) is sliced] for sliced in (False, True)]
        compress = self._config.comm.compress
        return [
            BucketedSum(part, compress=compress, overlap=overlap, group=replicas_of(part[0])) for part in parts if part
        ]
