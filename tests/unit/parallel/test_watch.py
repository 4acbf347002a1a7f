"""Two watches in one process: what one rank does is told to the other."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from flatout.config.parallel import FaultsConfig
from flatout.errors import DataError, NumericError, PeerLostError, PreemptedError
from flatout.io import bounded_wait
from flatout.io.status_board import StatusBoard
from flatout.parallel.fault_tolerance import peer_watch as watch_module
from flatout.parallel.fault_tolerance.peer_watch import OnEvent, OnPeerLost, PeerWatch
from flatout.parallel.rank import Rank
from flatout.track.callback import Callback, Reporter
from tests.usual import usual

DEADLINE_S = 60.0


class Pair:
    """The watches of two ranks in one process, what they told, and with what they would have ended their process."""

    def __init__(
        self, on_event: OnEvent | None = None, on_peer_lost: Sequence[OnPeerLost] = (), **faults: float
    ) -> None:
        self.on_event, self.on_peer_lost = on_event, on_peer_lost
        self.told: list[list[Any]] = [[], []]
        self.left: list[list[PeerLostError]] = [[], []]
        self.codes: list[list[int]] = [[], []]
        self.watches = [self.made(rank, **faults) for rank in range(2)]
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as threads:
            for started in [
                threads.submit(self.watches[rank].start, Rank(rank, 2, rank, 2), store) for rank in range(2)
            ]:
                started.result()

    def made(self, rank: int, **faults: float) -> PeerWatch:
        def leave(error: PeerLostError) -> None:
            self.left[rank].append(error)

        return PeerWatch(
            FaultsConfig(**{"hang_s": 60, **faults}),
            self.on_event if rank == 0 and self.on_event else lambda *words: self.told[rank].append(words),
            [lambda error: self.codes[rank].append(error.exit_code), *self.on_peer_lost],
            leave=leave,  # type: ignore[arg-type]
        )

    def until(self, done: Callable[[], Any]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < until_s
            time.sleep(0.01)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(watch_module, "LEAVE_S", 0.2)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    return Pair


def from_a_collective() -> NoReturn:
    """A plain RuntimeError out of torch.distributed, as gloo tells a lost peer, with words that say nothing."""
    dist.rendezvous("nowhere://", 0, 1)
    raise AssertionError


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_told_to_the_other_with_its_exit_code(pair, failing):
    both = pair()
    both.watches[failing].set_phase("step", 6)
    with pytest.raises(DataError) as own, both.watches[failing].guard():
        raise DataError("row 3 is bad")
    other = 1 - failing
    said = f"rank {failing} on .* failed .DataError: row 3 is bad. in step 7, phase step"
    with pytest.raises(PeerLostError, match=said) as caught, both.watches[other].guard():
        from_a_collective()
    assert (caught.value.rank, caught.value.step, caught.value.exit_code) == (failing, 6, 3)
    assert vars(own.value)["step"] == 6
    both.until(lambda: both.left[other] and both.codes[other])
    # a rank that a collective held would have been ended, with the same words and code
    assert str(both.left[other][0]) == str(caught.value)
    assert both.codes == ([[], [3]] if failing == 0 else [[3], []])
    assert both.left[failing] == []
    assert both.told[other][0][0] == "peer_lost"


def test_ranks_that_fail_at_the_same_moment_both_end_with_their_own_error(pair):
    """A loss that is not finite is found by all ranks at once: none of them has lost another."""
    both = pair()
    errors = [NumericError(f"step 2 on rank {rank}") for rank in range(2)]

    def fail(rank: int) -> None:
        with both.watches[rank].guard():
            raise errors[rank]

    with ThreadPoolExecutor(2) as threads:
        ended = [threads.submit(fail, rank) for rank in range(2)]
        assert [one.exception() for one in ended] == errors
    # a rank that heard of the other's end first passes on the same code
    assert {code for codes in both.codes for code in codes} <= {NumericError.exit_code}


@pytest.mark.parametrize("first", usual([0, 1], [0]))
def test_leaving_in_good_order_is_no_loss(pair, first):
    both = pair()
    with both.watches[first].guard():
        pass
    # the other one is still at work
    assert not both.watches[1 - first]._lost.wait(1)
    with pytest.raises(PreemptedError), both.watches[1 - first].guard():
        raise PreemptedError("saved")
    assert not both.watches[1 - first]._lost.wait(0.3)
    assert (both.told, both.left) == ([[], []], [[], []])


def test_an_error_of_its_own_stays_what_it_is_whatever_it_says(pair):
    """It is told from a lost peer's by where it comes from: words prove nothing, and nobody waits for the watch."""
    both = pair()
    with pytest.raises(RuntimeError, match="gloo"), both.watches[1].guard():
        raise RuntimeError("gloo: connection closed by peer")
    both.until(both.watches[0]._lost.is_set)


