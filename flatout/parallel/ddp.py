"""Replicated parameters, one summed all-reduce of flat gradients a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.parallel.rank import Rank
from flatout.parallel.strategy import local_grad_norm


class DDP:
    """See Strategy for the methods. Gradients stay local while they accumulate; one sum follows the last."""

    def __init__(self, rank: Rank, *, backend: str) -> None:
        self.rank = rank
        if not dist.is_initialized():
            dist.init_process_group(backend, rank=rank.index, world_size=rank.world)

    def prepare(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            # a rank without samples took no backward pass, yet must take part in the sum
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for grads in by_dtype.values():
            if len(grads) == 1:
                dist.all_reduce(grads[0])
                continue
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat)
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return local_grad_norm(parameters)

    def sum_values(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def close(self) -> None:
        dist.destroy_process_group()
