"""Sends what a run folder holds to one tracker, and remembers how far it came."""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flatout.config.track import TrackConfig
from flatout.errors import DataError, ResourceError, reason_of
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json
from flatout.track.callback import deliver
from flatout.track.record import Record, RunEnd, RunStart
from flatout.track.run_log import LineFollower, record_of
from flatout.track.tracker import Tracker
from flatout.track.trackers import TRACKERS

# between looks at the files; at most between attempts; the same after the run's end
FOLLOW_S, MAX_PAUSE_S, MAX_LAST_PAUSE_S = 2.0, 60.0, 2.0
RECORDS_PER_FLUSH, MAX_TROUBLE = 500, 120
FILES = ("metrics.jsonl", "answers.jsonl")
LOG_NAME = "forward.log"


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


_CURSOR = TypeAdapter(Cursor)


def read_cursor(folder: Path, name: str) -> Cursor:
    """Return how far a tracker is; a new run at the service without trackers/NAME.json. Raises DataError."""
    path = folder / "trackers" / f"{name}.json"
    if not path.exists():
        return Cursor(secrets.token_hex(16))
    try:
        return _CURSOR.validate_python(read_json(path, DataError))
    except ValidationError as error:
        raise DataError(f"{path}: {error.errors()[0]['msg']}; remove it to send everything as a new run") from error


def count_unsent(folder: Path, name: str) -> int:
    """Return how many records a tracker has not confirmed; 1 if only the run's end is missing."""
    cursor = read_cursor(folder, name)
    num_lines = sum(sum(1 for _ in LineFollower(folder / file, cursor.sent_bytes.get(file, 0)).new_lines())
                    for file in FILES)  # fmt: skip
    return num_lines or int(cursor.ended_at is None)


class Delivery(Thread):
    """Sends records as they are written, in a thread of its own, until `finish` has named the end and all is sent.

    A tracker that fails is tried again, after up to MAX_PAUSE_S; with `retries` False the first failure ends the
    thread. `is_complete` says that the tracker has everything, `trouble` why not, `num_sent` counts records.
    `clean` is applied to all that is sent.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        start: RunStart,
        config: TrackConfig,
        clean: Callable[[Any], Any],
        *,
        retries: bool = True,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._folder, self._start, self._config = folder, start, config
        self._clean, self._retries, self._log = clean, retries, log
        self._cursor = self._given = read_cursor(folder, name)
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
                self._tracker, trouble, details = None, self._clean(_why(error)), reason_of(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            if trouble != self.trouble:
                self.trouble = trouble
                self._log(f"{self.name}: {details}")
                with suppress(ResourceError):  # a full disk is the trouble already
                    self._save(replace(self._cursor, trouble=trouble))
            if trouble and not self._retries:
                return
            # wakes up when the end becomes known
            if self._has_ended.wait(pause_s) and trouble:
                time.sleep(min(pause_s, MAX_LAST_PAUSE_S))

    def _send(self, end: RunEnd | None) -> None:
        """Send what is new, and the end. Raises what the tracker's client raises."""
        sent_bytes = (self._given if self._tracker else self._cursor).sent_bytes
        files = {name: LineFollower(self._folder / name, sent_bytes.get(name, 0)) for name in FILES}
        is_behind = any(file.path.exists() and file.path.stat().st_size > file.offset for file in files.values())
        if end is not None and not is_behind and self._cursor.ended_at == end.ended_at:
            return
        tracker = self._tracker or self._open()
        for name, file in files.items():
            for count, line in enumerate(file.new_lines(), 1):
                self._give(tracker, record_of(self._clean(line)), name, file.offset)
                if count % RECORDS_PER_FLUSH == 0:
                    self._confirm(tracker.flush())
            self._confirm(tracker.flush())
        if end is not None:
            tracker.on_end(replace(end, why=self._clean(end.why)))
            self._given = replace(self._given, ended_at=end.ended_at)
            self._confirm(True)

    def _open(self) -> Tracker:
        """Start the run at the service, or continue it, from what is confirmed."""
        self._save(replace(self._cursor, ended_at=None))  # also the run's id, before the service knows it
        self._given = replace(self._cursor, trouble=None)
        module, _, class_name = TRACKERS[self.name][1].rpartition(".")
        tracker_class: type[Tracker] = getattr(importlib.import_module(module), class_name)
        tracker = tracker_class(self._cursor.run_id, self._folder / "trackers", self._config)
        tracker.on_start(self._start)
        self._tracker = tracker
        return tracker

    def _give(self, tracker: Tracker, record: Record | None, file: str, offset: int) -> None:
        last_steps = self._given.last_steps
        if record is not None:
            kind = type(record).__name__
            if tracker.replaces_steps or record.step > last_steps.get(kind, -1):
                deliver(tracker, record)
                last_steps = {**last_steps, kind: record.step}
                self.num_sent += 1
        self._given = replace(self._given, sent_bytes={**self._given.sent_bytes, file: offset}, last_steps=last_steps)

    def _confirm(self, is_confirmed: bool) -> None:
        if is_confirmed and self._given != self._cursor:
            self._save(self._given)

    def _save(self, cursor: Cursor) -> None:
        self._cursor = cursor
        DurableIO().write_json(self._folder / "trackers" / f"{self.name}.json", asdict(cursor))


def _why(error: BaseException) -> str:
    """Say in a few words why a client failed: what the system reported, such as "Connection refused", comes first."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    is_plain = root is error or (isinstance(root, OSError) and str(root))
    return (reason_of(root) if is_plain else f"{reason_of(root)}; {reason_of(error)}")[:MAX_TROUBLE]
