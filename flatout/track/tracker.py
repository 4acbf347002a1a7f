"""What a run reports to: the protocol of a tracker, and several trackers as one."""

from __future__ import annotations

from collections.abc import Mapping
from threading import RLock
from typing import Any, Protocol

from flatout.io.redact import redacted
from flatout.track.record import Record


class Tracker(Protocol):
    """Receives what a run reports."""

    def stage(self, name: str, text: str) -> None:
        """One line at start-up: what was decided or done."""

    def record(self, record: Record) -> None:
        """The figures of one step or evaluation."""

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """A skip, drop, retry, fallback or save: anything that someone may want to look up later."""

    def close(self) -> None:
        """The run has ended; no call follows."""


class Trackers:
    """Several trackers as one, safe to use from several threads: saves in the background report events too.

    Passwords in addresses are removed before any tracker gets the text.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers
        self._lock = RLock()

    def stage(self, name: str, text: str) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.stage(name, redacted(text))

    def record(self, record: Record) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.record(record)

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.event(kind, redacted(facts))

    def close(self) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.close()
