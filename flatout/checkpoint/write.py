"""Atomic checkpoints: written to a temporary folder, hashed, read back, renamed into place, and verified on load.

Every rank writes its own shard. The first rank creates, publishes and rotates, and every rank gets the outcome.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    OtherFormatError,
    encode_manifest,
    read_manifest,
    refuse_other_save,
    shares,
    verify_files,
    versions,
)
from flatout.checkpoint.read import PLACES, CheckpointTensors, SavedCheckpoint, kind_of
from flatout.checkpoint.tensor_file import TENSOR_SUFFIX, encode_tensors
from flatout.config.folders import RUN_NAME, mark_run, run_identity
from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import DurableIO, FileFacts
from flatout.io.json_file import encode_json, now_utc, read_json
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.fault_tolerance.peer_watch import OnEvent
from flatout.parallel.rank import Rank

CheckFacts = Callable[[Mapping[str, Any], int], None]

STATE_NAME = "state.json"
REQUIRED_KINDS = ("model", "optimizer")

# step-N.old-X is the previous save of step N while a new one replaces it; it still counts as a checkpoint
_CHECKPOINT = re.compile(r"step-(\d+)(?:\.old-[0-9a-f]+)?")
# .tmp: an unfinished save; .gone: an unfinished removal
_DEBRIS = re.compile(r"step-\d+\.(tmp|gone)-[0-9a-f]+")


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder of them, ascending; unfinished ones do not count."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted({int(matched[1]) for matched in names if matched})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This rank's share of the run's resumable state."""

    step: int
    """Completed optimizer steps."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File stem -> name -> tensor; over all ranks there are at least the kinds "model" and "optimizer", whole under
    these stems or sharded under stems such as "model-rank-2"."""
    facts: Mapping[str, Any]
    """JSON values (config, fingerprints, counters, scaler, ...), the same on every rank."""
    places: Mapping[str, Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)
    """Stem of a sharded file -> name -> (global shape, offset); a name that is missing there is whole."""


