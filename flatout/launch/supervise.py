"""Supervise the ranks of this node: show the first one's log, end them together, restart them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from flatout.config.parallel import FaultsConfig
from flatout.environment import LAUNCHED
from flatout.errors import PeerLostError, PreemptedError, counted
from flatout.io.bounded_wait import POLL_S, BoundedWait
from flatout.io.own_files import kill_group
from flatout.io.status_board import StatusBoard
from flatout.io.stop_signals import SIGNAL_EXIT_CODE, StopSignals
from flatout.launch.attempt import RESTARTABLE, UNCAUGHT_EXIT_CODE, AttemptOutcome, RankReport, classify_attempt
from flatout.launch.launch_mode import SpawnRanks
from flatout.launch.ranks import count_gpus, count_oom_kills, shared_environment, start_ranks
from flatout.launch.rendezvous import Rendezvous

# after one rank failed, the others must exit within this time or are killed
GRACE_S = 10.0
# a rank that its peers report as lost may still be writing its own error
LOST_S = 2.0
# node 0's restart message may arrive after the local ranks exit
LAST_WORD_S = 2.0
TAIL_LINES = 40
PAUSE_S = 1.0


class _Stopped(Exception):  # noqa: N818  (a signal, not an error)
    """A signal arrived before the ranks were started, or ended them before they saved."""


class Supervisor:
    """Restarts the ranks until an attempt completes, is asked to stop, or fails for good or too often (max_restarts).

    `argv` follows `python -m flatout`. `env` has the secret with which ranks authenticate. `log` gets one line per
    restart; the first rank's log is copied to `out` as it grows. The first signal to this process asks the ranks to
    save and stop; a second one kills them.
    """

    def __init__(
        self,
        logs: Path,
        argv: Sequence[str],
        faults: FaultsConfig,
        rendezvous: Rendezvous,
        env: Mapping[str, str],
        log: Callable[[str], None],
        out: TextIO,
    ) -> None:
        self._logs, self._argv, self._faults, self._rendezvous = logs, argv, faults, rendezvous
        self._env, self._log, self._out = env, log, out
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._signals = StopSignals(self._kill, on_first=self._stop_unless_started)
        self._is_killed = False

    @property
    def signal(self) -> int | None:
        """The signal that asked for a stop."""
        return self._signals.number

    def run(self, mode: SpawnRanks) -> int:
        """Run and return the exit code: 0, the failing rank's, or 128 + N if signal N ended it before it saved."""
        with self._signals:
            try:
                return self._run(mode)
            except _Stopped:
                assert self._signals.number is not None
                self._log("killed; steps since the last checkpoint are lost" if self._is_killed else "stopped")
                return SIGNAL_EXIT_CODE + self._signals.number
            finally:
                self._rendezvous.close()

    def _run(self, mode: SpawnRanks) -> int:
        if mode.num_procs == "gpu":
            mode = replace(mode, num_procs=count_gpus(self._faults.join_s, "faults.join_s"))
        lost_before: int | None = None
        crashed_before: str | None = None
        num_restarts = 0
        while True:
            folder, outcome, membership_changed = self._attempt(mode)
            if outcome.exit_code == 0 or (self._signals.number and outcome.exit_code == PreemptedError.exit_code):
                return outcome.exit_code
            if self._signals.number is not None:
                raise _Stopped
            if membership_changed:
                self._log(f"a node joined: all nodes restart, logs in {folder}")
                continue
            is_over = outcome.exit_code not in RESTARTABLE or num_restarts == self._faults.max_restarts
            if outcome.crashed_at is not None and outcome.crashed_at == crashed_before:
                self._log(f"{crashed_before} crashed again after a restart: restarting does not help")
                is_over = True
            if is_over:
                path = folder / f"rank-{outcome.rank}.log"
                # the log of rank 0 was already shown
                if outcome.rank != 0 and path.exists():
                    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
                    self._out.write(f"--- {path}\n" + "".join(line + "\n" for line in lines))
                is_its_own = outcome.rank is not None and outcome.exit_code != PeerLostError.exit_code
                where = f"rank {outcome.rank}: " if is_its_own else ""
                self._log(f"{where}{outcome.why} (exit code {outcome.exit_code}; logs in {folder})")
                return outcome.exit_code
            if outcome.rank is not None and outcome.rank == lost_before:
                mode = with_fewer(mode, outcome.rank, self._faults.min_ranks)
            lost_before, crashed_before = outcome.rank, outcome.crashed_at
            num_restarts += 1
            left = f"restart {num_restarts} of {self._faults.max_restarts}"
            self._log(f"{outcome.why}; {left} with {counted(int(mode.num_procs), 'rank')} here, logs in {folder}")
            time.sleep(PAUSE_S)

    def _attempt(self, mode: SpawnRanks) -> tuple[Path, AttemptOutcome, bool]:
        """Start this node's ranks once; return the log folder, the outcome, and whether all nodes must restart."""
        num_ranks = int(mode.num_procs)
        info = self._rendezvous.next_rendezvous(num_ranks)
        folder = new_attempt(self._logs)
        env = shared_environment(self._env, info, num_ranks, visible=mode.visible, logs=folder)
        num_oom_kills = count_oom_kills()
        board = StatusBoard.new(num_ranks)
        self._ranks = start_ranks(self._argv, info, num_ranks, env, folder, board)
        if info.listener is not None:
            info.listener.close()
        try:
            membership_changed = self._watch(folder)
        finally:
            for process in self._ranks.values():
                kill_group(process)
        self._env = {**self._env, LAUNCHED: str(time.time())}
        reports = {report.rank: report for report in RankReport.read_all(folder)}
        for rank, process in self._ranks.items():
            report, code = reports.get(rank, RankReport(rank, process.pid, 0.0)), process.wait()
            if code < 0:
                step, phase = (board and board.read(rank - info.first_rank)) or (None, None)
                report = replace(report, killed_by=-code, step=step, phase=phase)
            elif report.exit_code is None:
                why = "its process ended before the run, with exit code 0: code such as os._exit(0) ended it"
                report = replace(report, exit_code=code or UNCAUGHT_EXIT_CODE, error=report.error if code else why)
            reports[rank] = report
        ended = [reports[rank] for rank in self._ranks]
        self._ranks = {}
        outcome = classify_attempt(ended, out_of_memory=count_oom_kills() > num_oom_kills)
        until_s = time.monotonic() + LAST_WORD_S
        is_saved = outcome.exit_code == PreemptedError.exit_code and self._signals.number is None
        while is_saved and not membership_changed and mode.nodes.num_max > 1 and time.monotonic() < until_s:
            membership_changed = self._rendezvous.membership_changed()
            time.sleep(POLL_S)
        return folder, outcome, membership_changed

    def _watch(self, folder: Path) -> bool:
        """Wait until all ranks have ended; return True if another node has joined and all must restart."""
        log, log_bytes = folder / "rank-0.log", 0
        was_asked = membership_changed = False
        failed_at: float | None = None
        wait: BoundedWait | None = None
        while None in (codes := {rank: process.poll() for rank, process in self._ranks.items()}).values():
            time.sleep(POLL_S)
            log_bytes = copy_lines(log, self._out, log_bytes)
            membership_changed = membership_changed or self._rendezvous.membership_changed()
            if (self._signals.number is not None or membership_changed) and not was_asked:
                was_asked = True
                for process in self._ranks.values():
                    process.terminate()
            if failed_at is None and any(code not in (None, 0, PreemptedError.exit_code) for code in codes.values()):
                failed_at = time.monotonic()
            if failed_at is not None:
                failed_s = time.monotonic() - failed_at
                # a stopped or blocked rank reacts to no other signal
                lost = {report.lost_rank for report in RankReport.read_all(folder)} if failed_s > LOST_S else set()
                for rank, process in self._ranks.items():
                    if process.poll() is None and (rank in lost or failed_s > GRACE_S):
                        kill_group(process)
            elif any(code is not None for code in codes.values()):
                wait = wait or BoundedWait(self._faults.long_phase_s, "faults.long_phase_s", self._log)
                left = ", ".join(str(rank) for rank, code in codes.items() if code is None)
                try:
                    wait.check(f"rank {left} to exit")
                except PeerLostError as error:
                    self._log(str(error))
                    failed_at = time.monotonic() - GRACE_S
        copy_lines(log, self._out, log_bytes)
        return membership_changed

    def _stop_unless_started(self) -> None:
        if not self._ranks:
            raise _Stopped

    def _kill(self) -> None:
        self._is_killed = True
        for process in self._ranks.values():
            kill_group(process)


