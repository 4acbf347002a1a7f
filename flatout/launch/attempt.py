"""How an attempt to run the ranks ended: their reports, the outcome that follows, and whether a restart may help."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from flatout.errors import FlatoutError, PeerLostError, PreemptedError
from flatout.io.durable_io import DurableIO
from flatout.io.stop_signals import SIGNAL_EXIT_CODE, SIGNALS

# an exception other than a FlatoutError
UNCAUGHT_EXIT_CODE = 1
# exit codes after which a restart from a checkpoint may help
RESTARTABLE = frozenset({UNCAUGHT_EXIT_CODE, PeerLostError.exit_code})
# exit codes of a rank that was asked to end immediately
INTERRUPTED = frozenset(SIGNAL_EXIT_CODE + number for number in SIGNALS)
# signals that point to a fault in the process itself
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


@dataclass(frozen=True, slots=True)
class RankReport:
    """When and how a rank started and ended. Times are seconds since 1970."""

    rank: int
    pid: int
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    """None while it runs, and of a rank that was killed."""
    error: str | None = None
    """The error that it reported."""
    lost_rank: int | None = None
    """The peer that it lost."""
    step: int | None = None
    """The completed steps at its end."""
    killed_by: int | None = None
    """The signal that ended it, as seen by its launcher, which then adds `step` and `phase`."""
    phase: str | None = None

    @property
    def place(self) -> str | None:
        """Where it ended: `the start`, or a step, counted from 1; None if unknown."""
        return None if self.step is None else "the start" if self.phase == "start" else f"step {self.step + 1}"

    def write(self, folder: Path) -> None:
        """Write the report to the attempt's folder; thread-safe. Raises ResourceError."""
        DurableIO().write_json(folder / f"rank-{self.rank}.json", asdict(self))

    @classmethod
    def read_all(cls, folder: Path) -> list[Self]:
        reports = (cls(**json.loads(path.read_text())) for path in folder.glob("rank-*.json"))
        return sorted(reports, key=lambda report: report.rank)

    def ended(self, exit_code: int, error: BaseException | None = None) -> Self:
        """Return the report with the end of this rank added, at the current time."""
        ended = replace(self, ended_at=time.time(), exit_code=exit_code)
        return (
            ended
            if error is None
            else replace(
                ended,
                error=str(error) if isinstance(error, FlatoutError) else repr(error),
                lost_rank=error.rank if isinstance(error, PeerLostError) else None,
                # set by `PeerWatch.guard` on errors of any class
                step=vars(error).get("step"),
                phase=vars(error).get("phase"),
            )
        )


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended: the failing rank, its exit code, and the reason in one line."""

    exit_code: int
    rank: int | None
    why: str
    crashed_at: str | None = None
    """The place where a rank crashed by itself; None for any other end."""


def classify_attempt(reports: Sequence[RankReport], *, out_of_memory: bool = False) -> AttemptOutcome:
    """Derive the outcome: from the first rank that failed by itself, else one that saved and stopped, else a lost one.

    `out_of_memory` means that the kernel killed a process for lack of memory during the attempt.
    """
    if reports and {report.exit_code for report in reports} == {0}:
        return AttemptOutcome(0, None, "complete")
    secondary = {None, 0, PeerLostError.exit_code, PreemptedError.exit_code, *INTERRUPTED}
    by_end = sorted(reports, key=lambda report: report.ended_at or 0.0)
    if failed := [report for report in by_end if report.exit_code not in secondary]:
        # prefer a rank's own failure to one that it reports for a peer
        first = min(failed, key=lambda report: report.lost_rank is not None)
        assert first.exit_code is not None
        culprit = first.rank if first.lost_rank is None else first.lost_rank
        crashed_at = first.place if first.exit_code == UNCAUGHT_EXIT_CODE else None
        return AttemptOutcome(first.exit_code, culprit, first.error or f"exit code {first.exit_code}", crashed_at)
    for report in reports:
        if report.exit_code == PreemptedError.exit_code:
            return AttemptOutcome(report.exit_code, report.rank, report.error or "stop requested; saved")
    lost_peers = [report for report in by_end if report.exit_code == PeerLostError.exit_code]
    killed = {report.rank: report for report in reports if report.exit_code is None}
    if not lost_peers and not killed:
        return AttemptOutcome(PeerLostError.exit_code, None, "no rank was started")
    rank = lost_peers[0].lost_rank if lost_peers else min(killed)
    lost = killed.get(-1 if rank is None else rank)
    why = (lost_peers[0].error or "a rank was lost") if lost_peers else f"rank {rank} was lost"
    is_crash = False
    if lost is not None and lost.killed_by is not None:
        by_kernel = out_of_memory and lost.killed_by == signal.SIGKILL
        is_crash = by_kernel or lost.killed_by in CRASH_SIGNALS
        name = signal.Signals(lost.killed_by).name
        why += f"; rank {rank} was killed by {name}"
        if by_kernel:
            why += " because this machine or container ran out of memory"
    return AttemptOutcome(PeerLostError.exit_code, rank, why, lost.place if lost and is_crash else None)
