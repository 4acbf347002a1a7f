"""Death, a failing disk or a power cut at every operation of a save: resume finds the old or the new state."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import BROKEN_DISK, FULL_DISK, Death, FaultyDisk, QuickDisk, same, snapshot_of

from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import Disk, DurableIO
from flatout.trainer.state import StopRequest
from tests.usual import usual


def checkpoints(run_dir: Path, disk: Disk, *, keep: int = 1) -> Checkpoints:
    def ignore(kind: str, facts: Mapping[str, Any]) -> None:
        pass

    return Checkpoints(run_dir, keep=keep, on_event=ignore, durable_io=DurableIO(disk))


@dataclass(frozen=True)
class Scene:
    """A run folder before the save, the snapshot saved, and what a resume may find when the save does not finish."""

    prepare: Callable[[Path], None]
    saved: Snapshot
    before: Snapshot | None


def _nothing(run_dir: Path) -> None:
    run_dir.mkdir()


def _one_older(run_dir: Path) -> None:
    """With keep=1 this one is rotated away by the save, so the order of rename and removal is on trial."""
    run_dir.mkdir()
    checkpoints(run_dir, QuickDisk()).save(snapshot_of(1))


def _same_step(run_dir: Path) -> None:
    run_dir.mkdir()
    checkpoints(run_dir, QuickDisk()).save(snapshot_of(2))


def _debris_and_best(run_dir: Path) -> None:
    run_dir.mkdir()
    checkpoints(run_dir, QuickDisk()).save(snapshot_of(1), best=True)
    checkpoints(run_dir, QuickDisk()).save(snapshot_of(2))
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step-1", folder / "step-3.tmp-0123abcd")
    shutil.copytree(folder / "step-1", folder / "step-1.old-0123abcd")


SCENES = {
    "first save": Scene(_nothing, snapshot_of(3), None),
    "one older": Scene(_one_older, snapshot_of(3), snapshot_of(1)),
    "same step again": Scene(_same_step, snapshot_of(2, mark=1), snapshot_of(2)),
    "debris and best": Scene(_debris_and_best, snapshot_of(3), snapshot_of(2)),
}


@pytest.fixture(params=usual(SCENES, ["same step again", "debris and best"]))
def scene(request):
    return SCENES[request.param]


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: hundreds of trials need the operations, not the hardware."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def fresh_folders(scene: Scene, tmp_path: Path) -> Iterator[Path]:
    """Endless copies of the prepared folder, one at a time."""
    scene.prepare(tmp_path / "origin")
    for number in itertools.count():
        run_dir = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "origin", run_dir)
        yield run_dir
        shutil.rmtree(run_dir)


def operations(scene: Scene, run_dir: Path) -> list[str]:
    """The save's operations in order, each `name path`; there are enough for the trial to mean something."""
    disk = FaultyDisk()
    checkpoints(run_dir, disk).save(scene.saved)
    assert disk.num_operations == len(disk.log) >= 30
    return disk.log


def require_old_or_new(scene: Scene, run_dir: Path, *, must_be_new: bool = False) -> None:
    """What a restarted run sees, and that it can go on from there to a clean folder."""
    found = checkpoints(run_dir, QuickDisk()).newest()
    is_new = same(found, scene.saved)
    is_old = found is None if scene.before is None else same(found, scene.before)
    assert is_new or (is_old and not must_be_new)
    after = snapshot_of(9)
    checkpoints(run_dir, QuickDisk()).save(after)
    assert same(checkpoints(run_dir, QuickDisk()).newest(), after)
    left = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert not [name for name in left if ".tmp-" in name or ".gone-" in name]


def test_death_at_every_operation(scene, quick_path):
    folders = fresh_folders(scene, quick_path)
    for k, operation in enumerate(operations(scene, next(folders))):
        # a write may also get half of its bytes down before the end
        for fault in ("die", "torn") if operation.startswith("write") else ("die",):
            run_dir = next(folders)
            with pytest.raises(Death):
                checkpoints(run_dir, FaultyDisk(k, fault)).save(scene.saved)
            require_old_or_new(scene, run_dir)


@pytest.mark.parametrize("names_survive", usual([False, True], [False]))
def test_power_cut_at_every_operation(scene, quick_path, names_survive):
    folders = fresh_folders(scene, quick_path)
    num_operations = len(operations(scene, next(folders)))
    for k in range(num_operations):
        run_dir = next(folders)
        disk = FaultyDisk(k)
        with pytest.raises(Death):
            checkpoints(run_dir, disk).save(scene.saved)
        disk.cut_power(names_survive=names_survive)
        require_old_or_new(scene, run_dir)
    run_dir = next(folders)
    disk = FaultyDisk()
    checkpoints(run_dir, disk).save(scene.saved)
    disk.cut_power(names_survive=names_survive)
    require_old_or_new(scene, run_dir, must_be_new=True)


@pytest.mark.parametrize("forgotten", ["sync", "sync_dir"])
def test_the_power_cut_model_catches_a_missing_fsync(tmp_path, forgotten):
    """Negative control: without the fsync the same trial must lose the finished save."""
    disk = type("ForgetfulDisk", (FaultyDisk,), {forgotten: getattr(QuickDisk, forgotten)})()
    run_dir = tmp_path / "run"
    _one_older(run_dir)
    checkpoints(run_dir, disk).save(snapshot_of(3))
    disk.cut_power(names_survive=False)
    with pytest.raises((AssertionError, CheckpointError)):
        require_old_or_new(SCENES["one older"], run_dir, must_be_new=True)


@pytest.mark.parametrize(("error", "lasting"), [(FULL_DISK, True), (BROKEN_DISK, False)])
def test_a_failing_disk_at_every_operation(scene, quick_path, error, lasting):
    folders = fresh_folders(scene, quick_path)
    num_operations = len(operations(scene, next(folders)))
    told: list[str] = []
    for k in range(num_operations):
        run_dir = next(folders)
        num_told = len(told)
        try:
            checkpoints(run_dir, FaultyDisk(k, error, lasting=lasting)).save(scene.saved)
        except ResourceError as refusal:  # a failing removal does not fail the save
            told.append(str(refusal).replace(str(run_dir), "RUN"))
        require_old_or_new(scene, run_dir, must_be_new=len(told) == num_told)
    assert len(told) >= 25
    assert all("RUN" in message for message in told)
    assert all(("disk or quota full" in message) is (error == FULL_DISK) for message in told)


class SignallingDisk(FaultyDisk):
    """SIGTERM comes right before operation `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._signal_at = at

    def _step(self, name: str, path: object, tear: Callable[[], object] | None = None) -> None:
        if self.num_operations == self._signal_at:
            signal.raise_signal(signal.SIGTERM)
        super()._step(name, path, tear)


def test_a_stop_signal_during_a_save_lets_it_finish(tmp_path):
    """At any of its operations."""
    for at in itertools.count():
        run_dir = tmp_path / str(at)
        run_dir.mkdir()
        with StopRequest() as stop:
            checkpoints(run_dir, SignallingDisk(at)).save(snapshot_of(1))
        assert same(checkpoints(run_dir, Disk()).newest(), snapshot_of(1))
        assert [p for p in (run_dir / "checkpoints").iterdir() if ".tmp-" in p.name] == []
        if not stop.requested:
            break  # the save has no more operations
    assert at > 5
