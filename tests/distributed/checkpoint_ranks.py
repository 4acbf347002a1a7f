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

from flatout.config.schema import OptimConfig
from flatout.errors import PeerLostError, ResourceError
from flatout.parallel.group import join_group, leave_group
from flatout.parallel.messages import Messages
from flatout.parallel.rank import Rank
from flatout.parallel.shards import share_of, whole_tensors
from flatout.track.record import Trackers
from flatout.train.checkpoint import Checkpoints, Snapshot
from flatout.train.optim import load_optimizer_state, make_optimizer, optimizer_state
from flatout.train.saver import Saver
from flatout.train.staging import Staging
from flatout.train.storage import Storage
from flatout.train.stored import Stored

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
        tensors, places = share_of(state, self.rank.index)
        rng = {f"rng-{self.rank.index}": {"cpu": torch.full((3,), self.rank.index, dtype=torch.uint8)}}
        return Snapshot(self.step, {**tensors, **rng}, {"step": self.step}, places)

    def load(self, stored: Stored) -> None:
        for name, parameter in self.named.items():
            stored.tensors["model"].copy_into(name, parameter)
        load_optimizer_state(self.optimizer, self.named, stored.tensors["optimizer"])
        self.step = stored.step

    def whole(self) -> Weights:
        state = {**self.named, **optimizer_state(self.optimizer, self.named)}
        return {name: tensor.detach().clone() for name, tensor in whole_tensors(state, keep=True).items()}


def checkpoints(folder: Path, messages: Messages, disk: Any = None) -> Checkpoints:
    storage = Storage(disk) if disk else None
    return Checkpoints(folder, keep=3, on_event=lambda kind, facts: None, messages=messages, storage=storage)


def require_close(got: Weights, expected: Weights, *, bits: bool = False) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        if bits:
            assert torch.equal(got[name], tensor), name
        else:
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)


def save_under(strategy: str, folder: Path, messages: Messages) -> tuple[Weights, Weights]:
    """Save after SAVED_AT steps, beside the steps that follow; the weights of then and of the end."""
    trained = Trained(strategy, messages.rank)
    trained.train(SAVED_AT)
    at_save = trained.whole()
    saver = Saver(checkpoints(folder / strategy, messages), Trackers(), Staging(torch.device("cpu")))
    saver.save(trained.snapshot())
    trained.train(NUM_STEPS - SAVED_AT)
    saver.wait()
    return at_save, trained.whole()


def load_all(strategy: str, folder: Path, messages: Messages, known: tuple[Weights, Weights]) -> None:
    """Every saved state under this strategy: the bits that were saved, and the steps after it."""
    at_save, at_end = known
    for source in ALL:
        wait_for(folder / source / "checkpoints" / f"step-{SAVED_AT}")
        trained = Trained(strategy, messages.rank, seed=1)
        stored = checkpoints(folder / source, messages).newest()
        assert stored is not None
        assert stored.step == SAVED_AT
        trained.load(stored)
        saved = {**stored.tensors["model"], **stored.tensors["optimizer"]}
        require_close(trained.whole(), saved, bits=True)
        require_close(saved, at_save, bits=source == strategy)
        if (rng := stored.tensors.get(f"rng-{messages.rank.index}")) is not None:
            assert rng["cpu"].tolist() == [messages.rank.index] * 3
        trained.train(NUM_STEPS - SAVED_AT)
        require_close(trained.whole(), at_end, bits=source == strategy)


def walk(strategy: str, source: str, folder: Path, messages: Messages) -> Trained:
    """One step more of what another world saved as `source`."""
    wait_for(folder / source / "checkpoints")
    stored = None
    while stored is None:
        stored = checkpoints(folder / source, messages).newest()
    trained = Trained(strategy, messages.rank, seed=2)
    trained.load(stored)
    trained.train(1)
    return trained


def refuse_full_disk(strategy: str, folder: Path, messages: Messages) -> None:
    """The disk of the last rank is full: the save fails on all, and the checkpoint before it stays."""
    trained = Trained(strategy, messages.rank)
    trained.train(1)
    path = checkpoints(folder / f"full-{strategy}", messages).save(trained.snapshot())
    trained.train(1)
    disk = FaultyDisk(0, FULL_DISK, lasting=True) if messages.rank.index == messages.rank.world - 1 else None
    failing = checkpoints(folder / f"full-{strategy}", messages, disk)
    with pytest.raises(ResourceError, match="disk or quota full"):
        failing.save(trained.snapshot())
    stored = checkpoints(folder / f"full-{strategy}", messages).newest()
    assert stored is not None
    assert stored.path == path
    assert messages.exchange([entry.name for entry in path.parent.iterdir()]) == [[path.name]] * messages.rank.world


def refuse_damage(folder: Path, messages: Messages) -> None:
    """One damaged file, which one rank hashes: all ranks pass over the checkpoint."""
    trained = Trained("fsdp2", messages.rank)
    saves = checkpoints(folder / "damaged", messages)
    for _ in range(2):
        trained.train(1)
        path = saves.save(trained.snapshot())

    def damage() -> None:
        content = bytearray((path / "optimizer-rank-1.safetensors").read_bytes())
        content[-1] ^= 1
        (path / "optimizer-rank-1.safetensors").write_bytes(content)

    messages.first(damage)
    stored = checkpoints(folder / "damaged", messages).newest()
    assert stored is not None
    assert stored.step == 1


def die_in_a_save(folder: Path, messages: Messages) -> None:
    """Rank 1 is killed while it writes its part of step 2."""

    class DeadlyDisk(FaultyDisk):
        def write(self, fd: int, content: memoryview) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return super().write(fd, content)

    trained = Trained("fsdp2", messages.rank)
    trained.train(1)
    checkpoints(folder / "killed", messages).save(trained.snapshot())
    trained.train(1)
    try:
        checkpoints(folder / "killed", messages, DeadlyDisk() if messages.rank.index else None).save(trained.snapshot())
    except PeerLostError:
        (folder / "killed" / "noticed").touch()
    os._exit(0)  # what is left of the group has nobody to part from


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    join_group(rank := Rank.from_env(), torch.device("cpu"))
    messages = Messages(rank)
    known = {strategy: save_under(strategy, folder, messages) for strategy in STRATEGIES[rank.world]}
    if rank.world == 2:
        checkpoints(folder / "walk-2", messages).save(walk("fsdp2", "one", folder, messages).snapshot())
        refuse_damage(folder, messages)
    if rank.world == 4:
        checkpoints(folder / "walk-4", messages).save(walk("fsdp4", "walk-2", folder, messages).snapshot())
        refuse_full_disk("hsdp2x2", folder, messages)
    for strategy, weights in known.items():
        load_all(strategy, folder, messages, weights)
    if rank.world == 1:
        walked = walk("one", "walk-4", folder, messages)
        straight = Trained("one", rank)
        straight.train(SAVED_AT + 3)
        require_close(walked.whole(), straight.whole())
    if rank.world == 2:
        die_in_a_save(folder, messages)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
