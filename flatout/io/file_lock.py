"""File locks (flock) that the kernel releases when the holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flatout.errors import ResourceError
from flatout.io.bounded_wait import BoundedWait, to_stderr
from flatout.io.durable_io import DurableIO, open_own

# a large data set takes hours to build, and others wait for it
LIMIT_S = 12 * 3600.0
POLL_S = 0.1


def open_lock(path: Path) -> int:
    """Open or create a lock file without locking it. Raises SecurityError for a link, and ResourceError."""
    try:
        return open_own(path, os.O_RDWR)
    except OSError as error:
        raise ResourceError(
            f"cannot open {path}: {error.strerror}; make the folder writable, or choose another one"
        ) from error


def take_lock(fd: int, path: Path) -> bool:
    """Lock an open file for this process and its children; return False if another has it. Raises ResourceError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ResourceError(
            f"cannot lock {path}: {error.strerror}; choose a folder on a disk that has file locks"
        ) from error
    return True


@contextmanager
def locked(
    path: Path, what: str, notify: Callable[[str], None] = to_stderr, limit_s: float = LIMIT_S
) -> Iterator[None]:
    """Hold the lock file `path`; wait while another process has it, and notify once that `what` is awaited.

    A missing folder is created. The file is never removed, or two processes could lock two files of the same name.
    Raises ResourceError after `limit_s`.
    """
    DurableIO().make_dir(path.parent)
    fd = open_lock(path)
    try:
        wait = BoundedWait(limit_s, f"lock {path}", notify, ResourceError)
        while not take_lock(fd, path):
            wait.check(what)
            time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)
