"""Gradients summed over ranks in pieces, each as soon as the backward pass has made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

# large enough for the full bandwidth of NVLink and InfiniBand, small enough to start early
BUCKET_BYTES = 32 << 20


@dataclass(slots=True)
class _Sum:
    """One bucket's sum under way: `sent` is what travels, the gradients themselves where `grads` is empty."""

    work: dist.Work
    sent: Tensor
    grads: list[Tensor]


def into_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, about as their gradients come, in lists of one dtype and at least so many bytes.

    A parameter of that size is a list of its own, so that its gradient travels without a copy.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        if _num_bytes(parameter) >= bucket_bytes:
            buckets.append([parameter])
            continue
        bucket = open_buckets.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(map(_num_bytes, bucket)) >= bucket_bytes:
            buckets.append(open_buckets.pop(parameter.dtype))
    return buckets + list(open_buckets.values())


class BucketedSum:
    """Sums gradients of `parameters` over all ranks while the backward pass goes on.

    In the last pass a bucket's sum starts when all of its gradients are there, always in the same order
    of buckets, so that ranks match; `finish` starts the others, with zeros for gradients that are missing, and waits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, compress: torch.dtype | None = None) -> None:
        self._buckets = into_buckets(parameters)
        self._compress = compress
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._listening = False
        self._missing: list[int] = []
        self._sums: list[_Sum] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def num_started(self) -> int:
        """Buckets whose sum is under way."""
        return len(self._sums)

    def start(self, *, last: bool) -> None:
        """A backward pass comes; the `last` one of the step completes the gradients."""
        self._listening = last
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Every rank's gradients are the sums of all ranks', in the stream's order of work."""
        self._listening = False
        while len(self._sums) < len(self._buckets):
            self._launch()
        for pending in self._sums:
            pending.work.wait()
            if pending.grads:
                parts = pending.sent.split([grad.numel() for grad in pending.grads])
                views = [part.view_as(grad) for part, grad in zip(parts, pending.grads, strict=True)]
                torch._foreach_copy_(pending.grads, views)
        self._sums.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._listening:
            return
        self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index]
        while self.num_started < len(self._buckets) and self._missing[self.num_started] == 0:
            self._launch()

    def _launch(self) -> None:
        grads = [_gradient(parameter) for parameter in self._buckets[self.num_started]]
        dtype = self._compress or grads[0].dtype
        if len(grads) == 1 and dtype == grads[0].dtype and grads[0].is_contiguous():
            sent, grads = grads[0], []
        else:
            sent = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        self._sums.append(_Sum(work, sent, grads))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        # a rank without samples took no backward pass, yet must take part in the sum
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
