"""Checkpoints, whole or not there: written aside, hashed, read back, renamed once, rotated, verified on load.

Every rank writes its own part; the first one opens, publishes and rotates, and all learn whether it succeeded.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.errors import CheckpointError, ResourceError
from flatout.parallel.messages import Messages
from flatout.train.integrity import refuse_other_save, verify_files
from flatout.train.manifest import (
    MANIFEST_NAME,
    RUN_NAME,
    SHARDED_FORMAT_VERSION,
    WHOLE_FORMAT_VERSION,
    Manifest,
    NewerFormatError,
    encode_manifest,
    now_utc,
    read_manifest,
    run_identity,
    versions,
    write_identity,
)
from flatout.train.storage import FileFacts, Storage, encode_json, read_json
from flatout.train.stored import PLACES, Stored, StoredTensors, kind_of, open_tensors
from flatout.train.tensor_file import TENSOR_SUFFIX, encode_tensors

OnEvent = Callable[[str, Mapping[str, Any]], None]

STATE_NAME = "state.json"
REQUIRED_KINDS = ("model", "optimizer", "rng-0")
Encoded = dict[str, tuple[int, Iterator[memoryview]]]

# step-N.old-X is the previous save of step N while a new one takes its place: still a checkpoint
_CHECKPOINT = re.compile(r"step-(\d+)(\.old-[0-9a-f]+)?")
# .tmp: a save that did not finish; .gone: a removal that did not finish
_DEBRIS = re.compile(r"step-\d+\.(tmp|gone)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this rank writes of a run's resumable state.

    `step` counts completed optimizer steps. `tensors` is file stem -> name -> tensor; over all ranks there are at least
    the kinds "model", "optimizer" and "rng-0", whole under these stems or in parts under stems such as "model-rank-2".
    `places` is, for a stem of parts, name -> (whole shape, offset); a name that is not there is whole. `facts` are JSON
    values (config, fingerprints, counters, scaler, ...), the same on every rank.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]
    places: Mapping[str, Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder that looks like a checkpoint, unverified."""

    path: Path
    step: int
    replaced: bool


