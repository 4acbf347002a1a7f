"""Copies that run beside training: every update waits for them, and what is saved is the state of the call.

The copy here is made as late as it may be: on the CPU when an update is about to come or the saver is waited for, on a
GPU after half a second in its stream. An update that did not wait would be in the saved bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import QuickDisk, same, snapshot_of
from safetensors.torch import load_file
from torch import Tensor

from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.checkpoint.write_async import HostCopy, Pairs, Saver, Staging, StreamCopy
from flatout.io.durable_io import DurableIO
from flatout.optim.flat import flatten
from flatout.optim.torch_optimizers import FlatAdamW
from flatout.track.callback import Reporter
from flatout.trainer import build
from flatout.trainer.run import train
from tests.usual import usual

CPU = torch.device("cpu")
LATE_CYCLES = 10**9
NUM_STEPS = 5
gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]

# every way in which weights change
FULL = {"method": "full", "batch": {"samples_per_step": 6, "micro_batch_tokens": 4000, "max_steps": NUM_STEPS}}
BACKWARD = {**FULL, "full": {"update": "backward"}, "optim": {"max_grad_norm": None}}
LEAN = {"model": {"precision": "bf16"}, "optim": {"name": "adamw8bit", "max_grad_norm": None}}
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"batch": {"max_steps": NUM_STEPS}},
    # launched before the step before it is read
    "lora ahead": {"batch": {"max_steps": NUM_STEPS}, "checkpoint": {"every_steps": 2}},
    "sgd": {"batch": {"max_steps": NUM_STEPS}, "optim": {"name": "sgd"}},
    "full": FULL,
    "full backward": BACKWARD,
    "8 bits": {**FULL, **LEAN, "full": {"weights": "bf16"}},
    "8 bits ahead": {**FULL, **LEAN, "full": {"weights": "bf16"}, "checkpoint": {"every_steps": 2}},
    "8 bits backward": {**BACKWARD, **LEAN, "full": {"weights": "bf16", "update": "backward"}},
}


class LateCopy(HostCopy):
    """A copy that is made once the device would be held for it."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs, self._done = pairs, threading.Event()

    def hold_device(self) -> None:
        if not self._done.is_set():
            for place, live in self._pairs:
                place.copy_(live)
            self._done.set()

    def wait(self) -> float:
        assert self._done.wait(60)
        return 0.0


class Witness(Saver):
    """Keeps a copy of every state it was given to save."""

    def __init__(self, checkpoints: Checkpoints, staging: Staging) -> None:
        super().__init__(checkpoints, Reporter(), staging)
        self.seen: dict[int, dict[str, Tensor]] = {}

    def save(self, snapshot: Snapshot, **options: Any) -> None:
        held = {**snapshot.tensors["model"], **snapshot.tensors["optimizer"]}
        self.seen[snapshot.step] = {name: tensor.detach().clone() for name, tensor in held.items()}
        super().save(snapshot, **options)


