"""Saves beside training: what is written is the state of the moment of the call, and no failure is lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import BROKEN_DISK, FULL_DISK, FaultyDisk, QuickDisk, same, snapshot_of

from flatout.checkpoint.write import Checkpoints
from flatout.checkpoint.write_async import Saver, Staging
from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import Disk, DurableIO
from flatout.track.callback import Reporter

CPU = torch.device("cpu")


class Told(Reporter):
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[str] = []

    def stage(self, name: str, text: str) -> None:
        self.lines.append(text)

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.events.append((kind, dict(facts)))


class WaitingDisk(QuickDisk):
    """Every write waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, fd: int, content: memoryview) -> int:
        assert self.go.wait(20)
        return super().write(fd, content)


def saver_on(run_dir: Path, told: Told, disk: Disk) -> Saver:
    checkpoints = Checkpoints(run_dir, keep=2, on_event=told.event, durable_io=DurableIO(disk))
    return Saver(checkpoints, told, Staging(CPU))


def newest(run_dir: Path) -> Any:
    return Checkpoints(run_dir, keep=2, on_event=lambda kind, facts: None).newest()


def test_the_state_of_the_call_is_written_though_it_changes_meanwhile(tmp_path):
    told, disk = Told(), WaitingDisk()
    saver = saver_on(tmp_path, told, disk)
    disk.go.set()
    saver.save(snapshot_of(1))
    saver.wait()
    disk.go.clear()
    live = snapshot_of(2)
    saver.save(live, best=True)
    for tensors in live.tensors.values():
        for tensor in tensors.values():
            tensor.zero_()
    assert [kind for kind, _ in told.events] == ["saved"]
    disk.go.set()
    saver.wait()
    assert same(newest(tmp_path), snapshot_of(2))
    kind, facts = told.events[-1]
    assert (kind, facts["best"]) == ("saved", True)
    assert 0 <= facts["staged_s"] <= facts["save_s"]
    assert 0 <= facts["copied_s"] <= facts["save_s"]


def test_the_next_save_and_a_required_one_wait(tmp_path):
    told, disk = Told(), WaitingDisk()
    saver = saver_on(tmp_path, told, disk)
    saver.save(snapshot_of(1))
    threading.Timer(0.2, disk.go.set).start()
    # the memory of the first copy is used again, which would show in its files had the second not waited
    saver.save(snapshot_of(2), required=True)
    assert [facts["path"][-6:] for _, facts in told.events] == ["step-1", "step-2"]
    checkpoints = Checkpoints(tmp_path, keep=2, on_event=told.event)
    for step in (1, 2):
        assert same(checkpoints.load(tmp_path / "checkpoints" / f"step-{step}"), snapshot_of(step))


@pytest.mark.parametrize("error", [FULL_DISK, BROKEN_DISK])
def test_a_disk_that_refuses_is_told_and_stops_only_a_required_save(tmp_path, error):
    told = Told()
    saver = saver_on(tmp_path, told, FaultyDisk(6, error, lasting=True))
    saver.save(snapshot_of(1))
    saver.wait()
    assert [kind for kind, _ in told.events if kind != "not removed"] == ["not_saved"]
    with pytest.raises(ResourceError):
        saver.save(snapshot_of(2), required=True)


def test_any_other_failure_is_told_at_once_and_raised_at_the_next_save(tmp_path):
    class LyingDisk(QuickDisk):
        def write(self, fd: int, content: memoryview) -> int:
            return super().write(fd, memoryview(bytes(content[:-1]) + b"?"))

    told = Told()
    saver = saver_on(tmp_path, told, LyingDisk())
    saver.save(snapshot_of(1))
    saver.close()
    assert "does not match its hash" in told.events[0][1]["why"]
    with pytest.raises(CheckpointError, match="does not match its hash"):
        saver.save(snapshot_of(2))
    saver.close()


def test_a_host_without_memory_for_the_copy_skips_a_save_that_is_not_required(tmp_path):
    class Full(Staging):
        def lay_out(self, snapshot: Any) -> Any:
            raise ResourceError("no 7 bytes of host memory")

        def copy(self, snapshot: Any, staged: Any) -> Any:
            raise AssertionError("nothing may be copied unless every rank has its memory")

    told = Told()
    saver = Saver(Checkpoints(tmp_path, keep=2, on_event=told.event), told, Full(CPU))
    saver.save(snapshot_of(1))
    saver.before_update()
    saver.close()
    assert told.events == [("not_saved", {"step": 1, "why": "no 7 bytes of host memory"})]
    with pytest.raises(ResourceError, match="no 7 bytes"):
        saver.save(snapshot_of(2), required=True)
