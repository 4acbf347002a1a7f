"""Sends what a run folder holds to its trackers: beside a run (`python -m flatout.track.forward`), or after it.

It reads the folder's files and shares nothing else with training, which therefore never waits for a service.
"""

from __future__ import annotations

import importlib
import io
import os
import secrets
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Self

from pydantic import ValidationError

from flatout.config.folders import is_run_folder
from flatout.config.track import TrackConfig
from flatout.environment import environment, environment_of_child
from flatout.errors import DataError, FlatoutError, ResourceError, reason_of
from flatout.io.bounded_wait import to_stderr
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import locked
from flatout.io.json_file import now_utc
from flatout.io.own_files import AppendFile, start_python
from flatout.io.redact import printable, redacted, secrets_of
from flatout.track.callback import Callback, deliver
from flatout.track.record import RunEnd, RunStart, StepRecord
from flatout.track.run_log import LineFollower, read_end, read_start, read_written, record_of
from flatout.track.tracker import Tracker
from flatout.track.trackers import TRACKERS

# between looks at the files; at most between attempts; the same after the run's end
FOLLOW_S, MAX_PAUSE_S, MAX_LAST_PAUSE_S = 2.0, 60.0, 2.0
# how long sending goes on after the run; with track.upload_final
LINGER_S, LINGER_UPLOAD_S = 60.0, 1800.0
POLL_S = 0.2
# how long a complete run waits for its trackers; one that failed may have to free its GPU soon
WAIT_S, WAIT_AFTER_FAILURE_S, NOTICE_AFTER_S = 10.0, 2.0, 2.0
# between looks at whether a tracker is in trouble
CHECK_EVERY_S = 30.0
RECORDS_PER_FLUSH, MAX_TROUBLE = 500, 120
FILES = ("metrics.jsonl", "answers.jsonl")
LOG_NAME = "forward.log"

Log = Callable[[str], None]
Clean = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a tracker has confirmed."""

    run_id: str
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Of each file."""
    last_steps: dict[str, int] = field(default_factory=dict)
    """The last step of each kind of record."""
    ended_at: float | None = None
    """Unix time of the end, if it was sent."""
    trouble: str | None = None
    """Why the tracker takes nothing now."""


def read_cursor(folder: Path, name: str) -> Cursor:
    """Return how far a tracker is; a new run at the service without trackers/NAME.json. Raises DataError."""
    repair = "remove it to send everything as a new run"
    cursor = read_written(folder / "trackers" / f"{name}.json", Cursor, repair)
    return cursor or Cursor(secrets.token_hex(16))


def unsent(folder: Path, cursor: Cursor) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield each line that follows what `cursor` has, with the name of its file and the offset after it."""
    for name in FILES:
        file = LineFollower(folder / name, cursor.sent_bytes.get(name, 0))
        yield from ((line, name, file.offset) for line in file.new_lines())


def count_unsent(folder: Path, name: str) -> int:
    """Return how many records a tracker has not confirmed; 1 if it lacks only the end, or its file is damaged."""
    try:
        cursor = read_cursor(folder, name)
    except DataError:
        return 1
    return sum(1 for _ in unsent(folder, cursor)) or int(cursor.ended_at is None)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run folder whose records are sent."""

    folder: Path
    start: RunStart
    """Without secrets."""
    config: TrackConfig
    clean: Clean
    """Removes the values of secret variables, and passwords in addresses."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises DataError for a folder in which no run of this version started."""
        start = read_start(folder) if is_run_folder(folder) else None
        if start is None:
            raise DataError(f"{folder} has no start.json of flatout: no run started there; name the folder of a run")
        clean = partial(redacted, secrets=secrets_of(environment()))
        settings = {name[6:]: value for name, value in start.settings.items() if name.startswith("track.")}
        shown = {name: clean(getattr(start, name)) for name in ("name", "folder", "settings", "model_text")}
        try:
            return cls(folder, replace(start, **shown), TrackConfig.model_validate(settings), clean)
        except ValidationError as error:
            why = f"track: {error.errors()[0]['msg']}; this version of flatout did not write it"
            raise DataError(f"{folder / 'start.json'}: {why}") from error

    @property
    def linger_s(self) -> float:
        """How long sending goes on after the run."""
        return LINGER_UPLOAD_S if self.config.upload_final else LINGER_S

    def end(self) -> RunEnd:
        """Return how the run ended, if no process trains it any more; without end.json it was killed."""
        if end := read_end(self.folder):
            return end
        metrics = self.folder / "metrics.jsonl"
        last_at = max(self.start.started_at, metrics.stat().st_mtime if metrics.exists() else 0.0)
        return RunEnd("stopped", 137, last_at, "the process was killed, or its machine went down")

    @contextmanager
    def sending(self, limit_s: float) -> Iterator[None]:
        """Be the only process that sends, after at most `limit_s`; what clients print goes to LOG_NAME.

        Only this user can read what they write.
        """
        folder, before = self.folder / "trackers", os.umask(0o077)
        try:
            with locked(folder / ".lock", "another process that sends this run", limit_s=limit_s):
                log = _RedactedLog(folder / LOG_NAME, self.clean)
                with redirect_stdout(log), redirect_stderr(log):
                    yield
        finally:
            os.umask(before)