def test_a_lost_peer_is_told_from_a_backward_pass_that_has_no_frame_of_a_collective(pair):
    """As under context.parallel and experts.parallel: gloo raises from C++, with the place in its source."""
    both = pair()
    both.watches[1]._heartbeats.peers[0].connection.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    with pytest.raises(PeerLostError, match=r"rank 1 on .* died") as caught, both.watches[0].guard():
        raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
    assert caught.value.rank == 1


@pytest.mark.parametrize("has_board", [True, False])
def test_a_dead_rank_is_named_with_the_step_that_it_was_in(pair, monkeypatch, has_board):
    """Its last heartbeat is older; without a launcher of ours there is nothing else, and the error says so."""
    if has_board:
        board = StatusBoard.new(2)
        assert board is not None
        monkeypatch.setenv("FLATOUT_STATUS_BOARD", str(board.fd))
    both = pair()
    both.until(lambda: both.watches[0]._heartbeats.peers)  # type: ignore[union-attr]
    both.watches[1].set_phase("step", 41)
    both.watches[1]._heartbeats.peers[0].connection.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    both.until(lambda: both.left[0])
    said = "died in step 42, phase step" if has_board else "died; last heard of in step "
    assert said in str(both.left[0][0])


def test_who_does_not_move_is_named(pair):
    """Both threads beat, but rank 1 waits for data while rank 0 waits in a sum."""
    both = pair(stall_s=1)
    both.watches[0].set_phase("sum", 4)
    both.watches[1].set_phase("step", 4)
    both.until(lambda: both.left[0])
    assert both.left[0][0].rank == 1
    assert "has made no progress for" in str(both.left[0][0])
    assert "faults.stall_s" in str(both.left[0][0])


@pytest.mark.parametrize("phase", usual(["evaluate", "save"], ["save"]))
def test_a_long_phase_has_a_bound_of_its_own(pair, phase):
    both = pair(stall_s=1, long_phase_s=2)
    both.watches[0].set_phase("sum", 4)
    both.watches[1].set_phase(phase, 4)
    started_s = time.monotonic()
    both.until(lambda: both.left[0])
    assert time.monotonic() - started_s > 1.9
    said = f"rank 1 on {socket.gethostname()} has made no progress for 2 s (faults.long_phase_s)"
    assert said in str(both.left[0][0])


def test_a_phase_that_says_that_it_goes_on_may_take_longer(pair):
    both = pair(long_phase_s=2)
    both.watches[0].set_phase("sum", 4)
    both.watches[1].set_phase("sample", 4)
    for _ in range(25):
        assert not both.watches[0]._lost.wait(0.1)
        both.watches[1].alive()
    both.until(lambda: both.left[0])


