"""Checkpoints in an object store: sent while training continues, and found again once the run's disk is lost.

`files/HASH` is the content of a file. `step-N.TIME.json` names the files of a checkpoint, and those of the run's
figures, rounds and results at that time. It is written last: what no such manifest names does not count.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from io import SEEK_END, BufferedReader, BytesIO
from pathlib import Path
from threading import Lock, Thread
from typing import Annotated

import xxhash
from fsspec.spec import AbstractFileSystem
from pydantic import ConfigDict, Field, with_config

from flatout.checkpoint.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest, read_manifest
from flatout.checkpoint.write import rotation, saved_steps
from flatout.config.folders import mark_run, run_identity
from flatout.config.schema import Config
from flatout.errors import CheckpointError, DataError, Fix, ResourceError
from flatout.io.address import asked, open_store
from flatout.io.durable_io import DurableIO, FileFacts, digest
from flatout.io.json_file import open_plain, parse_json
from flatout.track.callback import Callback, Reporter
from flatout.track.record import RunStart

# seconds between lines on how far it is
SAY_S = 4.0
_ATTEMPTS, _NUM_DOWNLOADS, _CHUNK_BYTES = 5, 8, 8 << 20
_MANIFEST = re.compile(r"step-\d+\.\d+\.json")
_BESIDE = ("config.yaml", "metrics.jsonl", "answers.jsonl", "pictures.jsonl", "rollouts")
# sent with the last checkpoint alone: with an older one, the run would count as complete without what followed it
_RESULTS = ("final", "best")
_WHOLE = (".npy", ".safetensors")
# plain names, so that a manifest cannot point outside the run's folder, of kinds of files that do not run
_PATH = (
    r"^((config|metrics|answers|pictures)\.(yaml|jsonl)|(checkpoints|rollouts|final|best)(/\.?[A-Za-z0-9][\w.-]*)*"
    r"/[A-Za-z0-9][\w.-]*\.(safetensors|json|npy|journal|txt|model|jinja|md))$"
)


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class MirrorManifest(Manifest):
    """A checkpoint in a store; `files` are all files of the run then, by their paths in its folder."""

    files: Mapping[Annotated[str, Field(pattern=_PATH)], FileFacts]


class Mirror(Callback):
    """Sends a run's checkpoints to an object store, and gets them from there; used on the first rank only.

    One is sent at a time, in a thread; of those that are complete meanwhile, only the newest is sent next. Without an
    address in the settings, nothing is done. Events are mirror (how far it is), mirrored, not_mirrored and refused.
    """

    def __init__(self, config: Config) -> None:
        self._reporter = Reporter()
        self._address, self._folder, self._keep = config.checkpoint.mirror or "", config.folder, config.checkpoint.keep
        self._asked = partial(asked, self._address, self._address, log=self._say, attempts=_ATTEMPTS)
        # of what is there: sizes by name, the names of manifests, newest first, and those that can be read
        self._sizes: dict[str, int] = {}
        self._names: list[str] = []
        self._manifests: dict[str, MirrorManifest] = {}
        self._lock, self._num_bytes, self._why_missing = Lock(), 0, ""
        self._waiting: Path | None = None
        self._has_ended = False
        self._thread: Thread | None = None

    def open(self, reporter: Reporter) -> None:
        """Write to the store and list it, and take over its run where the folder has no checkpoint and no results.

        Raises UsageError if a package is missing, CheckpointError for a store with checkpoints of another run, and
        ResourceError if it cannot be used, which is only reported where the folder has a checkpoint.
        """
        if not self._address:
            return
        self._reporter = reporter
        reporter.phase("opening the mirror")
        is_new = not (saved_steps(self._folder / "checkpoints") or (self._folder / "final").exists())
        try:
            self._asked(what="write to", ask=lambda: self._files.pipe_file("probe.json", b"{}"))
            if (manifests := self.look()) and is_new:
                mark_run(self._folder, manifests[0].run_id)
        except (DataError, ResourceError) as error:
            if is_new:
                raise ResourceError(error.text) from error
            reporter.event("not_mirrored", {"why": f"{error.text}; training goes on from {self._folder}"})
        self._refuse_others(run_identity(self._folder))

    def look(self) -> list[MirrorManifest]:
        """List the store; return the manifests that can be read, newest first. Raises as `asked`."""
        listed = self._asked(what="list", ask=lambda: self._files.find("", detail=True))
        self._sizes = {name: facts["size"] for name, facts in listed.items()}
        names = filter(_MANIFEST.fullmatch, self._sizes)
        self._names = sorted(names, key=lambda name: [*map(int, re.findall(r"\d+", name))], reverse=True)
        for name in self._names:
            if name not in self._manifests:
                content = self._asked(what="read", ask=partial(self._files.cat_file, name))
                with suppress(CheckpointError, ValueError):  # `fetch` tells of it
                    self._manifests[name] = decode_manifest(parse_json(content), name, MirrorManifest)
        return [self._manifests[name] for name in self._names if name in self._manifests]

    def _refuse_others(self, run_id: str) -> None:
        if others := {self._manifests[name].run_id for name in self._names if name in self._manifests} - {run_id}:
            text = f"{self._address} holds checkpoints of run {min(others)}, but {self._folder} is run {run_id}"
            raise CheckpointError(text, [Fix({"checkpoint.mirror": f"{self._address}-2"}, "a place of its own")])

    def on_start(self, start: RunStart | None = None) -> None:
        """Send the newest checkpoint: an earlier process may have ended before it was sent."""
        for step in saved_steps(self._folder / "checkpoints")[-1:]:
            self.on_save(step, self._folder / f"checkpoints/step-{step}")

    def on_save(self, step: int, folder: Path) -> None:
        if not self._address:
            return
        with self._lock:
            self._waiting = folder
            if self._thread is None:
                self._thread = Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until all is sent, and say how far it is. Raises ResourceError if the newest checkpoint is not there."""
        self._has_ended = True
        self.on_start()
        while (thread := self._thread) is not None:
            thread.join(SAY_S)
            if thread.is_alive():
                self._say(f"sending to {self._address}: {self._num_bytes / 1e6:,.1f} MB so far")
        if self._why_missing:
            text = f"{self._folder} has its last checkpoint, but its mirror does not: {self._why_missing}"
            raise ResourceError(f"{text}; the same command sends it again")

    def _work(self) -> None:
        while True:
            with self._lock:
                folder, self._waiting = self._waiting, None
                if folder is None:
                    self._thread = None
                    return
            self._num_bytes, started = 0, time.monotonic()
            try:
                self._upload(folder)
                self._why_missing = ""
                took = {"mb": round(self._num_bytes / 1e6, 1), "seconds": round(time.monotonic() - started, 1)}
                self._reporter.post("mirrored", {"checkpoint": folder.name, **took})
            except Exception as error:  # noqa: BLE001  (a client may raise anything, and training goes on)
                self._why_missing = str(error)
                self._reporter.post("not_mirrored", {"checkpoint": folder.name, "why": str(error)})

    def _say(self, text: str) -> None:
        self._reporter.post("mirror", {"why": text})

    def _upload(self, folder: Path) -> None:
        """Send what is not there yet, then the manifest, and then remove what is old."""
        beside = _BESIDE + _RESULTS if self._has_ended else _BESIDE
        with ExitStack() as stack:
            checkpoint, files = read_manifest(folder), dict[str, FileFacts]()
            # open from now on, so that they can be read once rotation has removed them
            opened = {one: stack.enter_context(open_plain(folder / one)) for one in (*checkpoint.files, MANIFEST_NAME)}
            self.look()
            self._refuse_others(checkpoint.run_id)
            for name, file in opened.items():
                files[f"checkpoints/step-{checkpoint.step}/{name}"] = facts = self._send(file)
                if checkpoint.files.get(name, facts) != facts:
                    raise CheckpointError(f"{folder / name} was damaged on this disk")
        for path in (path for name in beside for path in (self._folder / name, *(self._folder / name).rglob("*"))):
            name = path.relative_to(self._folder).as_posix()
            if re.fullmatch(_PATH, name) and path.is_file():
                with suppress(FileNotFoundError), open_plain(path) as file:  # of a round that is removed now
                    files[name] = self._send(file if path.suffix in _WHOLE else BytesIO(file.read()))  # may grow
        manifest = MirrorManifest(**{**asdict(checkpoint), "files": files})
        name, content = f"step-{manifest.step}.{time.time_ns()}.json", encode_manifest(manifest)
        self._asked(what="write to", ask=partial(self._files.pipe_file, name, content))
        with suppress(DataError, ResourceError):  # its lines say why, and the next checkpoint tries again
            if manifest in self.look():
                self._remove_old()

    def _send(self, file: BufferedReader | BytesIO) -> FileFacts:
        """Send a file unless its content is there."""
        hasher = hashlib.file_digest(file, xxhash.xxh3_128)
        facts = FileFacts(file.seek(0, SEEK_END), hasher.hexdigest())
        name = f"files/{facts.xxh3}"

        def write() -> None:
            file.seek(0)
            with self._files.open(name, "wb") as target:
                for chunk in iter(partial(file.read, _CHUNK_BYTES), b""):
                    target.write(chunk)
                    self._num_bytes += len(chunk)

        if self._sizes.get(name) != facts.size_bytes:
            self._asked(what="write to", ask=write)
            self._sizes[name] = facts.size_bytes
        return facts

    def _remove_old(self) -> None:
        """Remove the checkpoints that rotation drops, and the files that no other one names."""
        manifests = {Path(name): self._manifests.get(name) for name in self._names}
        doomed = rotation(manifests, keep=self._keep, saved=Path(self._names[0]))
        kept = [one for path, one in manifests.items() if one and path not in doomed]
        used = {f"files/{facts.xxh3}" for one in kept for facts in one.files.values()}
        unused = [name for name in self._sizes if name.startswith("files/") and name not in used]
        for name in (*map(str, doomed), *unused):
            self._asked(what="remove from", ask=partial(self._files.rm_file, name))

    def fetch(self, steps: Iterator[int]) -> None:
        """Download the newest complete checkpoint if no valid one here is as new, and the best one before it.

        `steps` are of the valid ones, newest first. One with damaged or missing files is reported, and the one before
        it is taken. Raises CheckpointError if none is complete here or there, and ResourceError if the store fails.
        """
        is_newest, why, after = True, "", next(steps, -1) if self._names else -1
        for name in self._names:
            try:
                if (manifest := self._manifests.get(name)) is None:
                    raise CheckpointError("the manifest is damaged, or of another version of flatout")
                if manifest.step > after and (is_newest or manifest.best):
                    self._download(manifest, beside=is_newest)
                    is_newest = False
                    if manifest.best:
                        return
            except (CheckpointError, DataError) as error:
                why = f"{self._address}/{name}: {error.text}"
                self._reporter.event("refused", {"why": f"{why}; the one before it is tried"})
        if is_newest and why and after < 0:
            fix = Fix({"checkpoint.mirror": f"{self._address}-2"}, "start over")
            raise CheckpointError(f"no checkpoint in the mirror is complete; {why}", [fix])

    def _download(self, manifest: MirrorManifest, *, beside: bool) -> None:
        """Download a checkpoint, and what is `beside` it, to a folder; verify all, and move each to its place."""
        durable_io, checkpoint = DurableIO(), Path(f"checkpoints/step-{manifest.step}")
        files = {name: facts for name, facts in manifest.files.items() if beside or Path(name).parent == checkpoint}
        num_bytes = sum(facts.size_bytes for facts in files.values())
        target = self._folder / checkpoint
        temp = target.with_name(f"{target.name}.tmp-{manifest.save_id}")
        durable_io.require_free(self._folder, num_bytes)
        with ExitStack() as stack:
            stack.callback(durable_io.remove_tree, temp)
            pool = stack.enter_context(ThreadPoolExecutor(_NUM_DOWNLOADS))
            calls = [pool.submit(self._get, temp / name, facts) for name, facts in files.items()]
            self._say(f"downloading step {manifest.step} from {self._address}: {num_bytes / 1e6:,.1f} MB")
            while wait(calls, SAY_S).not_done:
                there = sum(path.stat().st_size for path in temp.rglob("*") if path.is_file())
                self._say(f"{there / 1e6:,.1f} of {num_bytes / 1e6:,.1f} MB are here")
            for call in calls:
                call.result(0)
            durable_io.sync_tree(temp)
            for path in map(Path, files):
                if path.parent != checkpoint:
                    durable_io.make_dir((self._folder / path).parent)
                    durable_io.rename(temp / path, self._folder / path)
            if target.exists():
                durable_io.rename(target, target.with_name(f"{target.name}.old-{manifest.save_id}"))
            durable_io.rename(temp / checkpoint, target)

    def _get(self, path: Path, facts: FileFacts) -> None:
        self._asked(what="read", ask=partial(self._files.get_file, f"files/{facts.xxh3}", str(path)))
        if digest(path) != facts:
            raise CheckpointError(f"{path.name} does not match its size and hash; it was damaged")

    @cached_property
    def _files(self) -> AbstractFileSystem:
        return open_store(self._address)
