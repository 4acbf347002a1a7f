"""What a run reports to: the protocol of a tracker, several trackers as one, and a tracker in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol

from flatout.io.redact import redacted
from flatout.track.record import Record, StepRecord


class Tracker(Protocol):
    """Receives what a run reports, on the first rank only, one call at a time.

    Training waits for each call. An exception ends the run, so handle the ones of a server that does not answer.
    """

    def stage(self, name: str, text: str) -> None:
        """One line at start-up: what was decided or done."""

    def record(self, record: Record) -> None:
        """The figures of one step or evaluation."""

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """A skip, drop, retry, fallback or save: anything that someone may want to look up later."""

    def close(self) -> None:
        """The run has ended; no call follows."""


class TrackerGroup:
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


@dataclass
class MemoryTracker:
    """Keeps what a run reports. `stages` are (wall time, name, text); `step_times_s` is when steps were recorded."""

    stages: list[tuple[float, str, str]] = field(default_factory=list)
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)

    def stage(self, name: str, text: str) -> None:
        self.stages.append((time.time(), name, text))

    def record(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)
            self.step_times_s.append(time.time())

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.events.append((kind, facts))

    def close(self) -> None:
        """Does nothing: the records stay."""