def with_fewer(mode: SpawnRanks, rank: int, min_ranks: int | None) -> SpawnRanks:
    """Drop the rank, if `min_ranks` allows it and this is the only node."""
    if min_ranks is None or mode.nodes.num_max > 1 or mode.num_procs == "gpu":
        return mode
    if rank >= mode.num_procs or mode.num_procs - 1 < max(1, min_ranks):
        return mode
    visible = mode.visible and mode.visible[:rank] + mode.visible[rank + 1 :]
    return replace(mode, num_procs=mode.num_procs - 1, visible=visible)


def copy_lines(path: Path, out: TextIO, begin: int) -> int:
    """Write a file's lines from byte `begin` on to `out`; return where the next call begins. It may not exist yet."""
    if not path.exists():
        return begin
    with path.open("rb") as file:
        file.seek(begin)
        content = file.read()
    # whole lines only, so that no multi-byte character is split
    end = content.rfind(b"\n") + 1
    out.write(content[:end].decode("utf-8", errors="replace"))
    out.flush()
    return begin + end


def new_attempt(logs: Path) -> Path:
    """Make a new folder `attempt-K`, numbered above all existing ones, and point the link `latest` to it."""
    logs.mkdir(parents=True, exist_ok=True)
    numbers = (path.name.removeprefix("attempt-") for path in logs.glob("attempt-*"))
    folder = logs / f"attempt-{max((int(number) for number in numbers if number.isdigit()), default=-1) + 1}"
    folder.mkdir()
    pointer = logs / ".latest"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(folder.name)
    pointer.replace(logs / "latest")
    return folder
