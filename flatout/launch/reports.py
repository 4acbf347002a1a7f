"""What each rank leaves behind, and what all of it together says about an attempt."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from flatout.errors import FlatoutError, PeerLostError, PreemptedError

# a lost peer, or a crash without a class: going on from a checkpoint may cure them
INTERRUPTED = 130
CURABLE = frozenset({1, PeerLostError.exit_code})


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's beginning and end. `exit_code` is None until its end and stays so when it was killed.

    `lost_rank` is the peer it lost, `error` what it told. Times are seconds since 1970.
    """

    rank: int
    pid: int
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    error: str | None = None
    lost_rank: int | None = None

    def write(self, folder: Path) -> None:
        """Put the report into the attempt's folder; whole or not at all, also from several threads at once."""
        path = folder / f"rank-{self.rank}.json"
        half_done = path.with_suffix(f".{threading.get_ident()}.tmp")
        half_done.write_text(json.dumps(asdict(self)), encoding="utf-8")
        half_done.replace(path)

    @classmethod
    def read_all(cls, folder: Path) -> list[Self]:
        """All reports of an attempt, by rank."""
        return sorted((cls(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")), key=_rank)


def _rank(report: RankReport) -> int:
    return report.rank


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended: the failing rank's own exit code, which rank, and why in one line."""

    exit_code: int
    rank: int | None
    why: str

    @property
    def is_curable(self) -> bool:
        """True when going on from a checkpoint may help."""
        return self.exit_code in CURABLE


def judge(reports: Sequence[RankReport]) -> Verdict:
    """The first rank that failed by itself decides; then saved-and-stopped; then the rank that was lost."""
    codes = {report.exit_code for report in reports}
    if reports and codes == {0}:
        return Verdict(0, None, "complete")
    secondary = {None, 0, PeerLostError.exit_code, PreemptedError.exit_code, INTERRUPTED}
    failed = [report for report in reports if report.exit_code not in secondary]
    if failed:
        first = min(failed, key=lambda report: report.ended_at or 0.0)
        assert first.exit_code is not None
        return Verdict(first.exit_code, first.rank, first.error or f"exit code {first.exit_code}")
    for report in reports:
        if report.exit_code == PreemptedError.exit_code:
            return Verdict(report.exit_code, report.rank, report.error or "asked to stop and saved")
    told = [report for report in reports if report.exit_code == PeerLostError.exit_code]
    if told:
        first = min(told, key=lambda report: report.ended_at or 0.0)
        return Verdict(PeerLostError.exit_code, first.lost_rank, first.error or "a rank was lost")
    killed = [report for report in reports if report.exit_code is None]
    if killed:
        return Verdict(PeerLostError.exit_code, killed[0].rank, f"rank {killed[0].rank} was killed")
    return Verdict(PeerLostError.exit_code, None, "no rank was started")


class RankLog:
    """A rank's output goes to `rank-N.log`, its beginning and end to `rank-N.json`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._report = RankReport(rank, os.getpid(), time.time())

    def begin(self) -> None:
        """Send this process's output to the log, by file descriptor, so that what C code prints is there too."""
        path = self._folder / f"rank-{self._report.rank}.log"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(fd, stream.fileno())
        os.close(fd)
        self._report.write(self._folder)

    def end(self, exit_code: int, error: BaseException | None = None) -> None:
        """Tell how this rank ended; the watch's thread and the main thread may both, and the last one stands."""
        text = None if error is None else str(error) if isinstance(error, FlatoutError) else repr(error)
        lost = error.rank if isinstance(error, PeerLostError) else None
        replace(self._report, ended_at=time.time(), exit_code=exit_code, error=text, lost_rank=lost).write(self._folder)