@pytest.mark.parametrize("waiting", usual([0, 1], [1]))
def test_who_is_waited_for_is_told(pair, monkeypatch, waiting):
    monkeypatch.setattr(bounded_wait, "NOTICE_AFTER_S", 0.3)
    both = pair()
    both.watches[waiting].set_phase("sum", 4)
    both.watches[1 - waiting].set_phase("evaluate", 4)
    # rank 0 may have heard of the other's status before
    both.until(lambda: any(facts["phase"] == "evaluate" for _, facts in both.told[0]))
    kind, facts = both.told[0][-1]
    assert (kind, facts["step"]) == ("waiting", 5)
    assert facts["for"] == f"rank {1 - waiting} on {socket.gethostname()}"
    assert (facts["at_most_s"], facts["setting"]) == (7200.0, "faults.long_phase_s")
    num_told = len(both.told[0])
    assert not both.watches[0]._lost.wait(1)
    assert len(both.told[0]) == num_told


def test_an_event_of_another_rank_is_told_by_the_first(pair):
    both = pair()
    both.watches[1].event("out_of_memory", {"step": 3})
    both.until(lambda: both.told[0])
    assert both.told == [[("out_of_memory", {"rank": 1, "step": 3})], []]


class Slow(Callback):
    """A callback that is still at work on a stage, and that notes events."""

    def __init__(self) -> None:
        self.is_at_work, self.may_go_on = threading.Event(), threading.Event()
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def on_stage(self, name: str, text: str) -> None:
        self.is_at_work.set()
        self.may_go_on.wait(DEADLINE_S)

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.events.append((kind, facts))


def test_a_slow_callback_holds_up_no_heartbeat(pair):
    """While it works, rank 0 hears of an event and then of a failure; the events follow in their order."""
    slow = Slow()
    reporter = Reporter(slow)
    both = pair(reporter.post)
    with ThreadPoolExecutor(1) as training:
        stage = training.submit(reporter.stage, "plan", "")
        try:
            assert slow.is_at_work.wait(DEADLINE_S)
            for step in (3, 4):
                both.watches[1].event("out_of_memory", {"step": step})
            with pytest.raises(DataError), both.watches[1].guard():
                raise DataError("row 3 is bad")
            both.until(lambda: both.left[0])
            assert (slow.events, stage.done()) == ([], False)
        finally:
            slow.may_go_on.set()
    both.until(lambda: len(slow.events) == 3)
    assert [kind for kind, _ in slow.events] == ["out_of_memory", "out_of_memory", "peer_lost"]
    assert [facts["step"] for _, facts in slow.events[:2]] == [3, 4]


def test_a_disk_that_stalls_while_the_loss_is_noted_keeps_no_process_alive(pair):
    stalled = threading.Event()
    try:
        both = pair(on_peer_lost=[lambda error: stalled.wait(DEADLINE_S) and None])
        with pytest.raises(DataError), both.watches[1].guard():
            raise DataError("row 3 is bad")
        both.until(lambda: both.left[0])
        assert not stalled.is_set()
    finally:
        stalled.set()


NOBODY_READS = """
import os
from flatout.errors import PeerLostError
from flatout.parallel.fault_tolerance.peer_watch import leave

os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 512):
        pass
except BlockingIOError:
    os.set_blocking(2, True)
leave(PeerLostError("rank 1 died", 1))
"""


def test_a_terminal_that_takes_no_text_keeps_no_process_alive():
    with subprocess.Popen([sys.executable, "-c", NOBODY_READS], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(DEADLINE_S) == 7
        finally:
            process.kill()


HOLDS_THE_INTERPRETER = """
import ctypes, time
import torch.distributed as dist
from flatout.config.parallel import FaultsConfig
from flatout.parallel.fault_tolerance.peer_watch import PeerWatch
from flatout.parallel.rank import Rank

def stuck_in_a_library():
    ctypes.PyDLL(None).sleep(4)

PeerWatch(FaultsConfig(hang_s=3), print).start(Rank(0, 2), dist.HashStore())
time.sleep(0.5)
stuck_in_a_library()
"""


def test_a_rank_that_holds_the_interpreter_shows_where():
    """No thread of Python can run in it, so the others know only that it is silent."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", HOLDS_THE_INTERPRETER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    assert "stuck_in_a_library" in done.stderr
