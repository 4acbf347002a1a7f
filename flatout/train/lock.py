"""One run a folder: a lock that dies with its holder, and the proof that the folder can be written."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from flatout.errors import ResourceError
from flatout.train.manifest import now_utc
from flatout.train.storage import Storage

LOCK_NAME = ".lock"
PROBE_NAME = ".write-probe"
MAX_HOLDER_BYTES = 4096


class RunLock:
    """Hold a run folder: `with RunLock(run_dir):`.

    Makes the folder when it is missing. The lock is flock's, so the kernel frees it when the holder dies, however it
    dies; what stands in the file only tells people who has it. Raises ResourceError, on entering, when another process
    holds it or when the folder cannot be written.
    """

    def __init__(self, run_dir: Path, *, storage: Storage | None = None) -> None:
        self._run_dir = run_dir
        self._path = run_dir / LOCK_NAME
        self._storage = storage or Storage()
        self._fd: int | None = None

    def __enter__(self) -> Self:
        self._storage.make_dir(self._run_dir)
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(
                f"cannot open {self._path}: {error.strerror}; make the folder writable, or choose another run_dir"
            ) from error
        try:
            self._take(fd)
        except ResourceError:
            os.close(fd)
            raise
        self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            # the file stays: removing it would let two runs lock two different files of one name
            os.close(self._fd)
            self._fd = None

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceError(
                f"{self._run_dir} is locked by {_holder(fd)}; wait for that run, stop it, or choose another run_dir"
            ) from error
        except OSError as error:
            raise ResourceError(
                f"cannot lock {self._path}: {error.strerror}; choose a run_dir on a disk that has file locks"
            ) from error
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now_utc()}
        probe = self._run_dir / PROBE_NAME
        self._storage.remove_tree(probe)
        content = memoryview(json.dumps(holder).encode())
        # found now, a full or read-only disk costs nothing; found at the first save, it costs the steps until then
        self._storage.create(probe, [content], len(content))
        self._storage.remove_tree(probe)
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)


def _holder(fd: int) -> str:
    """Who holds the lock, as far as the file tells."""
    try:
        holder = json.loads(os.pread(fd, MAX_HOLDER_BYTES, 0))
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
    except (ValueError, KeyError, TypeError):
        return "another process"  # it took the lock this very moment and has not signed yet
    text = f"pid {pid} on {host} since {since}"
    # flock passes to forked children, so a child may outlive the run that is named
    gone = host == socket.gethostname() and not _is_alive(pid)
    return f"{text} (that process is gone, but a child of it still holds the lock)" if gone else text


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it runs under another user
    return True
