"""Writes that survive a crash: write, fsync, rename, fsync the folder; each returns the file's size and hash.

All files that must survive a crash go through this module. Links are not followed; modes follow the user's umask.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import xxhash
from pydantic import ConfigDict, Field, with_config

from flatout.errors import FlatoutError, ResourceError, SecurityError
from flatout.io.json_file import encode_json, open_plain


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's size and its xxh3_128 hash (32 hex digits)."""

    size_bytes: Annotated[int, Field(ge=0)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def digest(path: Path) -> FileFacts:
    """Return the size and xxh3_128 hash of a file. Raises OSError."""
    with open_plain(path) as file:
        hasher = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileFacts(file.tell(), hasher.hexdigest())


# as `DurableIO.write_bytes` names them
UNFINISHED = re.compile(r"\.\w[\w.-]*\.(json|yaml)\.tmp-[0-9a-f]{8}")


class Disk:
    """The single disk operations, which follow no link; tests count them, or make the k-th fail or crash."""

    mkdir: Callable[[Path], None] = staticmethod(os.mkdir)
    write: Callable[[int, memoryview], int] = staticmethod(os.write)
    sync: Callable[[int], None] = staticmethod(os.fsync)
    close: Callable[[int], None] = staticmethod(os.close)
    rename: Callable[[Path, Path], None] = staticmethod(os.rename)
    unlink: Callable[[Path], None] = staticmethod(os.unlink)
    rmdir: Callable[[Path], None] = staticmethod(os.rmdir)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: Path) -> int:
        """Open an existing file for fsync, writable because some file systems require that."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes of the disk that holds `path`, which need not exist yet."""
        return shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists())).free


