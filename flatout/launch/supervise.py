"""Watches over the ranks of this node: shows the first one's log, ends them together, starts them again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from flatout.errors import PeerLostError, PreemptedError
from flatout.launch.command import Attempt, launcher_argv, launcher_environment
from flatout.launch.reports import RankReport, Verdict, judge

POLL_S = 0.1
# once one rank has failed, the others leave by themselves within this time or are killed
GRACE_S = 10.0
# one that the others lost may still be writing down its own error
LOST_S = 2.0
TAIL_LINES = 40
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Policy:
    """When to start again, and with how few ranks."""

    max_restarts: int
    min_ranks: int | None


class Supervisor:
    """Runs attempts until one is complete, asked to stop, beyond cure, or one too many.

    `tell` gets one line per restart; `out` the first rank's log as it grows. Signals to this process go to the ranks.
    """

    def __init__(
        self, logs: Path, policy: Policy, env: Mapping[str, str], tell: Callable[[str], None], out: TextIO
    ) -> None:
        self._logs, self._policy, self._env, self._tell, self._out = logs, policy, env, tell, out
        self._num_signals = 0

    def run(self, attempt: Attempt) -> int:
        """Exit code of the run: 0, or the failing rank's own."""
        found = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._run(attempt)
        finally:
            for number, handler in found.items():
                signal.signal(number, handler)

    def _run(self, attempt: Attempt) -> int:
        lost_before: int | None = None
        for num_restarts in range(self._policy.max_restarts + 1):
            folder = new_attempt(self._logs)
            verdict = self._attempt(attempt, folder)
            if verdict.exit_code == 0:
                return 0
            if self._num_signals:
                return PreemptedError.exit_code if verdict.exit_code == PreemptedError.exit_code else 143
            if not verdict.is_curable or num_restarts == self._policy.max_restarts:
                self._show_end(verdict, folder)
                return verdict.exit_code
            if verdict.rank is not None and verdict.rank == lost_before:
                attempt = with_fewer(attempt, verdict.rank, self._policy.min_ranks)
            lost_before = verdict.rank
            left = f"restart {num_restarts + 1} of {self._policy.max_restarts}"
            self._tell(f"{verdict.why}; {left} with {attempt.start.num_procs} rank(s) here, logs in {folder}")
            time.sleep(PAUSE_S)
        raise AssertionError("the last attempt returns")

    def _attempt(self, attempt: Attempt, folder: Path) -> Verdict:
        env = launcher_environment(attempt, self._env, folder, os.cpu_count() or 1)
        log = Follower(folder / "rank-0.log", self._out)
        with (folder / "launcher.log").open("wb") as launcher_log:
            # a session of its own: Ctrl-C in a terminal comes to the ranks once, from here
            launcher = subprocess.Popen(
                launcher_argv(attempt, sys.executable),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=launcher_log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        num_passed_on, failed_at = 0, None
        while launcher.poll() is None:
            time.sleep(POLL_S)
            log.copy()
            reports = RankReport.read_all(folder)
            if num_passed_on < self._num_signals:
                num_passed_on = self._num_signals
                if not _signal_ranks(reports, signal.SIGTERM):
                    launcher.terminate()
            if failed_at is None and any(report.exit_code not in (None, 0, 75) for report in reports):
                failed_at = time.monotonic()
            if failed_at is not None:
                self._end(launcher, reports, time.monotonic() - failed_at)
        _signal_ranks(RankReport.read_all(folder), signal.SIGKILL)
        log.copy()
        return judge(RankReport.read_all(folder))

    def _end(self, launcher: subprocess.Popen[bytes], reports: list[RankReport], failed_s: float) -> None:
        """End what is left of an attempt in which a rank failed so long ago."""
        lost = {report.lost_rank for report in reports}
        if failed_s > LOST_S:
            # a stopped or blocked rank hears no other signal, and the launcher waits for it
            _signal_ranks([report for report in reports if report.rank in lost], signal.SIGKILL)
        if failed_s > GRACE_S and not _signal_ranks(reports, signal.SIGKILL):
            # no rank is left, and the launcher may wait long for a node that is gone
            launcher.kill()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def _show_end(self, verdict: Verdict, folder: Path) -> None:
        """The failing rank's last lines, where they were not shown as they came."""
        name = "launcher.log" if verdict.rank is None else f"rank-{verdict.rank}.log"
        path = folder / name
        if verdict.rank != 0 and path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            self._out.write(f"--- {path}\n" + "".join(line + "\n" for line in lines))
        where = "" if verdict.rank is None or verdict.exit_code == PeerLostError.exit_code else f"rank {verdict.rank}: "
        self._tell(f"{where}{verdict.why} (exit code {verdict.exit_code}; logs in {folder})")


def with_fewer(attempt: Attempt, rank: int, min_ranks: int | None) -> Attempt:
    """Without the rank where that is allowed, and where this node's ranks are all there are."""
    start = attempt.start
    if min_ranks is None or start.nodes.num_max > 1 or not start.num_procs.isdigit():
        return attempt
    num_procs = int(start.num_procs)
    if rank >= num_procs or num_procs - 1 < max(1, min_ranks):
        return attempt
    return replace(attempt, start=start.without(rank))


class Follower:
    """Copies what is added to a file that may not be there yet."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self._path, self._out = path, out
        self._num_bytes = 0

    def copy(self) -> None:
        """Write what came since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._num_bytes)
            content = file.read()
        # a character cut in two waits for its second half
        end = content.rfind(b"\n") + 1
        self._num_bytes += end
        self._out.write(content[:end].decode("utf-8", errors="replace"))
        self._out.flush()


def new_attempt(logs: Path) -> Path:
    """A new folder `attempt-K`, K above all there are; `latest` points to it."""
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    numbers = (path.name.removeprefix("attempt-") for path in logs.glob("attempt-*"))
    folder = logs / f"attempt-{max((int(number) for number in numbers if number.isdigit()), default=-1) + 1}"
    folder.mkdir(mode=0o700)
    pointer = logs / ".latest"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(folder.name)
    pointer.replace(logs / "latest")
    return folder


def _signal_ranks(reports: list[RankReport], number: int) -> int:
    """Send a signal to the ranks that are still there, also to one that told its end; returns to how many."""
    alive = [report.pid for report in reports if _is_rank(report.pid)]
    for pid in alive:
        os.kill(pid, number)
    return len(alive)


def _is_rank(pid: int) -> bool:
    """True while this pid is a process of flatout that leads its session, as the launcher starts ranks."""
    try:
        return os.getsid(pid) == pid and b"flatout" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (ProcessLookupError, FileNotFoundError, PermissionError):
        return False
