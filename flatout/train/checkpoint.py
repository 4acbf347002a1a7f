"""Checkpoints, whole or not there: written aside, hashed, read back, renamed once, rotated, verified on load."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.errors import CheckpointError, ResourceError
from flatout.train.manifest import (
    MANIFEST_NAME,
    RUN_NAME,
    Manifest,
    NewerFormatError,
    encode_manifest,
    now_utc,
    read_manifest,
    run_identity,
    versions,
    write_identity,
)
from flatout.train.storage import FileFacts, Storage, digest, encode_json, read_json
from flatout.train.tensor_file import encode_tensors, read_metadata, read_tensors

OnEvent = Callable[[str, Mapping[str, Any]], None]

STATE_NAME = "state.json"
TENSOR_SUFFIX = ".safetensors"
REQUIRED_STEMS = ("model", "optimizer", "rng-0")
REQUIRED_FILES = (*(stem + TENSOR_SUFFIX for stem in REQUIRED_STEMS), STATE_NAME)

# step-N.old-X is the previous save of step N while a new one takes its place: still a checkpoint
_CHECKPOINT = re.compile(r"step-(\d+)(\.old-[0-9a-f]+)?")
# .tmp: a save that did not finish; .gone: a removal that did not finish
_DEBRIS = re.compile(r"step-\d+\.(tmp|gone)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's whole resumable state.

    `step` counts completed optimizer steps. `tensors` is file stem -> name -> tensor and has at least the stems
    "model", "optimizer" and "rng-0". `facts` are JSON values (config, fingerprints, counters, scaler, ...).
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder that looks like a checkpoint, unverified."""

    path: Path
    step: int
    replaced: bool


