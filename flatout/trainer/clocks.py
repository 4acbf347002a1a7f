"""Time steps without waiting for the device: by CUDA events on a GPU, otherwise by the host's clock."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> torch.cuda.Event | float:
    """Return an event recorded on the device's current stream, or on a CPU `time.perf_counter` in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


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
