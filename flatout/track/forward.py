"""The process that sends a run's records to its trackers while the run writes them: `python -m flatout.track.forward`.

It reads the files of the run folder and shares nothing else with training, which therefore never waits for a service.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import ValidationError

from flatout.config.folders import is_run_folder
from flatout.config.track import TrackConfig
from flatout.environment import environment
from flatout.errors import DataError
from flatout.io.append import AppendFile
from flatout.io.bounded_wait import to_stderr
from flatout.io.file_lock import locked
from flatout.io.json_file import now_utc
from flatout.io.redact import printable, redacted, secrets_of
from flatout.track.delivery import LOG_NAME, Delivery
from flatout.track.record import RunEnd, RunStart
from flatout.track.run_log import read_end, read_start

# how long sending goes on after the run; with track.upload_final
LINGER_S, LINGER_UPLOAD_S = 60.0, 1800.0
POLL_S = 0.2


class RedactedLog(io.TextIOBase):
    """A text stream that writes whole lines to a file, with their time and without secrets."""

    def __init__(self, path: Path, clean: Callable[[Any], Any]) -> None:
        self._file, self._clean, self._rest = AppendFile(path), clean, ""
        self._lock = Lock()  # each tracker has a thread

    def write(self, text: str) -> int:
        """Write the lines that have ended; the rest waits for its end."""
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in filter(str.strip, lines):
                self._file.write(f"{now_utc()} {printable(self._clean(line))}")
        return len(text)


def tracked_run(folder: Path, clean: Callable[[Any], Any]) -> tuple[RunStart, TrackConfig]:
    """Return the facts of a run folder, as they may be sent, and its settings of trackers. Raises DataError."""
    start = read_start(folder) if is_run_folder(folder) else None
    if start is None:
        raise DataError(f"{folder} has no start.json of flatout: no run started there; name the folder of a run")
    settings = {name.removeprefix("track."): value for name, value in start.settings.items() if name[:6] == "track."}
    shown = {name: clean(getattr(start, name)) for name in ("name", "folder", "settings", "model_text")}
    try:
        return replace(start, **shown), TrackConfig.model_validate(settings)
    except ValidationError as error:
        raise DataError(
            f"{folder / 'start.json'}: track: {error.errors()[0]['msg']}; this version of flatout did not write it"
        ) from error


def end_of(folder: Path, start: RunStart) -> RunEnd:
    """Return how a run that no process trains any more ended; without end.json it was killed."""
    if end := read_end(folder):
        return end
    metrics = folder / "metrics.jsonl"
    last_at = max(start.started_at, metrics.stat().st_mtime if metrics.exists() else 0.0)
    return RunEnd("stopped", 137, last_at, "the process was killed, or its machine went down")


def forward(folder: Path, parent: int, clean: Callable[[Any], Any], log: Callable[[str], None]) -> bool:
    """Send until LINGER_S after the run's end or the end of its process `parent`; return whether all was sent."""
    start, config = tracked_run(folder, clean)
    limit_s = LINGER_UPLOAD_S if config.upload_final else LINGER_S
    with locked(folder / "trackers" / ".lock", "the trackers' process of an earlier start", log, 2 * limit_s):
        deliveries = [Delivery(folder, name, start, config, clean, log=log) for name in config.to]
        for delivery in deliveries:
            delivery.start()
        until_s: float | None = None
        while any(delivery.is_alive() for delivery in deliveries):
            time.sleep(POLL_S)
            if until_s is not None and time.monotonic() > until_s:
                break
            if until_s is None and (os.getppid() != parent or read_end(folder) is not None):
                until_s = time.monotonic() + limit_s
                for delivery in deliveries:
                    delivery.finish(end_of(folder, start))
    return all(delivery.is_complete for delivery in deliveries)


def main(folder: Path, parent: int) -> int:
    """Send a run's records; everything that is printed goes to trackers/forward.log. Return 0 if all was sent."""
    os.umask(0o077)
    os.nice(10)  # training comes first where cores are few
    clean = partial(redacted, secrets=secrets_of(environment()))
    stream, is_sent = RedactedLog(folder / "trackers" / LOG_NAME, clean), False
    with redirect_stdout(stream), redirect_stderr(stream):
        try:
            is_sent = forward(folder, parent, clean, to_stderr)
        except Exception:  # noqa: BLE001  (the log is where an error of this process can be read)
            traceback.print_exc()
    return 0 if is_sent else 1


if __name__ == "__main__":
    # not sys.exit: it would wait for threads that hang
    os._exit(main(Path(sys.argv[1]), int(sys.argv[2])))
