"""What an attempt's reports say together."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatout.errors import DataError, PeerLostError
from flatout.io.status_board import StatusBoard
from flatout.launch.attempt import RESTARTABLE, RankReport, classify_attempt


def report(rank: int, code: int | None, ended_at: float = 1.0, error: str = "e", lost: int | None = None) -> RankReport:
    return RankReport(rank, 1, 0.0, None if code is None else ended_at, code, error, lost)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 8])
def test_the_first_failure_of_its_own_decides(code):
    reports = [report(0, 7, 1.0), report(1, code, 3.0, "mine"), report(2, 3, 4.0), report(3, None), report(4, 75)]
    outcome = classify_attempt(reports)
    assert (outcome.exit_code, outcome.rank, outcome.why) == (code, 1, "mine")
    assert (outcome.exit_code in RESTARTABLE) == (code == 1)


def test_saved_and_stopped_comes_before_lost():
    assert classify_attempt([report(0, 75), report(1, None)]).exit_code == 75
    assert 75 not in RESTARTABLE


def test_a_lost_rank_is_named_by_who_told_first():
    outcome = classify_attempt([report(0, 7, 2.0, "later", 2), report(1, 7, 1.0, "rank 3 died", 3), report(3, None)])
    assert (outcome.exit_code, outcome.rank, outcome.why) == (7, 3, "rank 3 died")
    assert 7 in RESTARTABLE
    assert classify_attempt([report(0, None), report(1, 130)]).rank == 0


def test_a_crash_is_placed_where_its_rank_was_not_where_its_peers_last_heard_of_it():
    """Ranks die by themselves (a signal that shows a fault); the other one tells of an older step."""

    def crashed_at(killed_by: int, step: int | None, phase: str | None) -> str | None:
        dead = RankReport(1, 1, 0.0, killed_by=killed_by, step=step, phase=phase)
        told = RankReport(0, 1, 0.0, 1.0, 7, "rank 1 died", lost_rank=1, step=0)
        return classify_attempt([told, dead]).crashed_at

    assert crashed_at(signal.SIGSEGV, 41, "step") == "step 42"
    assert crashed_at(signal.SIGSEGV, 0, "step") == "step 1"
    assert crashed_at(signal.SIGABRT, 0, "start") == "the start"
    # nobody knows, or somebody else killed it
    assert crashed_at(signal.SIGSEGV, None, None) is None
    assert crashed_at(signal.SIGKILL, 41, "step") is None


def test_a_board_keeps_what_a_killed_process_wrote_last():
    board = StatusBoard.new(2)
    assert board is not None
    child = os.fork()
    if child == 0:
        for step in range(1000):
            board.write(1, step, "sum")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (board.read(0), board.read(1)) == (None, (999, "sum"))
    board.write(0, 3, "a phase of a name that is longer than a slot has room for, and so is cut at its end")
    assert board.read(1) == (999, "sum")
    os.close(board.fd)
    with (Path(__file__)).open() as other, pytest.raises(ValueError, match="is not a status board"):
        StatusBoard(other.fileno())


def test_all_done_and_nobody_there():
    assert classify_attempt([report(0, 0), report(1, 0)]).exit_code == 0
    assert classify_attempt([]).exit_code == 7
    assert classify_attempt([report(0, 0), report(1, None)]).exit_code == 7


def test_reports_are_written_and_read(tmp_path):
    for rank, error in enumerate([None, DataError("a.jsonl:3: bad"), PeerLostError("rank 1 died", 1), OSError("x")]):
        code = {None: 0}.get(error, getattr(error, "exit_code", 1))
        RankReport(rank, 1, 0.0).ended(code, error).write(tmp_path)
    reports = RankReport.read_all(tmp_path)
    assert [r.exit_code for r in reports] == [0, 3, 7, 1]
    assert [r.error for r in reports] == [None, "a.jsonl:3: bad", "rank 1 died", "OSError('x')"]
    assert reports[2].lost_rank == 1


def test_two_threads_may_tell_of_one_end_at_once(tmp_path):
    """The watch's thread and the main thread both do when a peer is lost."""
    started = RankReport(0, 1, 0.0)
    errors = [PeerLostError("rank 1 died" * length, 1) for length in (1, 20)] * 200
    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(lambda error: started.ended(error.exit_code, error).write(tmp_path), errors):
            (found,) = RankReport.read_all(tmp_path)
            assert (found.exit_code, found.lost_rank) == (7, 1)
