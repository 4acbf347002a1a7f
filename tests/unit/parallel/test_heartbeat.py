"""Heartbeats over real sockets, with a clock of the test's."""

import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from flatout.io.peer_sockets import PeerListener, listen
from flatout.parallel.fault_tolerance.heartbeat import Heartbeats, PeerFailure, RankStatus

WORKING = RankStatus(0, "step")
SECRET = "0123456789abcdef"
DEADLINE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Group:
    """Rank 0's server and the other ranks' clients in one process."""

    def __init__(self, world: int, hang_s: float = 10.0) -> None:
        self.clock = Clock()
        self.events: list[tuple[str, Any]] = []
        self.dropped: list[str] = []
        listener = PeerListener(listen("127.0.0.1"), SECRET, lambda _, why: self.dropped.append(why))
        self.address = listener.socket.getsockname()
        self.server = Heartbeats(
            0, world, hang_s, listener=listener, on_event=lambda *told: self.events.append(told), clock=self.clock
        )
        # one waits for its welcome, so it comes from a thread
        with ThreadPoolExecutor(1) as thread:
            self.clients: list[Heartbeats] = []
            for rank in range(1, world):
                heartbeats = Heartbeats(rank, world, hang_s, clock=self.clock)
                coming = thread.submit(heartbeats.connect, self.address, SECRET)
                self.until(coming.done)
                self.clients.append(coming.result())

    def until(self, done: Callable[[], Any], status: RankStatus = WORKING) -> None:
        """Rank 0 beats until something is so; nobody may be lost meanwhile."""
        for _ in self.beating():
            assert self.server.poll(0.01, status) is None
            if done():
                return

    def meet(self, status: RankStatus, *ranks: int) -> None:
        """These ranks tell their status and hear rank 0's, which is the same."""
        clients = [self.clients[rank - 1] for rank in ranks]
        for client in clients:
            assert client.poll(0.0, status) is None
        self.until(lambda: all(self.server.peers[rank].status == status for rank in ranks), status)
        for client in clients:
            assert client.poll(DEADLINE_S, status) is None

    def lost(self, status: RankStatus = WORKING) -> PeerFailure:
        """Rank 0 beats until it has found a loss."""
        for _ in self.beating():
            if failure := self.server.poll(0.01, status):
                return failure
        raise AssertionError

    @staticmethod
    def beating() -> Iterator[None]:
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            yield
        raise TimeoutError


@contextmanager
def raw_peer(group: Group, hello: bytes) -> Iterator[socket.socket]:
    """A connection that knows the secret, and what it says first."""
    with socket.create_connection(group.address) as connection:
        connection.sendall(SECRET.encode() + b" " + hello + b"\n")
        yield connection


def test_marks_arrive_and_nobody_is_lost():
    group = Group(3)
    for step in range(4):
        group.clock.now_s += 6
        group.meet(RankStatus(step, "sum", waits=True, num_changes=step), 1, 2)
    assert {rank: peer.status.step for rank, peer in group.server.peers.items()} == {1: 3, 2: 3}
    assert [peer.changed_at for peer in group.server.peers.values()] == [24.0, 24.0]


def test_a_closed_connection_is_a_death_told_to_all():
    group = Group(3)
    group.meet(RankStatus(4, "sum"), 1, 2)
    group.clients[0].peers[0].connection.close()  # as the kernel does for a killed process
    failure = group.lost()
    assert (failure.rank, failure.how, failure.status) == (1, "died", RankStatus(4, "sum"))
    assert "rank 1 on" in str(failure)
    assert "died; last heard of in step 5, phase sum" in str(failure)
    group.server.broadcast(failure)
    assert group.clients[1].poll(DEADLINE_S, RankStatus()) == failure


def test_silence_is_found_after_hang_s_on_both_sides():
    group = Group(3)
    group.clock.now_s = 9.0
    group.meet(WORKING, 2)
    group.clock.now_s = 11.0
    failure = group.lost()
    assert (failure.rank, failure.how) == (1, "has been silent for 11 s")
    group.clock.now_s = 22.0
    assert group.clients[1].poll(0.0, RankStatus()) is None  # reads the last answer
    group.clock.now_s = 33.0
    found = group.clients[1].poll(0.0, RankStatus())
    assert found is not None
    assert (found.rank, found.how) == (0, "has been silent for 11 s")


