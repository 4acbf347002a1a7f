"""File locks (flock), which the kernel releases however the holder dies: one run per folder, one builder per store."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from flatout.errors import ResourceError
from flatout.io.bounded_wait import BoundedWait, to_stderr
from flatout.io.durable_io import DurableIO, is_same_file, open_own
from flatout.io.json_file import now_utc

# a large data set takes hours to build, and others wait for it
LIMIT_S = 12 * 3600.0
# more than looking at a lock takes
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run folder; `pid` is 0 before it has written its name. `since` is UTC, ISO 8601."""

    pid: int
    host: str
    since: str

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname()


def open_lock(path: Path) -> int:
    """Open or create a lock file without locking it. Raises SecurityError for a link, and ResourceError."""
    try:
        return open_own(path, os.O_RDWR)
    except OSError as error:
        raise ResourceError(
            f"cannot open {path}: {error.strerror}; make the folder writable, or choose a different one"
        ) from error


def take_lock(fd: int, path: Path) -> bool:
    """Lock an open file for this process and its children; return False if another has it. Raises ResourceError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ResourceError(
            f"cannot lock {path}: {error.strerror}; choose a folder on a file system that supports locks"
        ) from error
    return True


@contextmanager
def locked(path: Path, what: str, log: Callable[[str], None] = to_stderr, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Hold the lock file `path`; wait while another process has it, and `log` once that `what` is awaited.

    A missing folder is created. The file is never removed, or two processes could lock two files of the same name.
    Raises ResourceError after `limit_s`.
    """
    DurableIO().make_dir(path.parent)
    fd = open_lock(path)
    try:
        wait = BoundedWait(limit_s, f"lock {path}", log, ResourceError)
        while not take_lock(fd, path):
            wait.pause(what)
        yield
    finally:
        os.close(fd)


class RunLock:
    """Hold a run folder: `with RunLock(run_dir):`. A missing folder is created.

    The file's content only shows who holds it. Entering raises ResourceError when another process holds the lock or
    the folder is not writable.
    """

    def __init__(self, run_dir: Path, *, durable_io: DurableIO | None = None) -> None:
        self._run_dir, self._path = run_dir, run_dir / ".lock"
        self._durable_io = durable_io or DurableIO()
        self._fd: int | None = None

    def __enter__(self) -> Self:
        self._durable_io.make_dir(self._run_dir)
        fd = open_lock(self._path)
        try:
            is_ours = take_lock(fd, self._path)
            if not is_ours:
                # `holder_of` of another process has it for a moment
                time.sleep(_LOOK_S)
                is_ours = take_lock(fd, self._path)
            if not is_ours:
                raise ResourceError(
                    f"{self._run_dir} is locked by {_describe_holder(fd)}; wait for it, stop it, "
                    "or choose a different run_dir"
                )
            holder = asdict(Holder(os.getpid(), socket.gethostname(), now_utc()))
            probe = self._run_dir / ".write-probe"
            self._durable_io.remove_tree(probe)
            content = memoryview(json.dumps(holder).encode())
            # find a full or read-only disk now, rather than at the first save, when steps would be lost
            self._durable_io.create(probe, [content], len(content))
            self._durable_io.remove_tree(probe)
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
        except ResourceError:
            os.close(fd)
            raise
        self._fd = fd
        return self

    def keep(self) -> None:
        """Make sure that the folder is still locked: if it was deleted or replaced, create and lock it again.

        Raises ResourceError when another run has locked it in the meantime; this one must then stop writing there.
        """
        if self._fd is None or is_same_file(self._fd, self._path):
            return
        self.__exit__()
        try:
            self.__enter__()
        except ResourceError as error:
            raise ResourceError(f"{self._run_dir} was deleted during this run, and now {error}") from error

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            # the file is not removed, or two runs could lock two different files of the same name
            os.close(self._fd)
            self._fd = None


def holder_of(run_dir: Path) -> Holder | None:
    """Return who holds a run folder; None if no process does. A run that starts at this moment is not refused."""
    try:
        fd = os.open(run_dir / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # shared, so that two readers do not take each other for a run
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(fd) or Holder(0, "", "")
    except OSError:
        return None  # a file system without locks, on which no run starts
    finally:
        os.close(fd)
    return None


def _read_holder(fd: int) -> Holder | None:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        return Holder(int(found["pid"]), str(found["host"]), str(found["since"]))
    except (ValueError, KeyError, TypeError):
        return None  # it took the lock just now and has not written its name yet


def _describe_holder(fd: int) -> str:
    """Describe who holds the lock, according to the file."""
    holder = _read_holder(fd)
    if holder is None:
        return "another process"
    text = f"pid {holder.pid} on {holder.host} since {holder.since}"
    if holder.is_local:
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            # forked children inherit the lock, so a child may hold it after the run has ended
            return f"{text} (that process has exited, but one of its children still holds the lock)"
        except PermissionError:
            pass  # the process belongs to another user
    return text
