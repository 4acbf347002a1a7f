"""State cut into one part a rank by FSDP2: ZeRO stages 1 to 3, FSDP, and FSDP in groups that are replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from flatout.parallel.group import join_group, share_weights
from flatout.parallel.rank import Rank
from flatout.parallel.strategy import local_grad_norm, no_second_try


@dataclass(frozen=True, slots=True)
class Cut:
    """What is cut, and when it is whole.

    `frees_weights`: a block's weights are gathered for each pass and dropped after it (ZeRO 3); otherwise they stay
    until the step's last backward pass. `sums_each`: gradients are summed and cut after each micro-batch (ZeRO 2 and
    3); otherwise only after the last one (ZeRO 1). `compute` is the dtype that blocks' weights are gathered in, and
    `reduce` the one that gradients are summed in; None: as they are.
    """

    num_replicas: int = 1
    frees_weights: bool = True
    sums_each: bool = True
    num_prefetched: int = 1
    offload: bool = False
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


class Sharded:
    """See Strategy for the methods. Parameters become DTensors cut along their first dimension.

    Only frozen ones that would never be freed stay whole: those outside the blocks, or all where weights stay.

    Passes gather weights and reduce gradients, so all ranks must take equally many micro-batches, and none may leave
    one out or take one again.
    """

    def __init__(self, rank: Rank, device: torch.device, cut: Cut) -> None:
        self.rank = rank
        self._device, self._cut = device, cut
        join_group(rank, device)
        self._mesh = _mesh(device, rank.world, cut.num_replicas)
        self._root: FSDPModule | None = None
        self._last: bool | None = None

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        share_weights(model)
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self._cut.offload else OffloadPolicy()
        # activations keep their dtype and autocast rules, as on one rank: only the weights are gathered narrower
        narrow = MixedPrecisionPolicy(self._cut.compute, self._cut.reduce, cast_forward_inputs=False)
        whole = MixedPrecisionPolicy(None, self._cut.reduce, cast_forward_inputs=False)
        frees = self._cut.frees_weights
        ignored = _never_cut(model, blocks, frees)
        common: dict[str, Any] = {"mesh": self._mesh, "offload_policy": offload, "ignored_params": ignored}
        for block in blocks:
            fully_shard(block, reshard_after_forward=frees, mp_policy=narrow, **common)
        # the embedding, the last norm and the head are used first and last: between, freeing them gains nothing
        fully_shard(model, reshard_after_forward=False, mp_policy=whole, **common)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_gradient_divide_factor(1.0)
            # gloo has no other reduction than the sum, and a factor of 1 needs none
            module.set_force_sum_reduction_for_comms(True)
        self._prefetch([block for block in blocks if isinstance(block, FSDPModule)])
        assert isinstance(model, FSDPModule)
        self._root = model
        return model, make_optimizer()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self._set_last(last)
        with no_second_try(self.rank):
            yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = local_grad_norm(parameters).to(self._device)
        square = norm.double().square()
        # replicas hold the same parts: one group of them is the whole
        dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        return square.sqrt().to(norm.dtype)

    def sum_values(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def _set_last(self, last: bool) -> None:
        if self._last == last:
            return
        assert self._root is not None
        self._last = last
        if not self._cut.sums_each:
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
        elif self._cut.num_replicas > 1:
            # within a replica gradients are cut at once; replicas add theirs once a step
            self._root.set_requires_all_reduce(last)
        if not self._cut.frees_weights:
            self._root.set_reshard_after_backward(last)

    def _prefetch(self, blocks: Sequence[FSDPModule]) -> None:
        count = self._cut.num_prefetched
        if count == 0:
            return
        for place, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 1 + count]))
            block.set_modules_to_backward_prefetch(list(blocks[max(0, place - count) : place][::-1]))


def _never_cut(model: nn.Module, blocks: Sequence[nn.Module], frees_weights: bool) -> set[nn.Parameter]:
    """Frozen parameters that would be gathered once and then stay: whole from the start they cost less."""
    freed = {parameter for block in blocks for parameter in block.parameters()} if frees_weights else set()
    return {parameter for parameter in model.parameters() if not parameter.requires_grad and parameter not in freed}


def _mesh(device: torch.device, num_ranks: int, num_replicas: int) -> DeviceMesh:
    if num_replicas == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    sizes = (num_replicas, num_ranks // num_replicas)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
