"""Append whole lines to a file during a run; when writing fails, lines are lost, but the run continues."""

from __future__ import annotations

import os
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.io.durable_io import DurableIO, is_same_file, open_own


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
        size_bytes, tail_bytes = os.fstat(fd).st_size, 1 << 20  # no line is longer
        # anything after the last newline was cut off by a crash
        tail = os.pread(fd, tail_bytes, max(0, size_bytes - tail_bytes))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(fd, size_bytes - len(tail) + tail.rfind(b"\n") + 1)
        return fd
