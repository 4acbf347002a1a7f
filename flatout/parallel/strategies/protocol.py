"""The protocol of a strategy, which distributes state and gradients over ranks, independent of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.config.parallel import StrategyTraits
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank

# elements per partial norm on a CPU
NORM_PART = 1 << 14


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """The plan's decisions, passed to `make` in a strategy's module.

    `dtype` is the compute dtype. `compute` is the same if the trained weights are wider, else None.
    """

    traits: StrategyTraits
    num_replicas: int
    reshard_after_forward: bool
    compute: torch.dtype | None
    dtype: torch.dtype


class Strategy(Protocol):
    """Gradients are always summed over ranks, never averaged: the loss is already divided by the global label count.

    The default methods are for whole parameters on every rank, with gradients that need no sum over ranks.

    Every rank calls the same methods in the same order. `sum_gradients`, `grad_norm` and `sum_values` run collectives,
    and with sharded state every forward and backward pass does too.
    """

    rank: Rank

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap, or shard in place, the module whose forward returns the loss; `blocks` are its decoder layers.

        Afterwards the module's parameters are the ones to train, as DTensors if state is sharded. Returns the module to
        call for the loss, and the optimizer to step, made by `make_optimizer` over those parameters.
        """

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap one micro-batch's forward and backward pass; `last` means that gradients are complete after it.

        Raises ResourceError when memory runs out and the micro-batch cannot be retried on all ranks.
        """

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Complete the sum over ranks after the last micro-batch; each rank then holds the sum, or its shard of it.

        A parameter that no rank reached gets a gradient of zero, so that all strategies update it in the same way.
        """
        fill_missing_gradients(parameters)

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the L2 norm over the gradients of all parameters and ranks, 0-d fp32 (fp64 for fp64 gradients)."""
        return local_grad_norm(parameters)

    def sum_values(self, values: Tensor) -> Tensor:
        """Sum a small tensor over ranks, element by element, in place."""
        if self.rank.world > 1:
            dist.all_reduce(values)
        return values


@runtime_checkable
class PartitionedOptimizer(Protocol):
    """An optimizer that keeps partitioned weights and state outside the model's parameters; methods are collective."""

    def weight(self, tensor: Tensor) -> Tensor:
        """Return a whole weight on every rank, whether it is trained or frozen."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a trained weight's whole optimizer state, by key; empty before the first update."""

    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a weight from its whole value."""

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set one entry of the optimizer's state from its whole value."""


@contextmanager
def oom_as_resource_error(rank: Rank) -> Iterator[None]:
    """Raise ResourceError when memory runs out in a pass that all ranks take together."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"rank {rank.index}: out of GPU memory in a pass that all ranks take together, so its samples cannot be "
            "taken again in smaller micro-batches; lower batch.micro_batch_tokens or memory, or set recompute: full"
        ) from error


def fill_missing_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set missing gradients to zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory; a plain tensor is returned whole."""
    whole: Any = tensor.detach()
    part: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return part


def local_grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the local shards of all gradients that exist."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm of this rank's gradients; zero if there are none."""
    grads = local_grads(parameters)
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    if grads[0].device.type == "cpu":
        # torch's CPU norm adds fp32 squares into a few sums, and is off by 1e-4 for 5 million elements
        grads = [part for grad in grads for part in grad.reshape(-1).split(NORM_PART)]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, dtype=wide)))
    return norm
