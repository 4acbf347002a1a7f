"""Checkpoints: what is saved comes back bit-equal; rotation keeps what it promises; every fallback is told."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import QuickDisk, same, snapshot_of

from flatout.checkpoint.manifest import Manifest, OtherFormatError, encode_manifest, read_manifest, versions
from flatout.checkpoint.write import Checkpoints, rotation
from flatout.config.folders import run_identity
from flatout.errors import CheckpointError
from flatout.io.durable_io import Disk, DurableIO


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.append((kind, dict(facts)))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


@pytest.fixture
def events():
    return Events()


def checkpoints(run_dir: Path, events: Events, *, keep: int = 2, disk: Disk | None = None) -> Checkpoints:
    return Checkpoints(run_dir, keep=keep, on_event=events, durable_io=DurableIO(disk or QuickDisk()))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_is_saved_comes_back_bit_equal(tmp_path, events):
    assert checkpoints(tmp_path, events).newest() is None
    path = checkpoints(tmp_path, events, disk=Disk()).save(snapshot_of(7))
    assert path == tmp_path / "checkpoints" / "step-7"
    fresh = checkpoints(tmp_path, events)
    assert same(fresh.newest(), snapshot_of(7))
    assert same(fresh.load(path), snapshot_of(7))
    assert events == []
    manifest = read_manifest(path)
    assert manifest.step == 7
    assert manifest.run_id == run_identity(tmp_path, DurableIO())
    assert manifest.versions == versions()
    assert set(manifest.files) == {"model.safetensors", "optimizer.safetensors", "state.json"}


def test_an_incomplete_snapshot_is_refused_before_anything_is_written(tmp_path, events):
    whole = snapshot_of(1)
    short = dataclasses.replace(whole, tensors={"model": {}})
    with pytest.raises(ValueError, match="step 1 lacks optimizer"):
        checkpoints(tmp_path, events).save(short)
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpoints(tmp_path, events).save(dataclasses.replace(whole, facts={"loss": float("inf")}))
    assert not (tmp_path / "checkpoints").exists() or names(tmp_path) == []


def test_rotation_keeps_the_newest_and_the_best(tmp_path, events):
    saves = checkpoints(tmp_path, events)
    for step in range(1, 8):
        saves.save(snapshot_of(step), best=step in (2, 4))
    assert names(tmp_path) == ["step-4", "step-6", "step-7"]
    saves = checkpoints(tmp_path, events)  # another process knows the best from the disk
    saves.save(snapshot_of(8))
    assert names(tmp_path) == ["step-4", "step-7", "step-8"]
    saves.save(snapshot_of(9), best=True)
    assert names(tmp_path) == ["step-8", "step-9"]
    assert events == []


def test_steps_are_ordered_by_number_not_by_name(tmp_path, events):
    saves = checkpoints(tmp_path, events, keep=5)
    for step in (8, 9, 10, 100):
        saves.save(snapshot_of(step))
    assert same(saves.newest(), snapshot_of(100))


def test_rotation_as_a_pure_decision():
    def manifest(step: int) -> Manifest:
        return Manifest("0" * 16, "1" * 16, step, step in (4, 5), 1, {}, {}, "")

    names = {"step-9": 9, "step-8": 8, "step-8.old-ab": 8, "step-7": 7, "step-6": 6, "step-5": 5, "step-4": 4}
    manifests: dict[Path, Manifest | None] = {Path(name): manifest(step) for name, step in names.items()}
    saved = Path("step-9")
    doomed = rotation(manifests, keep=2, saved=saved)
    assert [path.name for path in doomed] == ["step-8.old-ab", "step-7", "step-6", "step-4"]
    manifests[Path("step-8")] = None  # damaged: the one it replaced is what counts
    doomed = rotation(manifests, keep=2, saved=saved)
    assert [path.name for path in doomed] == ["step-7", "step-6", "step-4"]
    assert rotation(manifests, keep=1, saved=Path("step-6"))[-1] == Path("step-4")
    assert Path("step-6") not in rotation(manifests, keep=1, saved=Path("step-6"))
    manifests = dict.fromkeys(manifests)
    assert rotation(manifests, keep=1, saved=saved) == []  # nothing is let go while nothing is valid


def test_between_the_two_renames_the_old_one_still_counts(tmp_path, events):
    saves = checkpoints(tmp_path, events)
    path = saves.save(snapshot_of(3))
    path.rename(path.with_name("step-3.old-0123abcd"))
    assert same(checkpoints(tmp_path, events).newest(), snapshot_of(3))
    checkpoints(tmp_path, events).save(snapshot_of(4))
    assert names(tmp_path) == ["step-3.old-0123abcd", "step-4"]


def test_debris_is_named_then_removed_by_the_next_save(tmp_path, events):
    saves = checkpoints(tmp_path, events)
    saves.save(snapshot_of(3))
    for name in ("step-9.tmp-0123abcd", "step-1.gone-0123abcd"):
        shutil.copytree(tmp_path / "checkpoints" / "step-3", tmp_path / "checkpoints" / name)
    assert same(saves.newest(), snapshot_of(3))
    assert events.kinds == ["unfinished", "unfinished"]
    assert names(tmp_path) == ["step-1.gone-0123abcd", "step-3", "step-9.tmp-0123abcd"]  # loading changes nothing
    events.clear()
    saves.save(snapshot_of(4))
    assert events.kinds == ["removed", "removed"]
    assert "step-1.gone-0123abcd" in events[0][1]["path"]
    assert names(tmp_path) == ["step-3", "step-4"]


def test_only_debris_means_a_fresh_start(tmp_path, events):
    (tmp_path / "checkpoints" / "step-1.tmp-0123abcd").mkdir(parents=True)
    assert checkpoints(tmp_path, events).newest() is None
    assert events.kinds == ["unfinished"]


def test_a_folder_deleted_while_running_is_made_again(tmp_path, events):
    saves = checkpoints(tmp_path / "run", events)
    DurableIO(QuickDisk()).make_dir(tmp_path / "run")
    saves.save(snapshot_of(1))
    for gone in (tmp_path / "run" / "checkpoints", tmp_path / "run"):
        shutil.rmtree(gone)
        saves.save(snapshot_of(2))
        assert events.kinds == ["recreated"]
        assert same(checkpoints(tmp_path / "run", events).newest(), snapshot_of(2))
        events.clear()


def test_a_removal_that_fails_is_told_and_tried_again(tmp_path, events):
    class StickyDisk(QuickDisk):
        sticks = True

        def unlink(self, path: Path) -> None:
            if self.sticks and "step-1." in path.parent.name:
                raise PermissionError(13, "Permission denied")
            super().unlink(path)

    disk = StickyDisk()
    saves = checkpoints(tmp_path, events, keep=1, disk=disk)
    saves.save(snapshot_of(1))
    saves.save(snapshot_of(2))
    assert events.kinds == ["not removed"]
    assert "Permission denied" in events[0][1]["why"]
    saves.save(snapshot_of(3))
    assert events.kinds == ["not removed", "removed", "not removed"]
    disk.sticks = False
    saves.save(snapshot_of(4))
    assert names(tmp_path) == ["step-4"]


def test_when_none_is_valid_every_reason_is_listed(tmp_path, events):
    saves = checkpoints(tmp_path, events)
    for step in (1, 2):
        saves.save(snapshot_of(step))
    (tmp_path / "checkpoints" / "step-1" / "state.json").write_text("{")
    (tmp_path / "checkpoints" / "step-2" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError) as raised:
        checkpoints(tmp_path, events).newest()
    message = str(raised.value)
    for part in ("none of 2 checkpoints is valid", "step-2/optimizer.safetensors: the file is missing"):
        assert part in message
    assert "step-1/state.json: found 1 bytes, expected" in message
    assert raised.value.exit_code == 4


def rewrite(path: Path, **changes: Any) -> None:
    """A manifest that is whole and hashed, with other values."""
    manifest = dataclasses.replace(read_manifest(path), **changes)
    (path / "manifest.json").write_bytes(encode_manifest(manifest))


def test_another_format_is_refused_not_passed_over(tmp_path, events):
    saves = checkpoints(tmp_path, events)
    saves.save(snapshot_of(1))
    path = saves.save(snapshot_of(2))
    manifest = read_manifest(path)
    for version in (1, 2, 4, None, "3"):
        other: Any = dataclasses.replace(manifest, format_version=version)  # type: ignore[arg-type]  # as a file may
        (path / "manifest.json").write_bytes(encode_manifest(other))
        with pytest.raises(
            OtherFormatError, match=rf"step-2.*format {version!r}, this one reads 3\); resume with that"
        ):
            checkpoints(tmp_path, events).newest()


def test_another_runs_checkpoint_is_refused(tmp_path, events):
    for run in ("a", "b"):
        DurableIO(QuickDisk()).make_dir(tmp_path / run)
        checkpoints(tmp_path / run, events).save(snapshot_of(1))
    checkpoints(tmp_path / "a", events).save(snapshot_of(2))
    shutil.copytree(tmp_path / "a" / "checkpoints" / "step-2", tmp_path / "b" / "checkpoints" / "step-2")
    assert same(checkpoints(tmp_path / "b", events).newest(), snapshot_of(1))
    assert "belongs to run" in events[0][1]["why"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step: .*greater than or equal to 0; found -1"),
        ({"step": 5}, "the folder's name says step 2, its manifest 5"),
        ({"run_id": "x"}, "run_id: .*found 'x'"),
        ({"world_size": "1"}, "world_size: .*valid integer; found '1'"),
        ({"files": {"../../etc/passwd": {"size_bytes": 1, "xxh3": "0" * 32}}}, r"files\.\.\./\.\./etc/passwd"),
        ({"files": {"a": {"size_bytes": 1}}}, r"files\.a\.xxh3: Field required"),
    ],
)
def test_a_manifest_is_checked_field_by_field(tmp_path, events, changes, message):
    path = checkpoints(tmp_path, events).save(snapshot_of(2))
    rewrite(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        checkpoints(tmp_path, events).load(path)


def test_files_of_two_saves_of_one_step_do_not_mix(tmp_path, events):
    saves = checkpoints(tmp_path, events)
    path = saves.save(snapshot_of(2))
    first = (path / "optimizer.safetensors").read_bytes()
    saves.save(snapshot_of(2, mark=1))
    # someone even made the manifest agree: the identity in the file's header still tells
    (path / "optimizer.safetensors").write_bytes(first)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: it belongs to a different save: .*save_id"):
        checkpoints(tmp_path, events).load(path)
    from flatout.io.durable_io import digest

    files = {**read_manifest(path).files, "optimizer.safetensors": digest(path / "optimizer.safetensors")}
    rewrite(path, files=files)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: it belongs to a different save"):
        checkpoints(tmp_path, events).load(path)


def test_the_runs_identity_is_kept_and_never_made_up(tmp_path, events):
    durable_io = DurableIO(QuickDisk())
    first = run_identity(tmp_path, durable_io)
    assert run_identity(tmp_path, durable_io) == first
    checkpoints(tmp_path, events).save(snapshot_of(1))
    (tmp_path / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.json: missing, though there are checkpoints; restore it"):
        checkpoints(tmp_path, events).newest()
    (tmp_path / "run.json").write_text('{"run_id": 3}')
    with pytest.raises(CheckpointError, match=r"run\.json: run_id: found 3, expected 8 to 32 hex digits"):
        checkpoints(tmp_path, events).newest()
    durable_io.write_json(tmp_path / "run.json", {"run_id": first})
    assert same(checkpoints(tmp_path, events).newest(), snapshot_of(1))


def test_rotation_does_not_count_a_damaged_one(tmp_path, events):
    saves = checkpoints(tmp_path, events, keep=3)
    for step in (1, 2, 3):
        saves.save(snapshot_of(step))
    (tmp_path / "checkpoints" / "step-3" / "optimizer.safetensors").unlink()
    checkpoints(tmp_path, events, keep=2).save(snapshot_of(4))
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    checkpoints(tmp_path, events, keep=2).save(snapshot_of(5))
    assert names(tmp_path) == ["step-4", "step-5"]
