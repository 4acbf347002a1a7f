"""One rank of the checkpoint tests: `checkpoint_ranks.py FOLDER`, started with RANK, WORLD_SIZE and a port.

Sessions of 1, 2 and 4 ranks run side by side: each trains and saves under its strategies, waits until the others have
saved too, and then loads every state under every one of its strategies.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty_disk import FULL_DISK, FaultyDisk
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from flatout.checkpoint.read import SavedCheckpoint
from flatout.checkpoint.replicas import refuse_drift
from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.checkpoint.write_async import Saver, Staging
from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError, Fix, PeerLostError, ResourceError
from flatout.io.durable_io import DurableIO
from flatout.optim.build import make_optimizer
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import join_group, leave_group
from flatout.parallel.rank import Rank
from flatout.parallel.shards import global_tensors, local_shard_of, local_state
from flatout.track.callback import Reporter

STRATEGIES = {1: ("one",), 2: ("ddp2", "fsdp2"), 4: ("fsdp4", "hsdp2x2")}
ALL = [name for names in STRATEGIES.values() for name in names]
SAVED_AT, NUM_STEPS = 3, 5
Weights = dict[str, Tensor]


class Net(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6)) for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Trained:
    """A model under a strategy, its optimizer and its next step."""

    def __init__(self, strategy: str, rank: Rank, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rank, self.step, self.strategy = rank, 0, strategy
        self.model = Net().double()
        if "fsdp" in strategy or "hsdp" in strategy:
            shape, axes = ((2, 2), ("replicate", "shard")) if strategy == "hsdp2x2" else ((rank.world,), ("shard",))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
            for block in (*self.model.blocks, self.model):
                fully_shard(block, mesh=mesh).set_gradient_divide_factor(1.0)
        self.named = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.named, OptimConfig(lr=0.05, weight_decay=0.1))

    def train(self, num_steps: int) -> None:
        """Steps over 12 fixed samples, divided evenly; their loss is summed over ranks."""
        for _ in range(num_steps):
            ids = torch.randint(13, (12, 5), generator=torch.Generator().manual_seed(self.step))
            mine = ids.chunk(self.rank.world)[self.rank.index]
            logits = self.model(mine[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum").div(48).backward()
            if self.strategy == "ddp2":
                for parameter in self.named.values():
                    dist.all_reduce(parameter.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def snapshot(self) -> Snapshot:
        state = {"model": self.named, "optimizer": optimizer_state(self.optimizer, self.named)}
        tensors, places = local_state(state, self.rank.index)
        return Snapshot(self.step, tensors, {"step": self.step}, places)

    def load(self, stored: SavedCheckpoint) -> None:
        for name, parameter in self.named.items():
            stored.tensors["model"].copy_into(name, parameter)
        load_optimizer_state(self.optimizer, self.named, stored.tensors["optimizer"], OptimConfig().traits)
        self.step = stored.step

    def whole(self) -> Weights:
        state = {**self.named, **optimizer_state(self.optimizer, self.named)}
        return {name: tensor.detach().clone() for name, tensor in global_tensors(state, keep=True).items()}


def checkpoints(folder: Path, group: ControlGroup, disk: Any = None) -> Checkpoints:
    durable_io = DurableIO(disk) if disk else None
    return Checkpoints(folder, keep=3, on_event=lambda kind, facts: None, group=group, durable_io=durable_io)


def require_close(got: Weights, expected: Weights, *, bits: bool = False) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        if bits:
            assert torch.equal(got[name], tensor), name
        else:
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 500
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)


def save_under(strategy: str, folder: Path, group: ControlGroup) -> tuple[Weights, Weights]:
    """Save after SAVED_AT steps, beside the steps that follow; the weights of then and of the end."""
    trained = Trained(strategy, group.rank)
    trained.train(SAVED_AT)
    at_save = trained.whole()
    saver = Saver(checkpoints(folder / strategy, group), Reporter(), Staging(torch.device("cpu")))
    saver.save(trained.snapshot())
    trained.train(NUM_STEPS - SAVED_AT)
    saver.wait()
    return at_save, trained.whole()


def load_all(strategy: str, folder: Path, group: ControlGroup, known: tuple[Weights, Weights]) -> None:
    """Every saved state under this strategy: the bits that were saved, and the steps after it."""
    at_save, at_end = known
    for source in ALL:
        wait_for(folder / source / "checkpoints" / f"step-{SAVED_AT}")
        trained = Trained(strategy, group.rank, seed=1)
        stored = checkpoints(folder / source, group).newest()
        assert stored is not None
        assert stored.step == SAVED_AT
        trained.load(stored)
        saved = {**stored.tensors["model"], **stored.tensors["optimizer"]}
        require_close(trained.whole(), saved, bits=True)
        require_close(saved, at_save, bits=source == strategy)
        trained.train(NUM_STEPS - SAVED_AT)
        require_close(trained.whole(), at_end, bits=source == strategy)


def walk(strategy: str, source: str, folder: Path, group: ControlGroup) -> Trained:
    """One step more of what another world saved as `source`."""
    wait_for(folder / source / "checkpoints")
    stored = None
    while stored is None:
        stored = checkpoints(folder / source, group).newest()
    trained = Trained(strategy, group.rank, seed=2)
    trained.load(stored)
    trained.train(1)
    return trained


def refuse_full_disk(strategy: str, folder: Path, group: ControlGroup) -> None:
    """The disk of the second rank is full: the save fails on all, and the checkpoint before it stays."""
    trained = Trained(strategy, group.rank)
    trained.train(1)
    path = checkpoints(folder / f"full-{strategy}", group).save(trained.snapshot())
    trained.train(1)
    disk = FaultyDisk(0, FULL_DISK, lasting=True) if group.rank.index == 1 else None
    failing = checkpoints(folder / f"full-{strategy}", group, disk)
    with pytest.raises(ResourceError, match="disk or quota full"):
        failing.save(trained.snapshot())
    stored = checkpoints(folder / f"full-{strategy}", group).newest()
    assert stored is not None
    assert stored.path == path
    assert group.all_gather([entry.name for entry in path.parent.iterdir()]) == [[path.name]] * group.rank.world


def refuse_damage(folder: Path, group: ControlGroup) -> None:
    """One damaged file, which one rank hashes: all ranks pass over the checkpoint."""
    trained = Trained("fsdp2", group.rank)
    saves = checkpoints(folder / "damaged", group)
    for _ in range(2):
        trained.train(1)
        path = saves.save(trained.snapshot())

    def damage() -> None:
        content = bytearray((path / "optimizer-rank-1.safetensors").read_bytes())
        content[-1] ^= 1
        (path / "optimizer-rank-1.safetensors").write_bytes(content)

    group.run_on_first_rank(damage)
    stored = checkpoints(folder / "damaged", group).newest()
    assert stored is not None
    assert stored.step == 1

    def refuse() -> None:
        raise CheckpointError("damaged", [Fix({"checkpoint.keep": 3})])

    with pytest.raises(CheckpointError, match="damaged") as refused:
        group.run_on_first_rank(refuse)
    assert refused.value.fixes[0].settings == {"checkpoint.keep": 3}


def find_drift(strategy: str, group: ControlGroup) -> None:
    """A bit flipped in the last rank's copy is found on all; where nobody has a copy of its shard, nobody can."""
    trained = Trained(strategy, group.rank)
    trained.train(2)
    state = {"model": trained.named, "optimizer": optimizer_state(trained.optimizer, trained.named)}
    refuse_drift(state, group)
    last = group.rank.world - 1
    if group.rank.index == last:
        for tensor in (*trained.named.values(),):
            local_shard_of(tensor).local.view(torch.int64).view(-1)[-1:].bitwise_xor_(1)
    if "fsdp" in strategy:
        refuse_drift(state, group)
        return
    # of two copies nobody knows which one is right
    with pytest.raises(CheckpointError, match=rf"diverged: ranks \d, {last} differ in model embed\.weight"):
        refuse_drift(state, group)