class DurableIO:
    """Durable writes. Every method raises ResourceError with the path when the disk is full or an operation fails."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()

    def write_bytes(self, path: Path, content: bytes) -> FileFacts:
        """Write `content` to `path` atomically: a crash leaves the old or the new file. A link is replaced."""
        temp = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        facts = self.create(temp, [memoryview(content)], len(content))
        try:
            self.rename(temp, path)
        except ResourceError:
            with suppress(OSError):  # the first failure is the one to report; after the rename `temp` is gone
                self._disk.unlink(temp)
            raise
        return facts

    def write_json(self, path: Path, value: Any) -> FileFacts:
        """Write a JSON value to `path` atomically. Raises ValueError for NaN and infinity."""
        return self.write_bytes(path, encode_json(value))

    def create(self, path: Path, chunks: Iterable[memoryview], size_bytes: int) -> FileFacts:
        """Write and fsync a new file, in a folder that the caller then renames; after a failure it is removed."""
        with self.resource_errors("write", path, size_bytes):
            fd = self._disk.create(path)
            hasher, num_bytes = xxhash.xxh3_128(), 0
            try:
                try:
                    for chunk in chunks:
                        hasher.update(chunk)
                        num_bytes += len(chunk)
                        rest = chunk
                        while rest:  # os.write may write only a part
                            rest = rest[self._disk.write(fd, rest) :]
                    self._disk.sync(fd)
                finally:
                    self._disk.close(fd)
            except OSError:
                with suppress(OSError):  # as above
                    self._disk.unlink(path)
                raise
        if num_bytes != size_bytes:
            raise ValueError(f"{path}: wrote {num_bytes} bytes, expected {size_bytes}")
        return FileFacts(num_bytes, hasher.hexdigest())

    def open_new(self, path: Path, *, goes_on: bool = False) -> BinaryIO:
        """Open a new file, or with `goes_on` one that an earlier call began; no link is followed.

        Wrap writing and closing in `resource_errors`, then call `sync_tree` on its folder.
        """
        with self.resource_errors("create", path):
            return os.fdopen((self._disk.open if goes_on else self._disk.create)(path), "r+b")

    def sync_tree(self, folder: Path) -> list[str]:
        """Fsync a folder and everything in it; return the relative names of its files.

        Files get the modes that the umask gives to new ones, which the folder's own shows: libraries write weights
        that only their user can read. Raises SecurityError for anything but plain files and folders, such as a link.
        """
        files: list[str] = []
        with self.resource_errors("sync", folder):
            mode = folder.stat().st_mode & 0o666
            for parent, folders, names in os.walk(folder, topdown=False):
                for name in sorted(names + [name for name in folders if Path(parent, name).is_symlink()]):
                    path = Path(parent, name)
                    if not stat.S_ISREG(path.lstat().st_mode):
                        raise SecurityError(f"{path}: found a link or a special file, expected a regular file")
                    fd = self._disk.open(path)
                    try:
                        os.fchmod(fd, mode | os.fstat(fd).st_mode & 0o111)
                        self._disk.sync(fd)
                    finally:
                        self._disk.close(fd)
                    files.append(str(path.relative_to(folder)))
                self._disk.sync_dir(Path(parent))
        return files

    def make_dir(self, path: Path) -> None:
        """Create a folder and its missing parents durably; an existing folder is left unchanged."""
        with self.resource_errors("create the folder", path):
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            for folder in reversed(missing):
                with suppress(FileExistsError):  # another process made it first
                    self._disk.mkdir(folder)
                self._disk.sync_dir(folder.parent)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one folder, durably. An existing file is replaced; an existing folder is an error."""
        with self.resource_errors("rename to", target):
            self._disk.rename(source, target)
            self._disk.sync_dir(target.parent)

    @contextmanager
    def replace_dir(self, folder: Path, *, aside: Path | None = None) -> Iterator[Path]:
        """Yield an empty folder beside `folder`, to fill; it is synced and becomes `folder`, and the old one `aside`.

        This takes two renames: after a crash between them, there is nothing at `folder`. Without `aside`, the old one
        must be empty or missing. If the body raises, the new folder is removed; one that a crash left behind is removed
        at the start.
        """
        new = folder.with_name(f".{folder.name}.tmp")
        self.remove_tree(new)
        self.make_dir(new)
        try:
            yield new
            self.sync_tree(new)
        except BaseException:
            with suppress(ResourceError):  # the first failure is the one to report
                self.remove_tree(new)
            raise
        if aside is not None and folder.exists():
            self.rename(folder, aside)
        self.rename(new, folder)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, a link (not its target) or a folder with its content; a missing path is not an error."""
        with self.resource_errors("remove", path):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for child in sorted(path.iterdir()):
                self._remove(child)
            self._disk.rmdir(path)
        elif path.exists() or path.is_symlink():
            self._disk.unlink(path)

    def require_free(self, folder: Path, needed_bytes: int) -> None:
        """Raise ResourceError, with needed and free bytes, if the folder's disk lacks space for `needed_bytes`."""
        with self.resource_errors("access", folder, needed_bytes):
            if self._disk.free_bytes(folder) < needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def resource_errors(self, verb: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
        """Turn an error of the disk into a ResourceError that says what could not be done to `path`, and why."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = f"{self._disk.free_bytes(path):,}"
                if not needed_bytes:
                    why = f"cannot {verb} {path}, {free} bytes are free on its disk; free some space"
                    raise ResourceError(f"disk or quota full: {why}") from error
                raise ResourceError(
                    f"disk or quota full: {path} needs {needed_bytes:,} bytes, {free} are free on its disk; free some "
                    "space or lower checkpoint.keep; older checkpoints are intact"
                ) from error
            too_large = error.errno == errno.EFBIG
            remedy = "raise the limit (ulimit -f)" if too_large else "check that the folder is writable"
            raise ResourceError(f"cannot {verb} {path}: {error.strerror or error}; {remedy}") from error
        except Exception as error:
            # libraries written in Rust raise their own errors for a full disk
            is_of_rust = type(error).__name__ == "SafetensorError" or "(os error " in str(error)
            if isinstance(error, FlatoutError) or not is_of_rust:
                raise
            remedy = "free some space, and run the same command again, or choose a different folder"
            raise ResourceError(f"cannot {verb} {path}: {error}; {remedy}") from error


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of files that they were writing in `folder`, which nobody else writes now."""
    for path in folder.glob(".*.tmp-*") if folder.is_dir() else ():
        if UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                path.unlink()
