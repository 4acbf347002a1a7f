"""The protocol of a strategy, which distributes state and gradients over ranks, independent of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from flatout.config.parallel import STRATEGIES, StrategyName
from flatout.config.schema import Config
from flatout.errors import Fix, ResourceError
from flatout.parallel.process_group import join_group
from flatout.parallel.rank import Rank
from flatout.parallel.shards import is_slice, local_part, local_shard_of
from flatout.planner.parallel_layout import ParallelLayout

# elements per partial norm on a CPU
NORM_PART = 1 << 14


class EngineState(Protocol):
    """Weights and optimizer state that an engine keeps outside the model's parameters. All values are whole tensors.

    Every method that gets or sets values is collective.
    """

    def weight(self, tensor: Tensor) -> Tensor:
        """Return a weight, trained or frozen."""

    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a trained weight."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a trained weight's optimizer state, by key; empty before the first update."""

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set one entry of a trained weight's optimizer state."""


class Strategy:
    """Gradients are always summed over ranks, never averaged: the loss is already divided by the step's normalizer.

    The default methods are for whole parameters on every rank, with gradients that need no sum over ranks.

    Every rank calls the same methods in the same order. `sum_gradients`, `grad_norm` and `sum_values` run collectives,
    and with sharded state, or experts or micro-batches shared by several ranks, every forward and backward pass does.

    `expert_mesh` has the ranks that hold the same slice of the experts along its first dimension, and those that share
    them along its second; None if every rank has all. Slices are plain parameters with a mark (`mark_slice`): no
    strategy shards them, and their gradients are summed over the first dimension alone. `context_mesh` has the ranks
    that share micro-batches along its second dimension; None if none do.

    `engine_state` holds weights and optimizer state once `prepare` has returned; None: the model's parameters and the
    optimizer do.
    """

    engine_state: EngineState | None = None

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        config: Config,
        layout: ParallelLayout,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
    ) -> None:
        """Join the other ranks. The model computes in `dtype`; with `autocast`, trained weights are wider than that."""
        self.rank, self._device, self._config, self._layout = rank, device, config, layout
        self._dtype, self._autocast = dtype, autocast
        self.check_settings()
        join_group(rank, device)
        self.expert_mesh = self._groups_of(layout.expert_ranks, "expert")
        self.context_mesh = self._groups_of(layout.context_ranks, "context")

    def check_settings(self) -> None:
        """Raise UsageError for settings that this strategy cannot honour, before the ranks join."""

    def _groups_of(self, num_ranks: int, name: str) -> DeviceMesh | None:
        """Return groups of `num_ranks` consecutive ranks, as the second dimension of a mesh; None for groups of one."""
        if num_ranks == 1:
            return None
        sizes = (self.rank.world // num_ranks, num_ranks)
        return init_device_mesh(self._device.type, sizes, mesh_dim_names=("replicate", name))

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap, or shard in place, the module whose forward returns the loss; `blocks` are its decoder layers.

        Afterwards the module's parameters are the ones to train, as DTensors if state is sharded. Returns the module to
        call for the loss, and the optimizer to step, made by `make_optimizer` over those parameters.
        """
        return model, make_optimizer()

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return a parameter's shape over all ranks."""
        return local_shard_of(parameter).shape

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap one micro-batch's forward and backward pass; `last` means that gradients are complete after it.

        Raises ResourceError when memory runs out and the micro-batch cannot be retried on all ranks.
        """
        return nullcontext()

    def gather_weights(self) -> None:
        """Gather weights that passes keep until the step's last backward pass; those before it need no other rank.

        Not for weights that are gathered in each pass.
        """

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Complete the sum over ranks after the last micro-batch; each rank then holds the sum, or its shard of it.

        A parameter that no rank reached gets a gradient of zero, so that all strategies update it in the same way.
        """
        fill_missing_gradients(parameters)

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the L2 norm over the gradients of all parameters and ranks, 0-d fp32 (fp64 for fp64 gradients)."""
        slices = [parameter for parameter in parameters if is_slice(parameter)]
        norm = self.norm_of_shards([parameter for parameter in parameters if not is_slice(parameter)])
        if self.expert_mesh is None:
            return norm
        square = local_norm(slices).to(self._device).double().square()
        dist.all_reduce(square, group=self.expert_mesh.get_group("expert"))
        return (norm.to(self._device).double().square() + square).sqrt().to(norm.dtype)

    def norm_of_shards(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return `grad_norm` of parameters that are not slices of experts."""
        return local_norm(parameters)

    def sum_values(self, values: Tensor) -> Tensor:
        """Sum a small tensor over ranks, element by element, in place."""
        if self.rank.world > 1:
            dist.all_reduce(values)
        return values

    def sum_over_pass_ranks(self, values: Tensor) -> Tensor:
        """Sum a small tensor in place over the ranks that take part in this one's passes."""
        if self.context_mesh is None or self._layout.shards_state:
            return self.sum_values(values)
        dist.all_reduce(values, group=self.context_mesh.get_group("context"))
        return values


class Single(Strategy):
    """One process on one device: nothing to sum. The other strategies are tested against this one."""


def local_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm over the gradients, or this rank's shards of them, as `Strategy.grad_norm`."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    if grads[0].device.type == "cpu":
        # torch's CPU norm adds fp32 squares into a few sums, and is off by 1e-4 for 5 million elements
        grads = [part for grad in grads for part in grad.reshape(-1).split(NORM_PART)]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, dtype=wide)))
    return norm


@contextmanager
def oom_as_resource_error(rank: Rank) -> Iterator[None]:
    """Raise ResourceError when memory runs out in a pass that all ranks take together."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(rank, "a pass that all ranks run together") from error


def out_of_memory(rank: Rank, during: str) -> ResourceError:
    """Return the error of a rank whose memory ran out where it cannot repeat the step alone."""
    why = "so the step cannot be repeated with smaller micro-batches; lower batch.micro_batch_tokens or memory"
    return ResourceError(f"rank {rank.index}: out of GPU memory during {during}, {why}", [Fix({"recompute": "full"})])


def fill_missing_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set missing gradients to zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def strategy_class(name: StrategyName) -> type[Strategy]:
    """Return the class of a strategy; an instance joins the other ranks over NCCL (GPU) or gloo (CPU).

    Making one raises UsageError for a DeepSpeed JSON that contradicts the configuration or the plan.
    """
    # imported here because DTensor and DeepSpeed take seconds to import, and not every strategy needs them
    module, _, class_name = STRATEGIES[name].class_path.partition(".")
    chosen: type[Strategy] = getattr(import_module(f"flatout.parallel.strategies.{module}"), class_name)
    return chosen
