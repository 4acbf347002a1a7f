"""The only door for writes that must survive a crash: write, fsync, rename, fsync the folder; hashed on the way."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import ConfigDict, Field, with_config

from flatout.errors import CheckpointError, ResourceError
from flatout.train.tensor_file import CHUNK_BYTES

MAX_JSON_BYTES = 64 * 2**20


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file must be: its size and its xxh3_128 hash (32 hex digits)."""

    size_bytes: Annotated[int, Field(ge=0)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Disk:
    """Single effects on the disk, one method each: a test passes its own to count them, or to fail or die at the k-th.

    Files are made 0600 and folders 0700: weights and logs are nobody else's business on a shared host.
    """

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, content: memoryview) -> int:
        return os.write(fd, content)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


class Storage:
    """Durable writes. Every method raises ResourceError, naming the path, when the disk is full or refuses."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()

    def write_bytes(self, path: Path, content: bytes) -> FileFacts:
        """Put `content` at `path` whole or not at all: after a crash either the old or the new file is there."""
        return self._replace(path, [memoryview(content)], len(content))

    def write_json(self, path: Path, value: Any) -> FileFacts:
        """Put a JSON value at `path` whole or not at all. Raises ValueError for NaN and infinity."""
        return self.write_bytes(path, encode_json(value))

    def create(self, path: Path, chunks: Iterable[memoryview], size_bytes: int) -> FileFacts:
        """Write a new file and fsync it; the caller makes it visible by renaming its folder. A partial is removed."""
        with self._told("write", path, size_bytes):
            fd = self._disk.create(path)
            try:
                try:
                    facts = self._fill(fd, chunks)
                finally:
                    self._disk.close(fd)
            except OSError:
                with suppress(OSError):  # the first failure is the one to tell
                    self._disk.unlink(path)
                raise
        if facts.size_bytes != size_bytes:
            raise ValueError(f"{path}: {facts.size_bytes} bytes written, {size_bytes} announced")
        return facts

    def _fill(self, fd: int, chunks: Iterable[memoryview]) -> FileFacts:
        hasher = xxhash.xxh3_128()
        size_bytes = 0
        for chunk in chunks:
            hasher.update(chunk)
            size_bytes += len(chunk)
            rest = chunk
            while rest:  # a write may take less than it was given
                rest = rest[self._disk.write(fd, rest) :]
        self._disk.sync(fd)
        return FileFacts(size_bytes, hasher.hexdigest())

    def _replace(self, path: Path, chunks: Iterable[memoryview], size_bytes: int) -> FileFacts:
        temp = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        facts = self.create(temp, chunks, size_bytes)
        try:
            self.rename(temp, path)
        except ResourceError:
            with suppress(OSError):  # as above; after the rename itself there is no temp left
                self._disk.unlink(temp)
            raise
        return facts

    def make_dir(self, path: Path) -> None:
        """Make a folder and its missing parents, durably; an existing folder is left as it is."""
        with self._told("make the folder", path):
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            for folder in reversed(missing):
                self._disk.mkdir(folder)
                self._disk.sync_dir(folder.parent)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one folder, durably. An existing file is replaced; an existing folder is an error."""
        with self._told("rename to", target):
            self._disk.rename(source, target)
            self._disk.sync_dir(target.parent)

    def fsync_dir(self, path: Path) -> None:
        """Make the names inside a folder durable."""
        with self._told("sync", path):
            self._disk.sync_dir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, a link (not its target) or a folder with all that is in it; nothing there is no error."""
        with self._told("remove", path):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for child in sorted(path.iterdir()):
                self._remove(child)
            self._disk.rmdir(path)
        elif path.exists() or path.is_symlink():
            self._disk.unlink(path)

    def require_free(self, folder: Path, needed_bytes: int) -> None:
        """Raise ResourceError, with needed and free bytes, unless the folder's disk has room for `needed_bytes`."""
        with self._told("look at", folder):
            free_bytes = self._disk.free_bytes(folder)
        if free_bytes < needed_bytes:
            raise ResourceError(_disk_full(folder, needed_bytes, free_bytes))

    @contextmanager
    def _told(self, verb: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free_bytes = self._disk.free_bytes(_existing(path))
                raise ResourceError(_disk_full(path, needed_bytes, free_bytes)) from error
            reason = error.strerror or str(error)
            raise ResourceError(f"cannot {verb} {path}: {reason}; check that the folder is writable") from error


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _disk_full(path: Path, needed_bytes: int, free_bytes: int) -> str:
    return (
        f"disk or quota full: {path} needs {needed_bytes:,} bytes, {free_bytes:,} are free on its disk; "
        "free some space or lower checkpoint.keep; older checkpoints are untouched"
    )


def encode_json(value: Any) -> bytes:
    """Render a JSON value as indented UTF-8 with a last newline. Raises ValueError for NaN and infinity."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read a JSON file of at most 64 MiB. Raises CheckpointError, naming the file and what is wrong with it."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size_bytes:,} bytes of JSON is over the limit of {MAX_JSON_BYTES:,}")
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error


def digest(path: Path) -> FileFacts:
    """Size and xxh3_128 hash of a file, read in pieces of 8 MiB. Raises OSError."""
    hasher = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            hasher.update(piece)
            size_bytes += len(piece)
    return FileFacts(size_bytes, hasher.hexdigest())
