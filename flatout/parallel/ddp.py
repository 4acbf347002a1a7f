"""Replicated parameters whose gradients are summed once a step, in the last backward pass or right after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.errors import ResourceError
from flatout.parallel.buckets import BucketedSum
from flatout.parallel.group import join_group, share_weights
from flatout.parallel.rank import Rank
from flatout.parallel.strategy import local_grad_norm


class DDP:
    """See Strategy for the methods. Gradients stay local while they accumulate.

    With `overlap` they are summed in buckets during the last backward pass: for full fine-tuning. Without, all of
    them in one piece after it: for adapters, whose gradients are one flat tensor. `compress` is the dtype they are
    sent and added in; None: their own.
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
                "recompute: layers"
            ) from error

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._buckets is not None:
            self._buckets.finish()
            return
        for parameter in parameters:
            # a rank without samples took no backward pass, yet must take part in the sum
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for dtype, grads in by_dtype.items():
            sent = self._compress or dtype
            if len(grads) == 1 and sent == dtype:
                dist.all_reduce(grads[0])
                continue
            flat = torch.cat([grad.reshape(-1).to(sent) for grad in grads])
            dist.all_reduce(flat)
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return local_grad_norm(parameters)

    def sum_values(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values
