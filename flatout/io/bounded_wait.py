"""Bounded waits: after ten seconds a line says what is awaited, and a setting limits the time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from flatout.errors import FlatoutError, PeerLostError

NOTICE_AFTER_S = 10.0
POLL_S = 0.1


def to_stderr(line: str) -> None:
    """Write a line to stderr and flush it."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class BoundedWait:
    """A wait that starts now and ends after `limit_s`, the value of `setting`; `log` gets one line about it."""

    def __init__(
        self,
        limit_s: float,
        setting: str,
        log: Callable[[str], None] = to_stderr,
        error: Callable[[str], FlatoutError] = PeerLostError,
    ) -> None:
        self._limit_s, self._setting, self._log, self._error = limit_s, setting, log, error
        self._started_at = time.monotonic()
        self._has_notified = False

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative beyond it."""
        return self._started_at + self._limit_s - time.monotonic()

    def check(self, what: str, reason: str = "") -> None:
        """Call this repeatedly while waiting for `what`; `reason` may explain the wait. Raises `error` at the limit."""
        bound = f"{self._limit_s:.0f} s ({self._setting})" + (f": {reason}" if reason else "")
        if self.left_s <= 0:
            raise self._error(f"timed out waiting for {what}, {bound}")
        if not self._has_notified and self._limit_s - self.left_s >= NOTICE_AFTER_S:
            self._has_notified = True
            self._log(f"waiting for {what}, at most {bound}")

    def pause(self, what: str, reason: str = "") -> None:
        """Check, and then sleep for a moment."""
        self.check(what, reason)
        time.sleep(POLL_S)