class Checkpoints:
    """The checkpoints of one run folder, in `<run_dir>/checkpoints/step-N/`.

    Only the process that holds the run's lock may save; loading changes nothing on disk and needs no lock.
    `keep` is how many of the newest to keep besides the best. `on_event(kind, facts)` is told every fallback,
    removal and failed removal.
    """

    def __init__(
        self, run_dir: Path, *, keep: int, on_event: OnEvent, world_size: int = 1, storage: Storage | None = None
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._keep = keep
        self._on_event = on_event
        self._world_size = world_size
        self._storage = storage or Storage()
        self._run_id: str | None = None
        self._verified: dict[Path, Manifest] = {}

    def steps(self) -> list[int]:
        """Steps of everything named like a checkpoint, newest first, unverified."""
        return [entry.step for entry in self._entries()]

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        """Write a checkpoint, verify it, give it its name by one rename, and remove those that rotation lets go.

        The last checkpoint saved as `best` outlives the rotation. A second save of the same step replaces the first.
        Raises ResourceError when the disk is full or refuses; older checkpoints are then as they were. Raises
        ValueError for a snapshot without a required stem or with facts that are no JSON values.
        """
        if missing := [stem for stem in REQUIRED_STEMS if stem not in snapshot.tensors]:
            raise ValueError(f"the snapshot of step {snapshot.step} lacks {', '.join(missing)}")
        self._open_folder()
        self._sweep()
        save_id = secrets.token_hex(8)
        temp = self.folder / f"step-{snapshot.step}.tmp-{save_id}"
        try:
            manifest = self._write(temp, snapshot, save_id, best)
            verify_files(temp, manifest)
            path = self._publish(temp, snapshot.step, save_id)
        except (ResourceError, CheckpointError):
            self._discard(temp)
            raise
        self._verified[path] = manifest
        self._rotate(path)
        return path

    def newest(self) -> Snapshot | None:
        """Load the newest valid checkpoint; None when the run has none yet.

        A damaged one is told as an event with its reason, and the one before it is tried. Raises CheckpointError with
        every reason when there are checkpoints but none is valid, and NewerFormatError rather than falling back
        behind a checkpoint of a newer flatout.
        """
        reasons: list[str] = []
        for path in self._debris():
            self._on_event("unfinished", {"path": str(path), "why": "a save or removal did not finish; not used"})
        for entry in self._entries():
            try:
                snapshot = self.load(entry.path)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                reasons.append(str(error))
                self._on_event("refused", {"path": str(entry.path), "why": str(error)})
                continue
            if reasons:
                self._on_event("fallback", {"path": str(entry.path), "step": entry.step, "why": reasons[-1]})
            return snapshot
        if reasons:
            lines = "".join(f"\n  - {reason}" for reason in reasons)
            raise CheckpointError(
                f"{self.folder}: none of {len(reasons)} checkpoints is valid; restore one from a copy, or move the "
                f"folder away to start anew:{lines}"
            )
        return None

    def load(self, path: Path) -> Snapshot:
        """Load one checkpoint, every file verified. Raises CheckpointError naming the file and what is wrong."""
        manifest = self._check(path)
        tensors: dict[str, Mapping[str, Tensor]] = {}
        for name in manifest.files:
            if name.endswith(TENSOR_SUFFIX):
                content, metadata = read_tensors(path / name)
                _refuse_other_save(path / name, metadata, manifest)
                tensors[name.removesuffix(TENSOR_SUFFIX)] = content
        state = read_json(path / STATE_NAME)
        if not isinstance(state, dict) or not isinstance(state.get("facts"), dict):
            raise CheckpointError(f"{path / STATE_NAME}: facts: expected an object")
        _refuse_other_save(path / STATE_NAME, state.get("save"), manifest)
        self._verified[path] = manifest
        return Snapshot(manifest.step, tensors, state["facts"])

    def _check(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        matched = _CHECKPOINT.fullmatch(path.name)
        if matched and int(matched[1]) != manifest.step:
            raise CheckpointError(f"{path}: the folder's name says step {matched[1]}, its manifest {manifest.step}")
        run_id = self._identity()
        if manifest.run_id != run_id:
            raise CheckpointError(
                f"{path}: it belongs to run {manifest.run_id}, this folder to run {run_id}; move a run by copying its "
                "whole folder"
            )
        if missing := [name for name in REQUIRED_FILES if name not in manifest.files]:
            raise CheckpointError(f"{path / MANIFEST_NAME}: files: {', '.join(missing)} missing; not resumable without")
        verify_files(path, manifest)
        return manifest

    def _write(self, temp: Path, snapshot: Snapshot, save_id: str, best: bool) -> Manifest:
        run_id = self._identity()
        identity = {"run_id": run_id, "save_id": save_id, "step": str(snapshot.step)}
        encoded = {
            stem + TENSOR_SUFFIX: encode_tensors(tensors, identity) for stem, tensors in snapshot.tensors.items()
        }
        state = encode_json({"save": identity, "facts": dict(snapshot.facts)})
        encoded[STATE_NAME] = (len(state), iter([memoryview(state)]))
        self._storage.require_free(self.folder, sum(size_bytes for size_bytes, _ in encoded.values()))
        self._storage.make_dir(temp)
        files = {
            name: self._storage.create(temp / name, chunks, size_bytes)
            for name, (size_bytes, chunks) in encoded.items()
        }
        manifest = Manifest(
            run_id=run_id,
            save_id=save_id,
            step=snapshot.step,
            best=best,
            world_size=self._world_size,
            files=files,
            versions=versions(),
            created=now_utc(),
        )
        content = encode_manifest(manifest)
        self._storage.create(temp / MANIFEST_NAME, [memoryview(content)], len(content))
        self._storage.fsync_dir(temp)
        return manifest

    def _publish(self, temp: Path, step: int, save_id: str) -> Path:
        path = self.folder / f"step-{step}"
        if path.exists():
            # a folder cannot replace a folder in one rename; in between, the old one still counts as a checkpoint
            self._storage.rename(path, self.folder / f"step-{step}.old-{save_id}")
            self._verified.pop(path, None)
        self._storage.rename(temp, path)
        return path

    def _rotate(self, saved: Path) -> None:
        entries = self._entries()
        manifests = {entry.path: self._verify(entry.path) for entry in entries}
        for path in rotation(entries, manifests, keep=self._keep, saved=saved):
            self._remove(path)

    def _verify(self, path: Path) -> Manifest | None:
        """The manifest of a valid checkpoint, hashed once in the life of this object; None for any other."""
        if path not in self._verified:
            try:
                self._verified[path] = self._check(path)
            except CheckpointError:
                return None
        return self._verified[path]

    def _remove(self, path: Path) -> None:
        # one rename first: no crash can leave half a checkpoint under a checkpoint's name
        gone = path.with_name(f"{path.name.partition('.')[0]}.gone-{secrets.token_hex(4)}")
        try:
            self._storage.rename(path, gone)
            self._verified.pop(path, None)
            self._storage.remove_tree(gone)
        except ResourceError as error:
            self._on_event("not removed", {"path": str(path), "why": str(error), "next": "tried again at next save"})

    def _discard(self, temp: Path) -> None:
        try:
            self._storage.remove_tree(temp)
        except ResourceError as error:
            self._on_event("not removed", {"path": str(temp), "why": str(error), "next": "tried again at next save"})

    def _sweep(self) -> None:
        for path in self._debris():
            self._on_event("removed", {"path": str(path), "why": "left by a save or removal that did not finish"})
            self._discard(path)

    def _open_folder(self) -> None:
        if self._verified and not self.folder.exists():
            self._on_event("recreated", {"path": str(self.folder), "why": "it was deleted while the run went on"})
            self._verified.clear()
        self._storage.make_dir(self.folder)
        if self._run_id and not (self._run_dir / RUN_NAME).exists():
            write_identity(self._run_dir, self._run_id, self._storage)

    def _identity(self) -> str:
        if self._run_id is None:
            self._run_id = run_identity(self._run_dir, self._storage)
        return self._run_id

    def _entries(self) -> list[Entry]:
        """Folders named like checkpoints, newest first; of one step, the one that replaced the other first."""
        entries = [
            Entry(path, int(matched[1]), matched[2] is not None)
            for path in self._names()
            if (matched := _CHECKPOINT.fullmatch(path.name))
        ]
        return sorted(entries, key=lambda entry: (-entry.step, entry.replaced, entry.path.name))

    def _debris(self) -> list[Path]:
        return [path for path in self._names() if _DEBRIS.fullmatch(path.name)]

    def _names(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []


def rotation(
    entries: Sequence[Entry], manifests: Mapping[Path, Manifest | None], *, keep: int, saved: Path
) -> list[Path]:
    """Which checkpoints to let go, given all (newest first) and the manifests of the valid ones (None: damaged).

    Kept: the `keep` newest valid ones, the newest valid one marked best, and `saved`. A damaged one neither counts nor
    goes before `keep` valid newer ones are there.
    """
    steps: set[int] = set()
    has_best = False
    doomed: list[Path] = []
    for entry in entries:
        manifest = manifests[entry.path]
        if manifest is None:
            wanted = len(steps) < keep
        elif entry.step in steps:
            wanted = False
        else:
            wanted = len(steps) < keep or (manifest.best and not has_best) or entry.path == saved
            has_best = has_best or manifest.best
            steps.add(entry.step)
        if not wanted:
            doomed.append(entry.path)
    return doomed


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Check every file that a manifest names: there, of its size, of its hash. Raises CheckpointError."""
    for name, facts in manifest.files.items():
        path = folder / name
        try:
            found = digest(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: the file is missing; the checkpoint is not resumable without it") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        if found != facts:
            raise CheckpointError(f"{path}: {_damage(path, found, facts, manifest)}")


def _damage(path: Path, found: FileFacts, expected: FileFacts, manifest: Manifest) -> str:
    if path.name.endswith(TENSOR_SUFFIX):
        try:
            other = other_save(read_metadata(path), manifest)
        except CheckpointError:
            other = None  # not even its header can be read: the size or the hash tells what happened
        if other:
            return other
    if found.size_bytes != expected.size_bytes:
        return f"found {found.size_bytes:,} bytes, expected {expected.size_bytes:,}; it was cut off or replaced"
    return f"its content does not match its hash (found xxh3 {found.xxh3}, expected {expected.xxh3})"


def other_save(identity: Any, manifest: Manifest) -> str | None:
    """How a file's own identity (run_id, save_id, step) differs from its manifest's; None when it does not."""
    expected = {"run_id": manifest.run_id, "save_id": manifest.save_id, "step": str(manifest.step)}
    if identity == expected:
        return None
    return f"it is of another save: found {identity}, expected {expected}"


def _refuse_other_save(path: Path, identity: Any, manifest: Manifest) -> None:
    if other := other_save(identity, manifest):
        raise CheckpointError(f"{path}: {other}")
