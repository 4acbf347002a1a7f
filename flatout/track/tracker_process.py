"""The callback that starts the trackers' process beside training, and says at the end what it could not send."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flatout.environment import LOGS, PARENT, RANK_VARIABLES, SECRET, STORE_SOCKET, environment
from flatout.errors import FlatoutError
from flatout.io.child_process import start_python
from flatout.io.durable_io import DurableIO
from flatout.track.callback import Callback
from flatout.track.forward import LOG_NAME, count_unsent, read_cursor
from flatout.track.record import RunEnd, RunStart, StepRecord

# how long a complete run waits for its trackers; one that failed may have to free its GPU soon
WAIT_S, WAIT_AFTER_FAILURE_S, NOTICE_AFTER_S = 10.0, 2.0, 2.0
# between looks at whether a tracker is in trouble
CHECK_EVERY_S = 30.0


class TrackerProcess(Callback):
    """Runs `python -m flatout.track.forward` while a run trains; no method raises. `log` gets one line at a time."""

    def __init__(self, folder: Path, names: Sequence[str], log: Callable[[str], None]) -> None:
        self._folder, self._names, self._log = folder, names, log
        self._again = f"flatout track {shlex.quote(str(folder))}"
        self._process: subprocess.Popen[bytes] | None = None
        self._troubles: dict[str, str | None] = {}
        self._checked_at = time.monotonic()

    def on_start(self, start: RunStart) -> None:
        # what describes this process as a rank does not apply to that one
        hidden = {*RANK_VARIABLES, LOGS, PARENT, SECRET, STORE_SOCKET}
        env = {name: value for name, value in environment().items() if name not in hidden}
        trackers = self._folder / "trackers"
        # as LINGER_UPLOAD_S and LINGER_S of that process say
        self._linger = "half an hour" if start.settings.get("track.upload_final") else "a minute"
        try:
            DurableIO().make_dir(trackers)
            trackers.chmod(0o700)
            # it outlives a killed run by what is left to send; -P: a wandb.py of this folder is not imported
            words = ["-P", "-m", "flatout.track.forward", str(self._folder.absolute()), str(os.getpid())]
            self._process = start_python(words, trackers / LOG_NAME, env=env)
            (trackers / LOG_NAME).chmod(0o600)
        except (OSError, FlatoutError) as error:
            self._log(f"not started: {error}; `{self._again}` sends everything after the run")

    def on_step(self, record: StepRecord) -> None:
        if time.monotonic() - self._checked_at < CHECK_EVERY_S or self._process is None:
            return
        self._checked_at = time.monotonic()
        for name in self._names:
            trouble = self._state_of(name)[1]
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
        states = {name: self._state_of(name) for name in self._names}
        for name, (num_unsent, trouble) in states.items():
            if num_unsent:
                self._log(f"{name}: {num_unsent:,} records not sent" + (f" ({trouble})" if trouble else ""))
        if any(num_unsent for num_unsent, _ in states.values()):
            going_on = f"sending goes on for {self._linger}; then " if self._process.poll() is None else ""
            self._log(f"{going_on}`{self._again}` sends the rest")

    def _state_of(self, name: str) -> tuple[int, str | None]:
        """Return how many records a tracker has not confirmed, and why it takes nothing now."""
        try:
            num_unsent, trouble = count_unsent(self._folder, name), read_cursor(self._folder, name).trouble
        except FlatoutError as error:
            num_unsent, trouble = 1, str(error)
        if self._process is not None and self._process.poll():
            trouble = f"its process ended; see {self._folder / 'trackers' / LOG_NAME}"
        return num_unsent, trouble
