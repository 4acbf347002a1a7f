"""File locks (flock), which the kernel releases however the holder dies: one run per folder, one builder per store."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from flatout.errors import ResourceError
from flatout.io.bounded_wait import BoundedWait, to_stderr
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import now_utc, parse_json, validated
from flatout.io.own_files import is_same_file, open_own
from flatout.io.redact import cleaned

# a large data set takes hours to build, and others wait for it
LIMIT_S = 12 * 3600.0
# more than looking at a lock takes
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run folder: `pid` on `host` runs `flatout VERB`. `since` is UTC, ISO 8601.

    `pid` is 0 before it has written its name.
    """

    pid: int
    host: str
    since: str
    verb: str = "train"

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname()

    @property
    def has_exited(self) -> bool:
        """Whether the process is known to have ended; forked children inherit its lock and may still hold it."""
        import psutil  # lazy: few look at another's lock

        # a lock that names no single process says nothing of one
        return self.is_local and self.pid > 0 and not psutil.pid_exists(self.pid)

    @property
    def trains(self) -> bool:
        """Whether the folder is held for training, not by another verb or by a child that outlived its run."""
        return self.verb == "train" and not self.has_exited

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        exited = " (that process has exited, but one of its children still holds the lock)" if self.has_exited else ""
        return f"pid {self.pid} on {self.host} since {self.since} (`flatout {self.verb}`){exited}"


def open_lock(path: Path) -> int:
    """Open or create a lock file without locking it. Raises SecurityError for a link, and ResourceError."""
    with DurableIO().resource_errors("open", path):
        return open_own(path, os.O_RDWR)


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


def share_lock(fd: int) -> None:
    """Lock an open file beside others that share it, so that nobody takes it until this process ends."""
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


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


_UNNAMED = Holder(0, "", "")


class RunLock:
    """Hold a run folder for `flatout VERB`: `with RunLock(run_dir):`. A missing folder is created.

    The file's content only shows who holds it. Entering raises ResourceError when another process holds the lock or
    the folder is not writable; other verbs than train are also refused while the launcher of a run restarts its ranks.
    """

    def __init__(self, run_dir: Path, verb: str = "train", *, durable_io: DurableIO | None = None) -> None:
        self._run_dir, self._path, self._verb = run_dir, run_dir / ".lock", verb
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
                raise self._refusal(_read_holder(fd))
            # from here on it does not name an earlier holder
            os.ftruncate(fd, 0)
            is_launched, launcher = _look(launcher_folder(self._run_dir))
            if is_launched and self._verb != "train":
                raise self._refusal(launcher)
            holder = asdict(Holder(os.getpid(), socket.gethostname(), now_utc(), self._verb))
            probe = self._run_dir / ".write-probe"
            self._durable_io.remove_tree(probe)
            content = memoryview(json.dumps(holder).encode())
            # find a full or read-only disk now, rather than at the first save, when steps would be lost
            self._durable_io.create(probe, [content], len(content))
            self._durable_io.remove_tree(probe)
            os.pwrite(fd, content, 0)
        except ResourceError:
            os.close(fd)
            raise
        self._fd = fd
        return self

    def _refusal(self, holder: Holder | None) -> ResourceError:
        who = holder or _UNNAMED
        return ResourceError(f"{self._run_dir} is locked by {who}; wait for it, stop it, or choose a different run_dir")

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
            raise ResourceError(f"{self._run_dir} was deleted during this run, and now {error.text}") from error

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            # the file is not removed, or two runs could lock two different files of the same name
            os.close(self._fd)
            self._fd = None


def launcher_folder(run_dir: Path) -> Path:
    """Return the folder that the launcher of a run holds (RunLock) until the last restart of its ranks is over."""
    return run_dir / "logs"


def holder_of(run_dir: Path) -> Holder | None:
    """Return who launched a run or holds its folder; None if no process does. A run that starts now is not refused."""
    for folder in (launcher_folder(run_dir), run_dir):
        is_held, holder = _look(folder)
        if is_held:
            return holder or _UNNAMED
    return None


def last_holder_of(run_dir: Path) -> Holder | None:
    """Return who held a run folder last, or still does; None if its lock names nobody."""
    return _look(run_dir)[1]


def _look(folder: Path) -> tuple[bool, Holder | None]:
    """Return whether a folder is held, and who holds it or held it last."""
    try:
        fd = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False, None
    try:
        # shared, so that two readers do not take each other for a run
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, _read_holder(fd)
    except OSError:
        return False, None  # a file system without locks, on which no run starts
    else:
        return False, _read_holder(fd)
    finally:
        os.close(fd)


def _read_holder(fd: int) -> Holder | None:
    """Return who is named in an open lock; None if it took the lock just now and has not written its name yet."""
    with suppress(OSError, ValueError, ResourceError):
        return validated(Holder, cleaned(parse_json(os.pread(fd, 4096, 0))), "", ResourceError)
    return None
