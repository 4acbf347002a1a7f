"""State sharded by FSDP2: ZeRO stages 1 to 3, FSDP, and HSDP (sharded within groups, replicated across them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from flatout.config.parallel import STRATEGIES
from flatout.parallel.process_group import share_weights
from flatout.parallel.shards import is_slice
from flatout.parallel.strategies.buckets import BucketedSum
from flatout.parallel.strategies.protocol import Strategy, oom_as_resource_error


class Sharded(Strategy):
    """Parameters become DTensors sharded along their first dimension.

    With `reshard_after_forward` (ZeRO 3) a block's weights are gathered for each pass and freed after it; otherwise
    they stay until the step's last backward pass. Gradients are reduce-scattered after each micro-batch (ZeRO 2 and 3),
    or only after the last one (ZeRO 1). Frozen parameters outside the blocks stay whole; without
    `reshard_after_forward`, all frozen ones do.

    Passes gather weights and reduce gradients, so all ranks must run the same number of micro-batches; none may skip or
    retry one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        num_replicas = self._layout.num_replicas
        num_dims = 2 if num_replicas > 1 else 1
        sizes = (num_replicas, self.rank.world // num_replicas)[-num_dims:]
        self._mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=("replicate", "shard")[-num_dims:])
        self._root: FSDPModule | None = None
        self._modules: Sequence[FSDPModule] = ()
        self._last: bool | None = None

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        share_weights(model)
        compute, frees = self._dtype if self._autocast else None, self._layout.reshard_after_forward
        reduce = torch.float32 if compute is not None else None
        if self._config.comm.compress == "bf16":
            reduce = torch.bfloat16
        # activations keep their dtype and autocast rules, as on one rank; only weights are gathered in a narrower dtype
        narrow = fsdp.MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False)
        whole = fsdp.MixedPrecisionPolicy(None, reduce, cast_forward_inputs=False)
        offload = fsdp.OffloadPolicy()
        if self._config.sharding.offload:
            offload = fsdp.CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        # frozen parameters that are gathered once and never freed cost less if they are whole from the start
        freed = {parameter for block in blocks for parameter in block.parameters()} if frees else set()
        ignored = {p for p in model.parameters() if is_slice(p) or not (p.requires_grad or p in freed)}
        common: dict[str, Any] = {"mesh": self._mesh, "offload_policy": offload, "ignored_params": ignored}
        for block in blocks:
            fsdp.fully_shard(block, reshard_after_forward=frees, mp_policy=narrow, **common)
        # the embedding, last norm and head are used at the start and the end of a pass: freeing them gains nothing
        fsdp.fully_shard(model, reshard_after_forward=False, mp_policy=whole, **common)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            # gloo supports only the sum, which is all that a factor of 1 needs
            module.set_force_sum_reduction_for_comms(True)
        layers: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
        count = self._config.sharding.prefetch
        for place, layer in enumerate(layers if count else ()):
            layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + count])
            layer.set_modules_to_backward_prefetch(layers[max(0, place - count) : place][::-1])
        assert isinstance(model, FSDPModule)
        self._root = model
        return model, make_optimizer()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        assert self._root is not None
        if self._last != last:
            self._last = last
            if STRATEGIES[self._layout.strategy].sums_late:
                self._root.set_requires_gradient_sync(last)
                self._root.set_is_last_backward(last)
            elif self._layout.num_replicas > 1:
                # within a replica gradients are reduce-scattered each time; the sum over replicas runs once per step
                self._root.set_requires_all_reduce(last)
            if not self._layout.reshard_after_forward:
                self._root.set_reshard_after_backward(last)
        with oom_as_resource_error(self.rank):
            yield

    def gather_weights(self) -> None:
        with oom_as_resource_error(self.rank):
            for module in self._modules:
                module.unshard()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        super().sum_gradients(parameters)
        if self.expert_mesh is not None:
            # FSDP does not know the slices of experts
            slices = [parameter for parameter in parameters if is_slice(parameter)]
            compress, group = self._config.comm.compress, self.expert_mesh.get_group("replicate")
            BucketedSum(slices, compress=compress, overlap=False, group=group).finish()

    def norm_of_shards(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = super().norm_of_shards(parameters).to(self._device)
        square = norm.double().square()
        # replicas hold the same shards, so one shard group covers all gradients
        dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        return square.sqrt().to(norm.dtype)
