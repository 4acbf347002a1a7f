"""One rank of the test of AdamW8bit on shards: `low_bit_ranks.py SPEC`.

Sharded and whole parameters get the same gradients, so every bit of weights and state must be the same.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import flatout.optim.adamw_8bit as lean
from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state, state_sizes
from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.config.schema import OptimConfig
from flatout.optim.build import make_optimizer
from flatout.optim.update import clear_found_inf, set_found_inf
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import join_group, leave_group
from flatout.parallel.rank import Rank
from flatout.parallel.shards import flat_offset_of, global_tensors, local_state

# rows that no number of ranks divides, fewer rows than ranks, blocks of 256, 150 and 64, moments in fp32
SHAPES = [(97, 512), (33, 300), (5, 3, 320), (131, 33), (1, 4224), (7,)]


class Trained:
    def __init__(self, dtype: torch.dtype, name: str, mesh: Any = None) -> None:
        self.mesh, self.step = mesh, 0
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        self.named = {str(weight.shape): nn.Parameter(self.shard(weight)) for weight in weights}
        config = OptimConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
        self.config = config
        self.optimizer = make_optimizer(self.named, config, seed=3, offset_of=flat_offset_of)

    def shard(self, tensor: Tensor) -> Tensor:
        """As FSDP2 does: along the first dimension, in each replica."""
        from torch.distributed.tensor import Replicate, Shard

        placements = [Replicate(), Shard(0)] if self.mesh is not None and self.mesh.ndim == 2 else [Shard(0)]
        return tensor if self.mesh is None else distribute_tensor(tensor, self.mesh, placements)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(self.step)
            for parameter in self.named.values():
                parameter.grad = self.shard(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
            self.optimizer.step()
            self.step += 1

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"model": dict(self.named), "optimizer": optimizer_state(self.optimizer, self.named)}

    def whole(self) -> dict[str, Tensor]:
        return {
            f"{kind} {name}": tensor.detach().clone()
            for kind, tensors in self.state().items()
            for name, tensor in global_tensors(tensors, keep=True).items()
        }


def require_bits(got: Trained, expected: Trained) -> None:
    mine, true = got.whole(), expected.whole()
    assert mine.keys() == true.keys()
    assert not [name for name in true if not torch.equal(mine[name], true[name])]


def check(dtype: torch.dtype, name: str, mesh: Any, folder: Path, group: ControlGroup) -> None:
    whole, cut = Trained(dtype, name), Trained(dtype, name, mesh)
    for each in (whole, cut):
        each.train(2)
        # a step that is skipped leaves no trace
        set_found_inf(each.optimizer, torch.tensor(True))
        each.train(1)
        clear_found_inf(each.optimizer)
        each.train(1)
    require_bits(cut, whole)
    # the estimate of what this rank holds
    sizes = state_sizes(cut.named, OptimConfig.model_validate({"name": "adamw8bit"}))
    held = [tensor for kind in local_state(cut.state(), 0)[0].values() for tensor in kind.values()]
    if name == "adamw8bit" and mesh.ndim == 1:
        assert sum(sizes) == sum(tensor.nbytes for tensor in held if tensor.dim()), (sizes, len(held))
    saves = Checkpoints(folder, keep=1, on_event=lambda kind, facts: None, group=group)
    tensors, places = local_state(cut.state(), group.rank.index)
    saves.save(Snapshot(cut.step, tensors, {"step": cut.step}, places))
    saved = saves.newest()
    assert saved is not None
    for target in (Trained(dtype, name), Trained(dtype, name, mesh)):
        for key, parameter in target.named.items():
            nn.init.zeros_(parameter)
            saved.tensors["model"].copy_into(key, parameter)
        load_optimizer_state(target.optimizer, target.named, saved.tensors["optimizer"], target.config.traits)
        target.step = saved.step
        require_bits(target, whole)
        target.train(2)
        if target.mesh is not None:
            whole.train(2)
            require_bits(target, whole)


def main(spec_path: str) -> None:
    torch.set_num_threads(1)
    lean.SLICE_SIZE = 5000
    join_group(rank := Rank.from_env(), torch.device("cpu"))
    group, folder = ControlGroup(rank), Path(json.loads(Path(spec_path).read_text())["folder"])
    sizes, axes = ((2, 2), ("replicate", "shard")) if rank.world == 4 else ((rank.world,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    for dtype, name in itertools.product((torch.bfloat16, torch.float32), ("adamw", "adamw8bit")):
        if (dtype, name) != (torch.float32, "adamw"):
            check(dtype, name, mesh, folder / f"{dtype}-{name}".removeprefix("torch."), group)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