class Delivery(Thread):
    """Sends records as they are written, in a thread of its own, until `finish` has named the end and all is sent.

    A tracker that fails is tried again, after up to MAX_PAUSE_S; with `retries` False the first failure ends the
    thread. `is_complete` says that the tracker has everything, `trouble` why not, `num_sent` counts records.
    """

    def __init__(self, run: TrackedRun, name: str, *, retries: bool = True) -> None:
        super().__init__(name=name, daemon=True)
        self._run, self._retries = run, retries
        # what was given to the tracker, and what it has confirmed; the file of the latter may wait for a full disk
        self._given = self._confirmed = read_cursor(run.folder, name)
        self._tracker: Tracker | None = None
        self._end: RunEnd | None = None
        self._has_ended = Event()
        self.trouble: str | None = None
        self.is_complete, self.num_sent = False, 0

    def finish(self, end: RunEnd) -> None:
        """Say that nothing more will be written."""
        self._end = end
        self._has_ended.set()

    def run(self) -> None:
        pause_s = FOLLOW_S
        while not self.is_complete:
            end = self._end  # before reading, so that nothing is missed that was written before the end
            try:
                self._send(end)
                trouble, details, pause_s = None, "works again", FOLLOW_S
                self.is_complete = end is not None
            except Exception as error:  # noqa: BLE001  (a client may raise anything; what it did not take is sent later)
                self._tracker, trouble, details = None, self._run.clean(_why(error)), reason_of(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            if trouble != self.trouble:
                self.trouble = trouble
                to_stderr(f"{self.name}: {details}")  # the log of what sends
                with suppress(ResourceError):  # a full disk is the trouble already
                    self._confirm(replace(self._confirmed, trouble=trouble))
            if trouble and not self._retries:
                return
            # wakes up when the end becomes known
            if self._has_ended.wait(pause_s) and trouble:
                time.sleep(min(pause_s, MAX_LAST_PAUSE_S))

    def _send(self, end: RunEnd | None) -> None:
        """Send what is new, and the end. Raises what the tracker's client raises."""
        if self._tracker is None:
            self._given = self._confirmed
        lines = unsent(self._run.folder, self._given)
        if end is not None and self._given.ended_at == end.ended_at and not any(lines):
            return
        tracker = self._tracker = self._tracker or self._open()
        for count, (line, name, offset) in enumerate(unsent(self._run.folder, self._given), 1):
            self._give(tracker, line, name, offset)
            if count % RECORDS_PER_FLUSH == 0:
                self._flush(tracker)
        self._flush(tracker)
        if end is not None:
            tracker.on_end(replace(end, why=self._run.clean(end.why)))
            self._given = replace(self._given, ended_at=end.ended_at)
            self._confirm(self._given)

    def _open(self) -> Tracker:
        """Start the run at the service, or continue it, from what is confirmed."""
        self._confirm(replace(self._given, ended_at=None))  # also the run's id, before the service knows it
        self._given = replace(self._given, ended_at=None, trouble=None)
        module, _, class_name = TRACKERS[self.name][1].rpartition(".")
        tracker_class: type[Tracker] = getattr(importlib.import_module(module), class_name)
        tracker = tracker_class(self._given.run_id, self._run.folder / "trackers", self._run.config)
        tracker.on_start(self._run.start)
        return tracker

    def _give(self, tracker: Tracker, line: dict[str, Any], file: str, offset: int) -> None:
        record, last_steps = record_of(self._run.clean(line)), self._given.last_steps
        if record is not None:
            kind = type(record).__name__
            if tracker.replaces_steps or record.step > last_steps.get(kind, -1):
                deliver(tracker, record)
                last_steps = {**last_steps, kind: record.step}
                self.num_sent += 1
        self._given = replace(self._given, sent_bytes={**self._given.sent_bytes, file: offset}, last_steps=last_steps)

    def _flush(self, tracker: Tracker) -> None:
        if tracker.flush() and self._given != self._confirmed:
            self._confirm(self._given)

    def _confirm(self, cursor: Cursor) -> None:
        self._confirmed = cursor
        DurableIO().write_json(self._run.folder / "trackers" / f"{self.name}.json", asdict(cursor))


def _why(error: BaseException) -> str:
    """Say in a few words why a client failed: what the system reported, such as "Connection refused", comes first."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    is_plain = root is error or (isinstance(root, OSError) and str(root))
    return (reason_of(root) if is_plain else f"{reason_of(root)}; {reason_of(error)}")[:MAX_TROUBLE]


class _RedactedLog(io.TextIOBase):
    """A text stream that writes whole lines to a file, with their time and without secrets."""

    def __init__(self, path: Path, clean: Clean) -> None:
        self._file, self._clean, self._rest = AppendFile(path), clean, ""
        self._lock = Lock()  # each tracker has a thread

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in filter(str.strip, lines):
                self._file.write(f"{now_utc()} {printable(self._clean(line))}")
        return len(text)


class TrackerProcess(Callback):
    """The callback that runs `python -m flatout.track.forward` beside training, and says at the end what was not sent.

    No method raises. `log` gets one line at a time.
    """

    def __init__(self, folder: Path, names: Sequence[str], log: Log) -> None:
        self._folder, self._names, self._log = folder, names, log
        self._again = f"flatout track {shlex.quote(str(folder))}"
        self._process: subprocess.Popen[bytes] | None = None
        self._troubles: dict[str, str | None] = {}
        self._checked_at = time.monotonic()

    def on_start(self, start: RunStart) -> None:
        trackers = self._folder / "trackers"
        self._linger = "half an hour" if start.settings.get("track.upload_final") else "a minute"
        try:
            DurableIO().make_dir(trackers)
            trackers.chmod(0o700)
            # it outlives a killed run by what is left to send; -P: a wandb.py of this folder is not imported
            words = ["-P", "-m", "flatout.track.forward", str(self._folder.absolute()), str(os.getpid())]
            self._process = start_python(words, trackers / LOG_NAME, env=environment_of_child())
            (trackers / LOG_NAME).chmod(0o600)
        except (OSError, FlatoutError) as error:
            self._log(f"not started: {error}; `{self._again}` sends everything after the run")

    def on_step(self, record: StepRecord) -> None:
        if time.monotonic() - self._checked_at < CHECK_EVERY_S or self._process is None:
            return
        self._checked_at = time.monotonic()
        for name in self._names:
            trouble = self._trouble_of(name)
            if trouble != self._troubles.get(name):
                self._troubles[name] = trouble
                self._log(f"{name}: {f'{trouble}; records wait in metrics.jsonl' if trouble else 'works again'}")

    def on_end(self, end: RunEnd) -> None:
        if self._process is None:
            return
        limit_s = WAIT_S if end.outcome == "complete" else WAIT_AFTER_FAILURE_S
        # Ctrl-C ends the wait, not the run, which is complete
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            try:
                exit_code = self._process.wait(NOTICE_AFTER_S)
            except subprocess.TimeoutExpired:
                if limit_s > NOTICE_AFTER_S:
                    self._log(f"sending the last records to {', '.join(self._names)}, for at most {limit_s:.0f} s")
                exit_code = self._process.wait(max(0.0, limit_s - NOTICE_AFTER_S))
            if exit_code == 0:
                return
        missing = {name: number for name in self._names if (number := count_unsent(self._folder, name))}
        for name, number in missing.items():
            trouble = self._trouble_of(name)
            self._log(f"{name}: {number:,} records not sent" + (f" ({trouble})" if trouble else ""))
        if missing:
            going_on = f"sending goes on for {self._linger}; then " if self._process.poll() is None else ""
            self._log(f"{going_on}`{self._again}` sends the rest")

    def _trouble_of(self, name: str) -> str | None:
        if self._process is not None and self._process.poll():
            return f"its process ended; see {self._folder / 'trackers' / LOG_NAME}"
        try:
            return read_cursor(self._folder, name).trouble
        except FlatoutError as error:
            return str(error)


def forward(run: TrackedRun, parent: int) -> bool:
    """Send until LINGER_S after the run's end or the end of its process `parent`; return whether all was sent."""
    deliveries = [Delivery(run, name) for name in run.config.to]
    for delivery in deliveries:
        delivery.start()
    until_s: float | None = None
    while any(delivery.is_alive() for delivery in deliveries):
        time.sleep(POLL_S)
        if until_s is not None and time.monotonic() > until_s:
            break
        if until_s is None and (os.getppid() != parent or read_end(run.folder) is not None):
            until_s = time.monotonic() + run.linger_s
            for delivery in deliveries:
                delivery.finish(run.end())
    return all(delivery.is_complete for delivery in deliveries)


def main(folder: Path, parent: int) -> int:
    """Send a run's records beside it; return 0 if all was sent."""
    os.nice(10)  # training comes first where cores are few
    os.umask(0o077)
    run = TrackedRun.read(folder)
    with run.sending(2 * run.linger_s):
        try:
            return 0 if forward(run, parent) else 1
        except Exception:  # noqa: BLE001  (the log is where an error of this process can be read)
            traceback.print_exc()
            return 1


if __name__ == "__main__":
    # not sys.exit: it would wait for threads that hang
    os._exit(main(Path(sys.argv[1]), int(sys.argv[2])))
