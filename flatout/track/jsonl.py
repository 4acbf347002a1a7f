"""The run folder's own record: metrics.jsonl, events.jsonl and train.log, appended line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from flatout.track.record import Record, to_json


class RunFolderTracker:
    """See Tracker for the methods. Each line is flushed, so a killed run keeps what it told."""

    def __init__(self, folder: Path) -> None:
        # owner-only: logs can hold pieces of private data
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._metrics, self._events, self._log = (
            _open_private(folder / name) for name in ("metrics.jsonl", "events.jsonl", "train.log")
        )

    def stage(self, name: str, text: str) -> None:
        self._log.write(f"{_now()} {name:<10} {text}\n")

    def record(self, record: Record) -> None:
        line = json.dumps(to_json(record), allow_nan=False)
        self._metrics.write(line + "\n")
        self._log.write(f"{_now()} {line}\n")

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        line = json.dumps({"time": _now(), "kind": kind, **facts}, default=str)
        self._events.write(line + "\n")
        self._log.write(f"{_now()} event {line}\n")

    def close(self) -> None:
        for file in (self._metrics, self._events, self._log):
            file.close()


def _open_private(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "a", encoding="utf-8", buffering=1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
