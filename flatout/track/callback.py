"""What watches a run: the callback that users write, and the reporter that calls every callback."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, RLock, Thread, get_ident
from typing import Any

from flatout.errors import OF_OWN_CODE
from flatout.io import bounded_wait
from flatout.io.redact import redacted
from flatout.io.stop_signals import JOIN_S
from flatout.track.record import AnswersRecord, EvalRecord, Record, RewardsRecord, RunEnd, RunStart, StepRecord
from flatout.track.start_up import EVENT as START_UP
from flatout.track.start_up import StartUpClock

# a callback that still has not returned after this many times as long is named again
TOLD_AGAIN = 4.0


class Callback:
    """Receives what a run reports: derive from it and define the methods that you need.

    Methods are called on the first rank only, one at a time. Training waits for each, so a call must return well within
    `faults.stall_s`; heartbeats go on beside it. An exception ends the run. `on_event`, `on_phase` and `on_save` may
    come from a background thread, whose exceptions end it with the next report or save.
    """

    def on_start(self, start: RunStart) -> None:
        """The model is built and the first step follows; called again by a run that resumes."""

    def on_stage(self, name: str, text: str) -> None:
        """One line at start-up or at the end: what was decided or done."""

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """What the run does from now on, such as loading weights, and how far that is; 0 for unknown."""

    def on_step(self, record: StepRecord) -> None:
        """The figures of a step; every `log_every_steps` steps."""

    def on_eval(self, record: EvalRecord) -> None:
        """The figures of an evaluation."""

    def on_answers(self, record: AnswersRecord) -> None:
        """Answers to `eval.prompts`, after an evaluation."""

    def on_round(self, record: RewardsRecord) -> None:
        """The rewards of a round's answers, before its steps, or of answers to held-out prompts."""

    def on_save(self, step: int, folder: Path) -> None:
        """The checkpoint of a step is complete; a save in the background calls this from its own thread."""

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """A skip, drop, retry, fallback or save: anything that someone may want to look up later."""

    def on_end(self, end: RunEnd) -> None:
        """The run is complete, was stopped, or failed; no call follows.

        It is not called if a collective with a lost rank holds this process until it is ended; end.json tells that.
        """


class Reporter:
    """Calls every callback with what the run reports, in their order; safe to use from several threads.

    Every callback gets a report, even if one of them raises; the first exception is then raised. Passwords in addresses
    are removed before any callback gets the text. A reporter without callbacks, as on all ranks but the first, does
    nothing. The phases are the stages of `start_up`.
    """

    def __init__(self, *callbacks: Callback, start_up: StartUpClock | None = None) -> None:
        self._callbacks = callbacks
        self._start_up = start_up or StartUpClock()
        self._lock = RLock()
        self._reports: deque[Callable[[Callback], None]] = deque()
        self._poster = ThreadPoolExecutor(1, "posted-events")
        self._errors: list[BaseException] = []
        # the callback that is called now, on which thread and since when
        self._calling: tuple[Callback, int, float] | None = None

    @contextmanager
    def telling_slow_callbacks(self) -> Iterator[None]:
        """Within the block, a thread says on stderr which callback holds the run, after ten seconds and ever later."""
        is_over = Event()
        thread = Thread(target=self._tell_slow, args=(is_over,), name="slow-callbacks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(JOIN_S)  # as it holds the callbacks

    def _tell_slow(self, is_over: Event) -> None:
        slow, limit_s = self._calling, bounded_wait.NOTICE_AFTER_S
        while not is_over.wait(bounded_wait.POLL_S):
            if (calling := self._calling) is not slow:
                slow, limit_s = calling, bounded_wait.NOTICE_AFTER_S
            if calling is None or time.monotonic() - calling[2] < limit_s:
                continue
            callback, thread, _ = calling
            stack = traceback.extract_stack(sys._current_frames().get(thread))
            name = next((frame.name for frame in stack if frame.name.startswith("on_")), "a method")
            at = f", now at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
            bounded_wait.to_stderr(
                f"the run waits for {name} of callback {type(callback).__name__}, for {limit_s:.0f} s so far{at}"
            )
            limit_s *= TOLD_AGAIN

    def start(self, start: RunStart) -> None:
        self._each(lambda callback: callback.on_start(start))

    def stage(self, name: str, text: str) -> None:
        self._each(lambda callback: callback.on_stage(name, redacted(text)))

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self._start_up.begin(name)
        self._each(lambda callback: callback.on_phase(name, done, total))

    def record(self, record: Record) -> None:
        self._each(lambda callback: deliver(callback, record))

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self._each(lambda callback: callback.on_event(kind, redacted(facts)))

    def stepped(self) -> None:
        """Report the seconds of the start as an event, at the end of the first step; later steps change nothing."""
        if facts := self._start_up.finish():
            self.event(START_UP, facts)

    def post(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Report an event without waiting for callbacks; the next report comes after it, and raises what one raised."""
        if self._callbacks:
            self._reports.append(lambda callback: callback.on_event(kind, redacted(facts)))
            # without a thread, the next report delivers it
            with suppress(RuntimeError):
                self._poster.submit(self._deliver)

    def saved(self, step: int, folder: Path, facts: Mapping[str, Any]) -> None:
        """Report a complete checkpoint, also as an event with further `facts`."""
        with self._lock:
            self.event("saved", {"step": step, "path": str(folder), **facts})
            self._each(lambda callback: callback.on_save(step, folder))

    def end(self, end: RunEnd) -> None:
        """Report the end."""
        with self._lock:
            try:
                self._each(lambda callback: callback.on_end(end))
            finally:
                self._callbacks = ()

    def _each(self, call: Callable[[Callback], None]) -> None:
        with self._lock:
            self._reports.append(call)
            self._deliver()
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _deliver(self) -> None:
        with self._lock:
            while self._reports:
                call = self._reports.popleft()
                for callback in self._callbacks:
                    self._calling = callback, get_ident(), time.monotonic()
                    try:
                        call(callback)
                    except OF_OWN_CODE as error:  # raised once all callbacks have this report
                        self._errors.append(error)
                    finally:
                        self._calling = None


def deliver(callback: Callback, record: Record) -> None:
    """Call the method of a callback that takes this kind of record."""
    if isinstance(record, StepRecord):
        callback.on_step(record)
    elif isinstance(record, EvalRecord):
        callback.on_eval(record)
    elif isinstance(record, RewardsRecord):
        callback.on_round(record)
    else:
        callback.on_answers(record)


@dataclass
class MemoryCallback(Callback):
    """Keeps what a run reports."""

    stages: list[tuple[float, str, str]] = field(default_factory=list)
    """(Unix time, name, text)."""
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    """The Unix time of each record."""

    def on_stage(self, name: str, text: str) -> None:
        self.stages.append((time.time(), name, text))

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.step_times_s.append(time.time())

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.events.append((kind, facts))
