"""Time and memory limits for chat templates, which are third-party programs."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NoReturn

from flatout.errors import DataError

MAX_SECONDS, MAX_BYTES = 20, 2 << 30
_LIMITS = threading.Lock()  # the limits apply to the process, not to a thread


@cache
def _statm(pid: int) -> int:
    """Open the file that says how much memory is mapped, once a process: this is done for every row."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


class TemplateLimitError(DataError):
    """A chat template took more time or memory than any row needs."""


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Limit the enclosed code to MAX_SECONDS of CPU time and MAX_BYTES of memory beyond what is mapped now.

    Raises TemplateLimitError, with a text that begins with `what`. Signals reach only the main thread; in other threads
    only the memory limit applies.
    """

    def stop(*_: object) -> NoReturn:
        raise TemplateLimitError(f"{what} took more than {MAX_SECONDS} s; it may loop forever; change the template")

    with _LIMITS:
        in_main_thread = threading.current_thread() is threading.main_thread()
        old = resource.getrlimit(resource.RLIMIT_AS)
        mapped_bytes = int(os.pread(_statm(os.getpid()), 64, 0).split()[0]) * resource.getpagesize()
        most = [limit for limit in (mapped_bytes + MAX_BYTES, *old) if limit != resource.RLIM_INFINITY]
        if in_main_thread:
            old_handler = signal.signal(signal.SIGVTALRM, stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (min(most), old[1]))
        try:
            yield
        except MemoryError:
            raise TemplateLimitError(
                f"{what} took more than {MAX_BYTES >> 30} GiB of memory; change the template, or look for a huge row"
            ) from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)
            if in_main_thread:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, old_handler)
