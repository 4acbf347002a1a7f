"""A stop signal as a flag that the training loop reads."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from flatout.errors import PreemptedError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """SIGTERM, SIGHUP or Ctrl-C as a flag: `with StopRequest() as stop: ... if stop.requested: save and leave`.

    The first signal sets the flag, which the loop reads between micro-batches. A second one raises KeyboardInterrupt
    immediately; a save in progress then leaves only temporary files, never a partial checkpoint. A launcher and a
    terminal often both forward one Ctrl-C, so signals within `settle_s` seconds of the first count as one request.
    Enter it in the main thread. Ignored signals stay ignored (SIGHUP under nohup). The previous handlers are restored
    on exit, except after a SIGTERM or SIGHUP that ended in a PreemptedError: further ones are then ignored, because
    the process is exiting, and a launcher that signals again (torch's does when another node leaves) would turn
    "stopped and saved" into "killed".
    """

    def __init__(self, *, settle_s: float = 0.5) -> None:
        self._settle_s = settle_s
        self._first_signal: int | None = None
        self._first_time_s = 0.0
        self._found: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._first_signal is not None

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._found[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first_signal in (signal.SIGTERM, signal.SIGHUP) and isinstance(error, PreemptedError):
            # not SIG_IGN, which child processes would inherit
            self._found |= dict.fromkeys(self._found.keys() - {signal.SIGINT}, lambda number, frame: None)
        for number, handler in self._found.items():
            signal.signal(number, handler)
        self._found.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first_signal is None:
            self._first_signal, self._first_time_s = number, time.monotonic()
        elif time.monotonic() - self._first_time_s >= self._settle_s:
            raise KeyboardInterrupt
