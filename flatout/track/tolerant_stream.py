"""Standard output and error that ignore write errors: a closed pipe or a full disk must not end a run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast


class TolerantStream:
    """A stream whose writes never fail; what cannot be written is lost.

    Once its reader is gone, `is_unread` is True and its descriptor points to /dev/null, so that neither C code nor the
    interpreter's exit fails on it. A character that the encoding lacks becomes a question mark.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_unread = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what the stream's encoding has, with ? for the rest; nothing once its reader is gone."""
        if not self.is_unread:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self.write(text.encode(error.encoding, errors="replace").decode(error.encoding))
            except (OSError, ValueError) as error:
                self._handle(error)
        return len(text)

    def flush(self, *, is_last: bool = False) -> None:
        """Flush. After the last one, drop what cannot be written: the interpreter's exit would fail on it."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._handle(error, is_last=is_last)

    def _handle(self, error: OSError | ValueError, *, is_last: bool = False) -> None:
        # other errors may pass: a full disk can have space again
        if not isinstance(error, OSError) or error.errno in (errno.EPIPE, errno.EBADF, errno.ECONNRESET):
            self.is_unread = True
        if self.is_unread or is_last:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` with `TolerantStream`s.

    Closed descriptors are opened first; otherwise the next file that the program opens would get what is printed.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python has no stream for a closed descriptor
    outputs = [
        TolerantStream(stream or os.fdopen(fd, "w", closefd=False)) for fd, stream in ((1, sys.stdout), (2, sys.stderr))
    ]
    with redirect_stdout(cast(TextIO, outputs[0])), redirect_stderr(cast(TextIO, outputs[1])):
        try:
            yield
        finally:
            for output in outputs:
                output.flush(is_last=True)
