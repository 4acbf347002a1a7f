"""Writes what a run reports to its folder: start.json, end.json, train.log, and one file of lines for each kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from xxhash import xxh3_128_hexdigest

from flatout.config.folders import RUN_NAME, mark_run, run_identity
from flatout.errors import DataError, FlatoutError, ResourceError
from flatout.io.durable_io import DurableIO, remove_unfinished
from flatout.io.own_files import AppendFile
from flatout.track.callback import Callback
from flatout.track.record import AnswersRecord, Record, RunEnd, RunStart, describe_event, describe_record
from flatout.track.run_log import PICTURES_FILE, RecordedPictures, read_end


class RunFolderWriter(Callback):
    """Writes a run's folder; `track/run_log.py` reads it.

    Lines that cannot be written are lost; `log` is called for the first lost line, and again once writing works.
    `keep_folder` is called before each record and raises if this run must no longer write there.
    """

    def __init__(
        self,
        folder: Path,
        log: Callable[[str], None] = lambda text: None,
        keep_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._log, self._keep_folder = folder, log, keep_folder
        self._run_id = run_identity(folder)
        remove_unfinished(folder)
        names = ("metrics.jsonl", "answers.jsonl", "events.jsonl", "train.log", PICTURES_FILE)
        self._files = [AppendFile(folder / name) for name in names]
        self._metrics, self._answers, self._events, self._train_log, self._pictures = self._files
        self._written = RecordedPictures(folder).ids()
        self._num_lost, self._is_ours = 0, True
        self._has_started, self._has_ended, self._end_lock = False, False, Lock()

    def on_start(self, start: RunStart) -> None:
        self._has_started, self._run_id = True, run_identity(self._folder)  # a mirror's by now
        self._write_json("start.json", asdict(start))
        if self._is_ours:
            (self._folder / "end.json").unlink(missing_ok=True)

    def on_stage(self, name: str, text: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write(self._train_log, f"{now} {name:<10} {text}")

    def on_step(self, record: Record) -> None:
        self._keep()
        (kind, text), content = describe_record(record), asdict(record)
        for one in (*content.get("worst", ()), *content.get("answers", ())):
            one["pictures"] = [self._named(copy) for copy in one["pictures"]]
        file = self._answers if isinstance(record, AnswersRecord) else self._metrics
        self._write(file, json.dumps({"kind": kind, **content}, allow_nan=False))
        self.on_stage(kind, text)

    on_eval = on_round = on_answers = on_step

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write(self._events, json.dumps({"time": now, "kind": kind, **facts}, default=str))
        self.on_stage(kind, describe_event(kind, facts))

    def on_end(self, end: RunEnd) -> None:
        with self._end_lock:
            self._has_ended = True
            if self._has_started or self._changes(end):
                self._write_json("end.json", asdict(end))
        for file in self._files:
            file.close()

    def _changes(self, end: RunEnd) -> bool:
        """Whether a start without a step changes how the run ended before: only one that finds it complete does."""
        try:
            before = read_end(self._folder)
        except DataError:
            return True
        return before is None or (end.outcome == "complete" and before.outcome != "complete")

    def write_end(self, end: RunEnd) -> None:
        """Write end.json for a run that may not live to call `on_end`, which has precedence; thread-safe."""
        with self._end_lock:
            if self._has_started and not self._has_ended:
                self._write_json("end.json", asdict(end))

    def _keep(self) -> None:
        """Call `keep_folder`, whose error stops all writes; mark a folder that was deleted as this run's again."""
        try:
            self._keep_folder()
            if not (self._folder / RUN_NAME).exists():
                mark_run(self._folder, self._run_id)
        except FlatoutError:
            self._is_ours = False
            raise

    def _named(self, copy: str) -> str:
        """Return what records name a small copy by, which is written if the run has not recorded it yet."""
        name = xxh3_128_hexdigest(copy.encode())
        if name not in self._written:
            self._write(self._pictures, json.dumps({"id": name, "copy": copy}))
            if self._pictures.trouble is None:
                self._written.add(name)
        return name

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        with suppress(FlatoutError):
            self._keep()
        if not self._is_ours:
            return
        try:
            DurableIO().write_json(self._folder / name, dict(content))
        except ResourceError as error:
            self._log(f"{error}; training continues without {name}")

    def _write(self, file: AppendFile, line: str) -> None:
        if not self._is_ours:
            return
        file.write(line)
        trouble = next((one.trouble for one in self._files if one.trouble), None)
        if file.trouble:
            self._num_lost += 1
            if self._num_lost == 1:
                self._log(f"{trouble}; training continues, but lines are lost until it can be written")
        elif self._num_lost and trouble is None:
            self._log(f"{self._folder}: writable again; {self._num_lost} lines were lost")
            self._num_lost = 0
