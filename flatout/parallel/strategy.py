"""How state and gradients are spread over ranks: one small protocol, so that the loop never asks which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flatout.errors import ResourceError
from flatout.parallel.rank import Rank

# elements whose squares are added in one piece on a CPU
NORM_PART = 1 << 14


class Strategy(Protocol):
    """Gradients are always summed over ranks, never averaged: the loss is already divided by the global label count.

    Every rank calls the same methods in the same order; those with collectives are `sum_gradients`, `grad_norm` and
    `sum_values`, and for sharded state every forward and backward pass as well.
    """

    rank: Rank

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap or shard in place the module whose forward gives the loss; `blocks` are its decoder layers.

        After it the module's parameters are the ones to train: DTensors where state is sharded. Returns what to call
        for the loss, and the optimizer that `make_optimizer` makes over those parameters, as it is to be stepped.
        """

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch's forward and backward; `last` says that gradients are complete after it.

        Raises ResourceError for memory that runs out where other ranks could not take the micro-batch again.
        """

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last micro-batch: every rank holds the sum of all ranks' gradients, or its part of the sum."""

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """L2 norm over all parameters of all ranks, a 0-d fp32 (fp64 for fp64 gradients) tensor."""

    def sum_values(self, values: Tensor) -> Tensor:
        """Element-wise sum of a small tensor over ranks."""


@runtime_checkable
class KeepsState(Protocol):
    """An optimizer that keeps weights and state elsewhere than in the model's parameters, in parts; all collective."""

    def weight(self, tensor: Tensor) -> Tensor:
        """A whole weight on every rank, trained or not."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A trained weight's whole optimizer state by its keys; empty before the first update."""

    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Put a whole weight in."""

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Put one whole entry of the optimizer's state in."""


@contextmanager
def no_second_try(rank: Rank) -> Iterator[None]:
    """Memory that runs out in a pass of all ranks is a ResourceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"rank {rank.index}: out of GPU memory in a pass that all ranks take together, so its samples cannot be "
            "taken again in smaller micro-batches; lower batch.micro_batch_tokens or memory, or set recompute: layers"
        ) from error


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (DTensor), sharing its memory; a plain tensor is its own part."""
    whole: Any = tensor.detach()
    part: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return part


def local_grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the gradients that are there."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """L2 norm of the gradients on this rank; zero when there are none."""
    grads = local_grads(parameters)
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    if grads[0].device.type == "cpu":
        # torch's CPU norm adds fp32 squares in a few sums: over 5 million of them it loses 1e-4
        grads = [part for grad in grads for part in grad.reshape(-1).split(NORM_PART)]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, dtype=wide)))
    return norm