class Checkpoints:
    """Saves, finds, loads and rotates the checkpoints of a run, in `<run_dir>/checkpoints/step-N/`.

    Saving and loading are collective over the ranks of `group`, which must all see the same folder. Saving requires the
    run's lock; loading changes nothing on disk and needs no lock. `keep` is how many of the newest checkpoints to keep
    in addition to the best. `on_event(kind, facts)` is called for every fallback, removal and failed removal.
    `check_facts(facts, step)` raises CheckpointError for facts that no run could have saved. `fetch(steps)`, called on
    the first rank with the steps of the valid ones, newest first, brings a newer one into the folder if it has one.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        on_event: OnEvent,
        group: ControlGroup | None = None,
        check_facts: CheckFacts = lambda facts, step: None,
        durable_io: DurableIO | None = None,
        fetch: Callable[[Iterator[int]], None] = lambda steps: None,
    ) -> None:
        self.folder, self.group = run_dir / "checkpoints", group or ControlGroup()
        self._fetch = fetch
        self._run_dir, self._keep = run_dir, keep
        self._on_event, self._check_facts = on_event, check_facts
        self._durable_io = durable_io or DurableIO()
        self._run_id: str | None = None
        self._verified: dict[Path, Manifest] = {}

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        """Write a checkpoint, verify it, rename it into place, and remove the ones that rotation drops.

        Rotation never removes the last checkpoint saved as `best`. A second save of the same step replaces the first.
        Raises ResourceError on every rank when one rank's disk is full or a write fails; older checkpoints are then
        unchanged. Raises ValueError for a snapshot without a required kind or with facts that are not JSON values, and
        PeerLostError when a rank dies, which leaves only an unfinished folder that the next save removes.
        """
        identity = self.group.run_on_first_rank(lambda: self._begin(snapshot))
        temp = self.folder / f"step-{snapshot.step}.tmp-{identity['save_id']}"
        path = self.folder / f"step-{snapshot.step}"

        def publish() -> None:
            # this also syncs the folder
            self._durable_io.write_bytes(temp / MANIFEST_NAME, encode_manifest(manifest))
            if path.exists():
                # a rename cannot replace a non-empty folder; between the two, the old one still counts as a checkpoint
                self._durable_io.rename(path, self.folder / f"{path.name}.old-{identity['save_id']}")
                self._verified.pop(path, None)
            self._durable_io.rename(temp, path)

        try:
            manifest = self._write(temp, snapshot, identity, best)
            self.group.run_on_first_rank(publish)
        except (ResourceError, CheckpointError):
            if self.group.rank.is_first:
                self._discard(temp)
            raise
        if self.group.rank.is_first:
            self._verified[path] = manifest
            manifests = {folder: self._verify(folder) for folder in self._folders()}
            for gone in rotation(manifests, keep=self._keep, saved=path):
                self._discard(gone)
        return path

    def require_room(self, num_bytes: int) -> None:
        """Raise ResourceError on every rank if the disk cannot hold a checkpoint; this rank adds `num_bytes`."""
        sizes = self.group.all_gather(num_bytes)

        def look() -> None:
            try:
                self._durable_io.require_free(self.folder, sum(sizes))
            except ResourceError as error:
                raise ResourceError(f"no checkpoint of this run could be saved: {error.text}") from error

        self.group.run_on_first_rank(look)

    def newest(self) -> SavedCheckpoint | None:
        """Open the newest valid checkpoint; return None when the run has none yet.

        A damaged checkpoint is reported as an event with the reason, and the previous one is tried. Raises
        CheckpointError with every reason when there are checkpoints but none is valid. Raises OtherFormatError for a
        checkpoint in another format version instead of falling back to an older one.
        """
        valid = (manifest.step for path in self._folders() if (manifest := self._verify(path)))
        self.group.run_on_first_rank(lambda: self._fetch(valid))
        reasons: list[str] = []
        for path in sorted(self.folder.glob("step-*")):
            if _DEBRIS.fullmatch(path.name):
                self._on_event("unfinished", {"path": str(path), "why": "not used: a save or removal did not finish"})
        # only one rank lists the folder: the others may see it at a different moment
        for name in self.group.run_on_first_rank(lambda: [path.name for path in self._folders()]):
            path = self.folder / name
            try:
                stored = self.load(path)
            except OtherFormatError:
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
                f"{self.folder}: none of {len(reasons)} checkpoints is valid; restore one from a backup, or move the "
                f"folder away to start over:{lines}"
            )
        return None

    def load(self, path: Path) -> SavedCheckpoint:
        """Open one checkpoint after verifying every file; each file is verified by one rank.

        Raises CheckpointError on every rank, with the file and what is wrong with it.
        """
        opened: list[SavedCheckpoint] = []

        def verify() -> None:
            manifest = self._check(path)
            verify_files(path, manifest, self.group.rank)
            state = read_json(path / STATE_NAME)
            if not isinstance(state, dict) or not isinstance(state.get("facts"), dict):
                raise CheckpointError(f"{path / STATE_NAME}: facts: expected an object")
            refuse_other_save(path / STATE_NAME, state.get("save"), manifest)
            try:
                self._check_facts(state["facts"], manifest.step)
            except CheckpointError as error:
                raise error.at(path / STATE_NAME) from None
            names: dict[str, list[str]] = {}
            for name in manifest.files:
                if name.endswith(TENSOR_SUFFIX):
                    names.setdefault(kind_of(name.removesuffix(TENSOR_SUFFIX)), []).append(name)
            tensors = {kind: CheckpointTensors(path, files, manifest) for kind, files in names.items()}
            own_files = shares(manifest.files, self.group.rank.world)[self.group.rank.index]
            for held_tensors in tensors.values():
                held_tensors.refuse_non_finite(own_files)
            opened.append(SavedCheckpoint(path, manifest.step, tensors, state["facts"]))
            self._verified[path] = manifest

        try:
            self.group.run_on_all_ranks(verify)
        except CheckpointError:
            self._verified.pop(path, None)
            raise
        return opened[0]

    def _check(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        matched = _CHECKPOINT.fullmatch(path.name)
        if matched and int(matched[1]) != manifest.step:
            raise CheckpointError(f"{path}: the folder's name says step {matched[1]}, its manifest {manifest.step}")
        self._run_id = run_id = self._run_id or run_identity(self._run_dir, self._durable_io)
        if manifest.run_id != run_id:
            raise CheckpointError(
                f"{path}: it belongs to run {manifest.run_id}, but this folder to run {run_id}; move a run by copying "
                "its whole folder"
            )
        kinds = {kind_of(name.removesuffix(TENSOR_SUFFIX)) for name in manifest.files}
        required = (*REQUIRED_KINDS, STATE_NAME)
        if missing := [name + TENSOR_SUFFIX * (name in REQUIRED_KINDS) for name in required if name not in kinds]:
            raise CheckpointError(f"{path / MANIFEST_NAME}: files: {', '.join(missing)} missing; not usable without")
        return manifest

    def _begin(self, snapshot: Snapshot) -> dict[str, str]:
        """Prepare the folder for a new save and return the identity that goes into every file of it."""
        kinds = {kind_of(stem) for stem in snapshot.tensors}
        if missing := [kind for kind in REQUIRED_KINDS if kind not in kinds]:
            raise ValueError(f"the snapshot of step {snapshot.step} lacks {', '.join(missing)}")
        if self._verified and not self.folder.exists():
            self._on_event("recreated", {"path": str(self.folder), "why": "it was deleted during the run"})
            self._verified.clear()
        self._durable_io.make_dir(self.folder)
        if self._run_id and not (self._run_dir / RUN_NAME).exists():
            mark_run(self._run_dir, self._run_id, self._durable_io)
        for path in sorted(self.folder.glob("step-*")):
            if _DEBRIS.fullmatch(path.name):
                self._on_event("removed", {"path": str(path), "why": "left over from an unfinished save or removal"})
                self._discard(path)
        self._run_id = self._run_id or run_identity(self._run_dir, self._durable_io)
        return {"run_id": self._run_id, "save_id": secrets.token_hex(8), "step": str(snapshot.step)}

    def _write(self, temp: Path, snapshot: Snapshot, identity: Mapping[str, str], best: bool) -> Manifest:
        encoded: dict[str, tuple[int, Iterator[memoryview]]] = {}

        def lay_out() -> int:
            for stem, tensors in snapshot.tensors.items():
                places = {PLACES: json.dumps(snapshot.places[stem])} if stem in snapshot.places else {}
                encoded[stem + TENSOR_SUFFIX] = encode_tensors(tensors, {**identity, **places})
            if self.group.rank.is_first:
                state = encode_json({"save": dict(identity), "facts": dict(snapshot.facts)})
                encoded[STATE_NAME] = (len(state), iter([memoryview(state)]))
            return sum(size_bytes for size_bytes, _ in encoded.values())

        sizes = self.group.run_on_all_ranks(lay_out)
        self.group.run_on_first_rank(lambda: self._durable_io.require_free(self.folder, sum(sizes)))
        self.group.run_on_first_rank(lambda: self._durable_io.make_dir(temp))
        create = self._durable_io.create
        written = self.group.run_on_all_ranks(
            lambda: {name: asdict(create(temp / name, chunks, size)) for name, (size, chunks) in encoded.items()}
        )
        manifest = Manifest(
            run_id=identity["run_id"],
            save_id=identity["save_id"],
            step=snapshot.step,
            best=best,
            world_size=self.group.rank.world,
            files={name: FileFacts(**facts) for files in written for name, facts in files.items()},
            versions=versions(),
            created=now_utc(),
        )
        self.group.run_on_all_ranks(lambda: verify_files(temp, manifest, self.group.rank))
        return manifest

    def _verify(self, path: Path) -> Manifest | None:
        """Return the manifest of a checkpoint, or None if it is not valid; each is hashed once per object."""
        if path not in self._verified:
            try:
                manifest = self._check(path)
                verify_files(path, manifest, Rank())
            except CheckpointError:
                return None
            self._verified[path] = manifest
        return self._verified[path]

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint or an unfinished folder; a failure is reported, and the next save tries again."""
        try:
            if _CHECKPOINT.fullmatch(path.name):
                # rename first, so that a crash cannot leave half a checkpoint under a checkpoint's name
                gone = path.with_name(f"{path.name.partition('.')[0]}.gone-{secrets.token_hex(4)}")
                self._durable_io.rename(path, gone)
                self._verified.pop(path, None)
                self._durable_io.remove_tree(gone)
            else:
                self._durable_io.remove_tree(path)
        except ResourceError as error:
            self._on_event("not removed", {"path": str(path), "why": str(error), "next": "retried at the next save"})

    def _folders(self) -> list[Path]:
        """List folders named like checkpoints, newest first; within a step, the replaced one comes last."""
        names = [matched for path in self.folder.glob("step-*") if (matched := _CHECKPOINT.fullmatch(path.name))]
        return [self.folder / name[0] for name in sorted(names, key=lambda name: (-int(name[1]), name[0]))]