def die_in_a_save(folder: Path, group: ControlGroup) -> None:
    """Rank 1 is killed while it writes its part of step 2."""

    class DeadlyDisk(FaultyDisk):
        def write(self, fd: int, content: memoryview) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return super().write(fd, content)

    trained = Trained("fsdp2", group.rank)
    trained.train(1)
    checkpoints(folder / "killed", group).save(trained.snapshot())
    trained.train(1)
    try:
        checkpoints(folder / "killed", group, DeadlyDisk() if group.rank.index else None).save(trained.snapshot())
    except PeerLostError:
        (folder / "killed" / "noticed").touch()
    os._exit(0)  # what is left of the group has nobody to part from


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    join_group(rank := Rank.from_env(), torch.device("cpu"))
    group = ControlGroup(rank)
    known = {strategy: save_under(strategy, folder, group) for strategy in STRATEGIES[rank.world]}
    if rank.world == 2:
        checkpoints(folder / "walk-2", group).save(walk("fsdp2", "one", folder, group).snapshot())
        refuse_damage(folder, group)
    if rank.world == 4:
        checkpoints(folder / "walk-4", group).save(walk("fsdp4", "walk-2", folder, group).snapshot())
        refuse_full_disk("hsdp2x2", folder, group)
    for strategy in STRATEGIES[rank.world][rank.world == 1 :]:
        find_drift(strategy, group)
    for strategy, weights in known.items():
        load_all(strategy, folder, group, weights)
    if rank.world == 1:
        walked = walk("one", "walk-4", folder, group)
        straight = Trained("one", rank)
        straight.train(SAVED_AT + 3)
        require_close(walked.whole(), straight.whole())
    if rank.world == 2:
        die_in_a_save(folder, group)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
