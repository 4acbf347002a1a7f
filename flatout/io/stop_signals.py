"""Stop signals: the first one asks for an orderly stop, a second one ends at once."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from threading import Thread, current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any, Self

# shells report a process that signal N ended as 128 + N
SIGNAL_EXIT_CODE = 128
# SIGUSR1 is what people ask Slurm for: `--signal=USR1@300`, `scancel -s USR1`
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# a thread that ends while Python exits may be the last that holds a tensor: C++ then aborts the process. So a block
# waits for the end of its thread, but not for one that hangs.
JOIN_S = 5.0


class StopSignals:
    """Handles SIGTERM, SIGINT, SIGHUP and SIGUSR1 inside a `with` block: calls `on_first` once, then `on_second`.

    `number` is the first signal. A launcher and a terminal often both forward one Ctrl-C, so signals within `settle_s`
    seconds of the first count as one. Ignored signals stay ignored (SIGHUP under nohup), and so does a handler that a
    program has for SIGUSR1. The previous handlers are restored on exit. In any thread but the main one, where Python
    allows no handlers, signals stay as they are.
    """

    def __init__(
        self, on_second: Callable[[], None], *, on_first: Callable[[], None] = lambda: None, settle_s: float = 0.5
    ) -> None:
        self._on_first, self._on_second, self._settle_s = on_first, on_second, settle_s
        self.number: int | None = None
        self._first_time_s = 0.0
        self._found: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS if current_thread() is main_thread() else ():
            before = signal.getsignal(number)
            if before != signal.SIG_IGN and (number != signal.SIGUSR1 or before == signal.SIG_DFL):
                self._found[number] = signal.signal(number, self._handle)
        return self

    @property
    def numbers(self) -> Collection[int]:
        """The signals that this object handles now."""
        return self._found.keys()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._found.items():
            signal.signal(number, handler)
        self._found.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.number is None:
            self.number, self._first_time_s = number, now_s
            self._on_first()
        elif now_s - self._first_time_s >= self._settle_s:
            self._on_second()


@contextmanager
def announcing_stop(announce: Callable[[], None], numbers: Collection[int]) -> Iterator[None]:
    """Call `announce` in a thread as soon as the first of these signals arrives in the block; handlers do not change.

    Python runs handlers between two instructions of the main thread, and one backward pass can take minutes. What the
    program itself wakes up by signals still does. Nothing is called in any thread but the main one.
    """
    if current_thread() is not main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def follow() -> None:
        is_announced = False
        while received := os.read(reader, 64):
            if before != -1:
                with suppress(OSError):
                    os.write(before, received)
            if not is_announced and not {*numbers}.isdisjoint(received):
                is_announced = True
                announce()
        os.close(reader)

    thread = Thread(target=follow, name="stop-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        # the thread reads the end of the pipe, and ends, unless a forked process has the pipe, too
        os.close(writer)
        thread.join(JOIN_S)


def end_threads_at_exit() -> Callable[[int], None]:
    """Return what to call with the exit code: the process then ends without threads that Python would leave to C++.

    A daemon thread that comes back from torch while Python exits is ended in the middle of C++, which aborts the
    process. Call it before other exit handlers are registered, as they run in reverse order.
    """
    codes: list[int] = []

    def end() -> None:
        if codes and threading.active_count() > 1:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(codes[0])

    atexit.register(end)
    return codes.append
