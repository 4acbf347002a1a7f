"""Time steps without waiting for the device: by CUDA events on a GPU, otherwise by the host's clock."""

from __future__ import annotations

import time
from collections import deque

import torch


def now(device: torch.device) -> torch.cuda.Event | float:
    """Return an event recorded on the device's current stream, or on a CPU `time.perf_counter` in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class BusyClock:
    """Times this rank's passes in a step, from `start` to `stop`; reports the latest step the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: torch.cuda.Event | float = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        self._started = now(self._device)

    def stop(self) -> None:
        started, ended = self._started, now(self._device)
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


class StepClock:
    """Times each step from the end of the previous one: by CUDA events if steps overlap, otherwise on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Start timing the next step; nothing may be running on the device."""
        self._time_s, started = time.perf_counter(), now(self._device)
        self._event = None if isinstance(started, float) else started

    def end_step(self, ended: torch.cuda.Event | float | None) -> float:
        """Return the seconds of the step that ended at this past event or host time, or just now (None)."""
        end_s = ended if isinstance(ended, float) else time.perf_counter()
        step_s = end_s - self._time_s
        event = None if isinstance(ended, float) else ended
        if event is not None and self._event is not None:
            step_s = self._event.elapsed_time(event) / 1e3
        self._time_s, self._event = end_s, event
        return step_s
