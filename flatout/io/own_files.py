"""Files of flatout's own that stay open: lines that are appended during a run, and the output of a child process."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.errors import FlatoutError, SecurityError
from flatout.io.durable_io import DurableIO

BLOCK_BYTES = 1 << 20


def open_own(path: Path, flags: int) -> int:
    """Open or create a file of flatout's own. Raises OSError, and SecurityError for a link, a pipe or a device."""
    try:
        # O_NONBLOCK: a pipe that nobody reads would block
        fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SecurityError(
                f"{path} is a symbolic link; flatout does not write through links: remove it"
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SecurityError(f"{path} is not a regular file; remove it")
    return fd


def is_same_file(fd: int, path: Path) -> bool:
    """Return whether `path` still refers to the open file, so it was not deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


class AppendFile:
    """A file of lines. `trouble` is the reason why the last line was lost; None once a line was written.

    If the file or folder is deleted during the run, it is created again. A line that a crash cut off is removed on
    opening. Raises SecurityError if the file is a link, and ResourceError if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.trouble: str | None = None
        with DurableIO().resource_errors("open", path):
            self._fd: int | None = self._open()

    def write(self, line: str) -> None:
        """Append a line, unbuffered, so that readers see it and it survives a killed run; never raises OSError."""
        content = (line + "\n").encode(errors="replace")
        try:
            if self._fd is None or not is_same_file(self._fd, self._path):
                self.close()
                DurableIO().make_dir(self._path.parent)
                self._fd = self._open()
            size_bytes = os.fstat(self._fd).st_size
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                os.ftruncate(self._fd, size_bytes)  # leave no partial line
                raise
        except (OSError, FlatoutError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self.trouble = f"{self._path}: {reason or error}"
        else:
            self.trouble = None

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        fd = open_own(self._path, os.O_RDWR | os.O_APPEND)
        # anything after the last newline was cut off by a crash
        end = size_bytes = os.fstat(fd).st_size
        while end:
            start = max(0, end - BLOCK_BYTES)
            if (last := os.pread(fd, end - start, start).rfind(b"\n")) >= 0:
                end = start + last + 1
                break
            end = start
        if end < size_bytes:
            os.ftruncate(fd, end)
        return fd


def start_python(words: Sequence[str], log: Path, *, append: bool = True, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python WORDS` in a session of its own, which no Ctrl-C in this terminal reaches, with its output in `log`.

    `options` are of Popen. Raises OSError, and SecurityError for a log that is a link.
    """
    output = open_own(log, os.O_WRONLY | (os.O_APPEND if append else os.O_TRUNC))
    try:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
    finally:
        os.close(output)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of `start_python` and what it has started, which is in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