def data_of(run_dir: Path) -> set[str]:
    """Return the fingerprints of the data sets that a run's checkpoints were trained and evaluated on.

    Damaged checkpoints are left out: resuming tells of them.
    """
    fingerprints = set[str]()
    for path in run_dir.glob(f"checkpoints/step-*/{STATE_NAME}"):
        with suppress(CheckpointError, KeyError, TypeError):
            recorded = read_json(path)["facts"]["fingerprints"]
            sets = [recorded["data"], recorded.get("eval_data")]
            flat = [facts for entry in sets for facts in (entry if isinstance(entry, list) else [entry]) if facts]
            fingerprints |= {str(facts["fingerprint"]) for facts in flat}
    return fingerprints


def rotation(manifests: Mapping[Path, Manifest | None], *, keep: int, saved: Path) -> list[Path]:
    """Return the checkpoints to remove, given the manifests of all of them, newest first (None: damaged).

    Kept are the `keep` newest valid ones, the newest valid one marked best, and `saved`. A damaged one does not count
    towards `keep`, and is removed only once there are `keep` newer valid ones.
    """
    steps: set[int] = set()
    has_best = False
    doomed: list[Path] = []
    for path, manifest in manifests.items():
        wanted = len(steps) < keep
        if manifest is not None and manifest.step in steps:
            wanted = False
        elif manifest is not None:
            wanted = wanted or (manifest.best and not has_best) or path == saved
            has_best = has_best or manifest.best
            steps.add(manifest.step)
        if not wanted:
            doomed.append(path)
    return doomed
