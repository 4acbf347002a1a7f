"""Sum gradients over ranks in buckets, each as soon as the backward pass has completed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.parallel.strategies.protocol import fill_missing_gradients

# large enough for the full bandwidth of NVLink and InfiniBand, small enough to start early
BUCKET_BYTES = 32 << 20


def into_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of one dtype and at least `bucket_bytes`, except for the last ones.

    Parameters are in reverse order, which is about the order of their gradients. One of at least `bucket_bytes` gets
    its own bucket, so that its gradient is sent without a copy.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        if parameter.nbytes >= bucket_bytes:
            buckets.append([parameter])
            continue
        bucket = open_buckets.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(grad.nbytes for grad in bucket) >= bucket_bytes:
            buckets.append(open_buckets.pop(parameter.dtype))
    return buckets + list(open_buckets.values())


class BucketedSum:
    """Sums gradients of `parameters` over all ranks or those of `group`; with `overlap`, during the backward pass.

    In the last pass a bucket's sum starts when all of its gradients are complete. Buckets start in a fixed order, so
    that ranks match. `finish` starts the remaining ones, with zeros for missing gradients, and waits for all.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        compress: Literal["none", "bf16"] = "none",
        overlap: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._buckets = into_buckets(parameters)
        self._group = group
        self._compress = torch.bfloat16 if compress == "bf16" else None
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._listening = False
        self._missing: list[int] = []
        # (work, the tensor being reduced, gradients to copy it to; none if it is the gradient) of each started sum
        self.sums: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for parameter in parameters if overlap else ():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def start(self, *, last: bool) -> None:
        """Prepare for a backward pass; the `last` one of the step completes the gradients."""
        self._listening = last
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Complete all sums; every rank's gradients are then the sums over all ranks, in stream order."""
        self._listening = False
        while len(self.sums) < len(self._buckets):
            self._launch()
        for work, sent, grads in self.sums:
            work.wait()
            if grads:
                parts = sent.split([grad.numel() for grad in grads])
                torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
        self.sums.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._listening:
            return
        self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index]
        while len(self.sums) < len(self._buckets) and self._missing[len(self.sums)] == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[len(self.sums)]
        # a rank without samples ran no backward pass, but must take part in the sum
        fill_missing_gradients(bucket)
        grads = [parameter.grad for parameter in bucket if parameter.grad is not None]
        dtype = self._compress or grads[0].dtype
        if len(grads) == 1 and dtype == grads[0].dtype and grads[0].is_contiguous():
            sent, grads = grads[0], []
        else:
            sent = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        self.sums.append((work, sent, grads))
