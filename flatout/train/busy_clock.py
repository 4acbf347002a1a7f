"""Measure how long this rank computes in each step, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque

import torch


class BusyClock:
    """Times a step's passes, from `start` to `stop`; reports the latest step that the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: torch.cuda.Event | float = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        started, ended = self._started, self._now()
        if isinstance(started, float) or isinstance(ended, float):
            self._seconds = float(ended) - float(started)  # type: ignore[arg-type]
        else:
            self._events.append((started, ended))

    def seconds(self) -> float:
        """Return the compute seconds of the latest finished step, 0 before the first; a GPU's lag one or two steps."""
        while self._events and self._events[0][1].query():
            started, ended = self._events.popleft()
            self._seconds = started.elapsed_time(ended) / 1e3
        return self._seconds

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