class LateSaver(Witness):
    """On the CPU: copies in the training thread, when it waits for nothing else."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        super().__init__(checkpoints, Staging(CPU, self._start))
        self._late: LateCopy | None = None

    def _start(self, pairs: Pairs) -> HostCopy:
        self._late = LateCopy(pairs)
        return self._late

    def wait(self) -> None:
        if self._late is not None:
            self._late.hold_device()
        super().wait()

    def close(self) -> None:
        if self._late is not None:
            self._late.hold_device()
        super().close()


def late_stream(device: torch.device) -> Callable[[Pairs], HostCopy]:
    """On a GPU: other work comes first."""
    stream = torch.cuda.Stream(device)

    def copy(pairs: Pairs) -> HostCopy:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)
        return StreamCopy(stream, pairs)

    return copy


def saver_for(device: torch.device, checkpoints: Checkpoints) -> Witness:
    return LateSaver(checkpoints) if device == CPU else Witness(checkpoints, Staging(device, late_stream(device)))


def on(device: torch.device, snapshot: Snapshot) -> Snapshot:
    tensors = {
        stem: {name: tensor.to(device) for name, tensor in held.items()} for stem, held in snapshot.tensors.items()
    }
    return Snapshot(snapshot.step, tensors, snapshot.facts)


def both(snapshot: Snapshot) -> list[Tensor]:
    return [tensor for stem in ("model", "optimizer") for tensor in snapshot.tensors[stem].values()]


def overwrite(snapshot: Snapshot) -> None:
    for tensor in both(snapshot):
        tensor.fill_(7)


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_saved_is_the_state_of_the_call(tmp_path, name):
    device = torch.device(name)
    checkpoints = Checkpoints(tmp_path, keep=2, on_event=lambda kind, facts: None, durable_io=DurableIO(QuickDisk()))
    saver = saver_for(device, checkpoints)
    saver.save(on(device, snapshot_of(1)), required=True)
    live = on(device, snapshot_of(2))
    saver.save(live)
    saver.before_update()
    overwrite(live)
    saver.wait()
    stored = checkpoints.newest()
    assert stored is not None
    assert stored.step == 2
    assert same(stored, snapshot_of(2))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["update late", "copy late", "copy late, tensors freed"])
def test_the_copy_lies_between_two_updates_and_the_host_does_not_wait(tmp_path, case):
    device = torch.device("cuda", 0)
    checkpoints = Checkpoints(tmp_path, keep=2, on_event=lambda kind, facts: None, durable_io=DurableIO(QuickDisk()))
    staging = Staging(device) if case == "update late" else Staging(device, late_stream(device))
    saver = Saver(checkpoints, Reporter(), staging)
    # gets the memory, and loads what a first call loads
    saver.save(on(device, snapshot_of(1)), required=True)
    expected, live = on(device, snapshot_of(2)), on(device, snapshot_of(2))
    overwrite(live)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if case == "update late":
            torch.cuda._sleep(LATE_CYCLES)
        for tensor, value in zip(both(live), both(expected), strict=True):
            tensor.copy_(value)
        saver.save(live)
        if case.endswith("freed"):
            shapes = [(tensor.shape, tensor.dtype) for tensor in both(live)]
            del live, tensor
            # as much as was freed, and more
            others = [torch.full(shape, 7, dtype=dtype, device=device) for shape, dtype in 4 * shapes]
        else:
            saver.before_update()
            overwrite(live)
        took_s = time.perf_counter() - started_s
    finally:
        torch.cuda.set_sync_debug_mode("default")
    saver.wait()
    assert time.perf_counter() - started_s > 2 * took_s, "the host waited for the device"
    if case.endswith("freed"):
        assert all(bool((other == 7).all()) for other in others)
    stored = checkpoints.newest()
    assert stored is not None
    assert same(stored, snapshot_of(2))  # type: ignore[arg-type]


def train_beside(config: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Tensor]]:
    """A run with late copies; what it was given to save, by step."""
    savers: list[Witness] = []

    def choose_saver(wanted: Any, checkpoints: Checkpoints, reporter: Any, *, device: torch.device, **_: Any) -> Saver:
        savers.append(saver_for(device, checkpoints))
        return savers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(build, "choose_saver", choose_saver)
        train(config)
    (saver,) = savers
    return saver.seen


def saved(run_dir: Path) -> dict[int, dict[str, Tensor]]:
    return {
        int(folder.name.removeprefix("step-")): {
            **load_file(folder / "model.safetensors"),
            **load_file(folder / "optimizer.safetensors"),
        }
        for folder in (run_dir / "checkpoints").iterdir()
    }


def wrong_steps(found: dict[int, dict[str, Tensor]], expected: dict[int, dict[str, Tensor]]) -> list[int]:
    """Steps whose states are not equal to the bit."""
    assert found.keys() == expected.keys()
    assert all(found[step].keys() == expected[step].keys() for step in found)
    return [
        step
        for step in sorted(found)
        if not all(torch.equal(tensor, expected[step][name].cpu()) for name, tensor in found[step].items())
    ]


@pytest.fixture
def config_of(tiny, tmp_path, monkeypatch, name, device):
    """A run of this name on this device; its folder is named by how it saves."""
    if name == "lora ahead":
        monkeypatch.setattr(build, "make_optimizer", fused)

    def config(asynchronous: bool) -> Any:
        sections = dict(RUNS[name])
        every = {"every_steps": 1, "keep": 20, "asynchronous": asynchronous, **sections.pop("checkpoint", {})}
        folder = tmp_path / ("beside" if asynchronous else "waits")
        return tiny.config(folder, device=device, compile="off", checkpoint=every, **sections)

    return config


def fused(named: Any, config: Any, **_: Any) -> torch.optim.Optimizer:
    """What an adapter gets on a GPU, on the CPU."""
    return FlatAdamW(flatten(list(named.values())), lr=config.lr, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", usual(RUNS, ["lora", "lora ahead", "full backward", "8 bits ahead"]))
def test_every_update_waits_for_the_copy(config_of, monkeypatch, name, device):
    beside = config_of(asynchronous=True)
    seen = train_beside(beside, monkeypatch)
    assert len(seen) == (3 if "ahead" in name else NUM_STEPS)
    assert wrong_steps(saved(beside.folder), seen) == []
    if device == "cpu":
        waits = config_of(asynchronous=False)
        train(waits)
        assert wrong_steps(saved(beside.folder), saved(waits.folder)) == []
