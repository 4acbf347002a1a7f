"""A tracker that keeps what a run reports in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from flatout.track.record import Record, StepRecord


class Recorder:
    """See Tracker for the methods. `stages` are (wall time, name, text); `step_times_s` when steps were recorded."""

    def __init__(self) -> None:
        self.stages: list[tuple[float, str, str]] = []
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.steps: list[StepRecord] = []
        self.step_times_s: list[float] = []

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