class Checkpoints:
    """The checkpoints of one run folder, in `<run_dir>/checkpoints/step-N/`.

    Saving and loading are collective over the ranks of `messages`, which all see the same folder. Only with the run's
    lock held may a run save; loading changes nothing on disk and needs no lock. `keep` is how many of the newest to
    keep besides the best. `on_event(kind, facts)` is told every fallback, removal and failed removal.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        on_event: OnEvent,
        messages: Messages | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self.messages = messages or Messages()
        self._run_dir = run_dir
        self._keep = keep
        self._on_event = on_event
        self._storage = storage or Storage()
        self._run_id: str | None = None
        self._verified: dict[Path, Manifest] = {}

    def steps(self) -> list[int]:
        """Steps of everything named like a checkpoint, newest first, unverified."""
        return [entry.step for entry in self._entries()]

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        """Write a checkpoint, verify it, give it its name by one rename, and remove those that rotation lets go.

        The last checkpoint saved as `best` outlives the rotation. A second save of the same step replaces the first.
        Raises ResourceError, on every rank, when the disk of one is full or refuses; older checkpoints are then as they
        were. Raises ValueError for a snapshot without a required kind or with facts that are no JSON values, and
        PeerLostError when a rank dies, which leaves only debris.
        """
        identity = self.messages.first(lambda: self._begin(snapshot))
        temp = self.folder / f"step-{snapshot.step}.tmp-{identity['save_id']}"
        try:
            manifest = self._write(temp, snapshot, identity, best)
            self.messages.first(lambda: self._publish(temp, snapshot.step, identity["save_id"]))
        except (ResourceError, CheckpointError):
            if self.messages.rank.is_first:
                self._discard(temp)
            raise
        path = self.folder / f"step-{snapshot.step}"
        if self.messages.rank.is_first:
            self._verified[path] = manifest
            self._rotate(path)
        return path

    def newest(self) -> Stored | None:
        """Open the newest valid checkpoint; None when the run has none yet.

        A damaged one is told as an event with its reason, and the one before it is tried. Raises CheckpointError with
        every reason when there are checkpoints but none is valid, and NewerFormatError rather than falling back
        behind a checkpoint of a newer flatout.
        """
        reasons: list[str] = []
        for path in self._debris():
            self._on_event("unfinished", {"path": str(path), "why": "a save or removal did not finish; not used"})
        # one rank looks: the others may see a folder of another moment
        for name in self.messages.first(lambda: [entry.path.name for entry in self._entries()]):
            path = self.folder / name
            try:
                stored = self.load(path)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                reasons.append(str(error))
                self._on_event("refused", {"path": str(path), "why": str(error)})
                continue
            if reasons:
                self._on_event("fallback", {"path": str(path), "step": stored.step, "why": reasons[-1]})
            return stored
        if reasons:
            lines = "".join(f"\n  - {reason}" for reason in reasons)
            raise CheckpointError(
                f"{self.folder}: none of {len(reasons)} checkpoints is valid; restore one from a copy, or move the "
                f"folder away to start anew:{lines}"
            )
        return None

    def load(self, path: Path) -> Stored:
        """Open one checkpoint, every file verified by one of the ranks.

        Raises CheckpointError, on every rank, naming the file and what is wrong.
        """
        opened: list[Stored] = []

        def verify() -> None:
            manifest = self._check(path)
            verify_files(path, manifest, index=self.messages.rank.index, world=self.messages.rank.world)
            opened.append(_open(path, manifest))
            self._verified[path] = manifest

        try:
            self.messages.agree(verify)
        except CheckpointError:
            self._verified.pop(path, None)
            raise
        return opened[0]

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
        kinds = {kind_of(name.removesuffix(TENSOR_SUFFIX)) for name in manifest.files}
        required = (*REQUIRED_KINDS, STATE_NAME)
        if missing := [name + TENSOR_SUFFIX * (name in REQUIRED_KINDS) for name in required if name not in kinds]:
            raise CheckpointError(f"{path / MANIFEST_NAME}: files: {', '.join(missing)} missing; not resumable without")
        return manifest

    def _begin(self, snapshot: Snapshot) -> dict[str, str]:
        """The identity that every file of a new save carries."""
        kinds = {kind_of(stem) for stem in snapshot.tensors}
        if missing := [kind for kind in REQUIRED_KINDS if kind not in kinds]:
            raise ValueError(f"the snapshot of step {snapshot.step} lacks {', '.join(missing)}")
        self._open_folder()
        self._sweep()
        return {"run_id": self._identity(), "save_id": secrets.token_hex(8), "step": str(snapshot.step)}

    def _write(self, temp: Path, snapshot: Snapshot, identity: Mapping[str, str], best: bool) -> Manifest:
        encoded: Encoded = {}

        def lay_out() -> int:
            encoded.update(self._encode(snapshot, identity))
            return sum(size_bytes for size_bytes, _ in encoded.values())

        def make_room() -> None:
            self._storage.require_free(self.folder, sum(sizes))
            self._storage.make_dir(temp)

        def write_manifest() -> None:
            content = encode_manifest(manifest)
            self._storage.create(temp / MANIFEST_NAME, [memoryview(content)], len(content))
            self._storage.fsync_dir(temp)

        sizes = self.messages.agree(lay_out)
        self.messages.first(make_room)
        written = self.messages.agree(lambda: self._write_files(temp, encoded))
        is_whole = "model" + TENSOR_SUFFIX in written[0]
        manifest = Manifest(
            run_id=identity["run_id"],
            save_id=identity["save_id"],
            step=snapshot.step,
            best=best,
            world_size=self.messages.rank.world,
            files={name: FileFacts(**facts) for files in written for name, facts in files.items()},
            versions=versions(),
            created=now_utc(),
            format_version=WHOLE_FORMAT_VERSION if is_whole else SHARDED_FORMAT_VERSION,
        )
        self.messages.first(write_manifest)
        self.messages.agree(
            lambda: verify_files(temp, manifest, index=self.messages.rank.index, world=self.messages.rank.world)
        )
        return manifest

    def _encode(self, snapshot: Snapshot, identity: Mapping[str, str]) -> Encoded:
        encoded: Encoded = {}
        for stem, tensors in snapshot.tensors.items():
            places = {PLACES: json.dumps(snapshot.places[stem])} if stem in snapshot.places else {}
            encoded[stem + TENSOR_SUFFIX] = encode_tensors(tensors, {**identity, **places})
        if self.messages.rank.is_first:
            state = encode_json({"save": dict(identity), "facts": dict(snapshot.facts)})
            encoded[STATE_NAME] = (len(state), iter([memoryview(state)]))
        return encoded

    def _write_files(self, temp: Path, encoded: Encoded) -> dict[str, dict[str, Any]]:
        facts = {
            name: self._storage.create(temp / name, chunks, size_bytes)
            for name, (size_bytes, chunks) in encoded.items()
        }
        return {name: dataclasses.asdict(fact) for name, fact in facts.items()}

    def _publish(self, temp: Path, step: int, save_id: str) -> None:
        path = self.folder / f"step-{step}"
        if path.exists():
            # a folder cannot replace a folder in one rename; in between, the old one still counts as a checkpoint
            self._storage.rename(path, self.folder / f"step-{step}.old-{save_id}")
            self._verified.pop(path, None)
        self._storage.rename(temp, path)

    def _rotate(self, saved: Path) -> None:
        entries = self._entries()
        manifests = {entry.path: self._verify(entry.path) for entry in entries}
        for path in rotation(entries, manifests, keep=self._keep, saved=saved):
            self._remove(path)

    def _verify(self, path: Path) -> Manifest | None:
        """The manifest of a valid checkpoint, hashed once in the life of this object; None for any other."""
        if path not in self._verified:
            try:
                manifest = self._check(path)
                verify_files(path, manifest)
            except CheckpointError:
                return None
            self._verified[path] = manifest
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


def _open(path: Path, manifest: Manifest) -> Stored:
    """A checkpoint's facts and lazily read tensors; every file must carry the manifest's identity."""
    tensors: dict[str, StoredTensors] = open_tensors(path, manifest)
    state = read_json(path / STATE_NAME)
    if not isinstance(state, dict) or not isinstance(state.get("facts"), dict):
        raise CheckpointError(f"{path / STATE_NAME}: facts: expected an object")
    refuse_other_save(path / STATE_NAME, state.get("save"), manifest)
    return Stored(path, manifest.step, tensors, state["facts"])