def test_a_lost_first_rank_is_named_with_its_own_phase():
    """Another may wait for it in its first step while it still starts."""
    group = Group(2)
    (one,) = group.clients
    one.poll(0.0, WORKING)
    group.until(lambda: group.server.peers[1].status == WORKING, RankStatus(0, "start"))
    assert one.poll(DEADLINE_S, WORKING) is None
    group.clock.now_s = 11.0
    failure = one.poll(0.0, WORKING)
    assert failure is not None
    assert (failure.rank, failure.status, failure.how) == (0, RankStatus(0, "start"), "has been silent for 11 s")


def test_a_goodbye_is_no_death_and_a_failure_names_its_cause_and_place():
    group = Group(3)
    one, two = group.clients
    one.close()
    group.until(lambda: group.server.peers[1].has_left)
    two.fail("DataError: row 3", 3, RankStatus(7, "step"))
    failure = group.lost()
    assert (failure.rank, failure.how, failure.exit_code) == (2, "failed (DataError: row 3)", 3)
    assert failure.status == RankStatus(7, "step")


def test_who_failed_by_itself_comes_before_who_died_of_it():
    group = Group(3)
    one, two = group.clients
    two.fail("RuntimeError: no", 7, WORKING)
    one.peers[0].connection.close()
    # both have arrived before rank 0 looks
    sockets = [peer.connection.socket for peer in group.server.peers.values()]
    for _ in group.beating():
        if len(select.select(sockets, [], [], 0.1)[0]) == 2:
            break
    failure = group.server.poll(0.0, WORKING)
    assert failure is not None
    assert (failure.rank, failure.is_reported) == (2, True)


def test_the_first_ranks_goodbye_is_no_death_however_long_another_stays():
    group = Group(3)
    one, two = group.clients
    two.close()
    group.until(lambda: group.server.peers[2].has_left)
    group.server.close()
    assert one.poll(DEADLINE_S, RankStatus(9, "finish")) is None
    group.clock.now_s = 1000.0
    for _ in range(3):
        started_s = time.monotonic()
        assert one.poll(0.05, RankStatus(9, "finish")) is None
    # a connection that has ended does not make it spin
    assert time.monotonic() - started_s >= 0.04
    one.close()


def test_a_rank_that_never_comes_is_named():
    group = Group(1, hang_s=5.0)
    group.server._world = 2
    assert group.server.poll(0.0, WORKING) is None
    group.clock.now_s = 6.0
    failure = group.lost()
    assert (failure.rank, failure.how) == (1, "never answered")


@pytest.mark.parametrize("hello", [b"{}", b'{"rank": 0}', b'{"rank": 2}', b'{"rank": true}', b'{"rank": "1"}'])
def test_who_is_no_rank_of_the_run_is_turned_away(hello):
    group = Group(2)
    with raw_peer(group, hello):
        group.until(lambda: group.dropped)
    assert "it claims to be rank" in group.dropped[0]
    group.meet(WORKING, 1)
    assert list(group.server.peers) == [1]


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b'{"status": 3}',
        b'{"status": {"step": "x", "phase": "", "waits": 0, "num_changes": 0}}',
        b'{"status": {"step": Infinity}}',
        b'{"event": "x", "facts": [1]}',
        b'{"failure": {"rank": 1}}',
    ],
)
def test_a_rank_that_sends_nonsense_is_lost_and_rank_0_goes_on(line):
    group = Group(1)
    group.server._world = 2
    with raw_peer(group, b'{"rank": 1, "host": "x"}') as connection:
        group.until(lambda: 1 in group.server.peers)
        connection.sendall(line + b"\n")
        failure = group.lost()
    assert (failure.rank, failure.is_reported) == (1, False)
    assert "sent an invalid heartbeat" in failure.how
