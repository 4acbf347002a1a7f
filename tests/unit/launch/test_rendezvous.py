"""Nodes that meet over real sockets, each in a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from flatout.errors import PeerLostError, ResourceError
from flatout.io import bounded_wait
from flatout.io.peer_sockets import listen
from flatout.launch import rendezvous
from flatout.launch.launch_mode import Nodes
from flatout.launch.rendezvous import ClientRendezvous, HostRendezvous, RendezvousInfo

SECRET = "0123456789abcdef"
DEADLINE_S = 60.0


class Threads:
    """What each node's `meet` came to."""

    def __init__(self) -> None:
        self.met: dict[int, RendezvousInfo | PeerLostError] = {}
        self._threads: list[threading.Thread] = []

    def start(self, node: int, meet: Callable[[], RendezvousInfo]) -> None:
        def run() -> None:
            try:
                self.met[node] = meet()
            except PeerLostError as error:
                self.met[node] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        self._threads.clear()
        return {node: self.met[node] for node in sorted(self.met)}


class Cluster:
    """Nodes by number on loopback, with what they said."""

    def __init__(self, num_min: int, num_max: int, join_s: float = DEADLINE_S, clients: Any = None) -> None:
        self.said: list[str] = []
        nodes = Nodes(num_min, num_max, 0, "127.0.0.1:0")
        self.host = HostRendezvous(nodes, SECRET, join_s=join_s, log=self.said.append)
        self.endpoint = f"127.0.0.1:{self.host._listener.socket.getsockname()[1]}"
        self.nodes: dict[int, HostRendezvous | ClientRendezvous] = {0: self.host}
        for number in range(1, num_max) if clients is None else clients:
            nodes = Nodes(num_min, num_max, number, self.endpoint)
            self.nodes[number] = ClientRendezvous(nodes, SECRET, join_s=join_s, log=self.said.append)

    def meet(self, *numbers: int, num_ranks: int = 2) -> dict[int, Any]:
        threads = Threads()
        for number in numbers:
            threads.start(number, lambda number=number: self.nodes[number].next_rendezvous(num_ranks + number))
        met = threads.join()
        for info in met.values():
            if isinstance(info, RendezvousInfo) and info.listener is not None:
                info.listener.close()
        return met

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


@contextmanager
def cluster(*words: Any, **more: Any) -> Iterator[Cluster]:
    made = Cluster(*words, **more)
    try:
        yield made
    finally:
        made.close()


def test_nodes_agree_on_ranks_and_on_where_they_meet():
    with cluster(3, 3) as three:
        for _ in range(2):  # a restart meets again
            met = three.meet(0, 1, 2)
            assert [met[node].first_rank for node in range(3)] == [0, 2, 5]
            assert {info.world for info in met.values()} == {9}
            assert len({(info.host, info.port) for info in met.values()}) == 1
            assert [info.listener is not None for info in met.values()] == [True, False, False]


def test_fewer_nodes_go_on_and_take_one_back(monkeypatch):
    monkeypatch.setattr(rendezvous, "LAST_CALL_S", 0.5)
    with cluster(1, 3) as three:
        met = three.meet(0, 1)
        assert (met[0].world, met[1].first_rank) == (5, 2)
        assert not three.host.membership_changed()
        assert not three.nodes[1].membership_changed()
        threads = Threads()
        threads.start(2, lambda: three.nodes[2].next_rendezvous(4))
        until(three.host.membership_changed)
        until(three.nodes[1].membership_changed)
        for number in (0, 1):
            threads.start(number, lambda number=number: three.nodes[number].next_rendezvous(2 + number))
        assert {info.world for info in threads.join().values()} == {9}


def test_a_node_that_starts_again_is_no_newcomer():
    with cluster(2, 2) as two:
        two.meet(0, 1)
        threads = Threads()
        threads.start(1, lambda: two.nodes[1].next_rendezvous(3))
        until(lambda: two.host.membership_changed() or two.host._joining)
        assert not two.host.membership_changed()
        threads.start(0, lambda: two.host.next_rendezvous(2))
        assert {info.world for info in threads.join().values()} == {5}


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_node_is_told_and_bounded(monkeypatch, missing):
    monkeypatch.setattr(bounded_wait, "NOTICE_AFTER_S", 0.2)
    with cluster(2, 2, join_s=1.0) as two:
        if missing == 0:
            two.host.close()
        error = two.meet(1 - missing)[1 - missing]
    assert isinstance(error, PeerLostError)
    assert f"node {missing}" in str(error)
    assert "faults.join_s" in str(error)
    assert f"node {missing}" in two.said[0]
    assert "at most 1 s (faults.join_s)" in two.said[0]


def test_another_secret_lets_no_node_in_and_says_so():
    with cluster(2, 2, clients=()) as one:
        nodes = Nodes(2, 2, 1, one.endpoint)
        one.nodes[1] = ClientRendezvous(nodes, "another-secret-0", join_s=0.5, log=one.said.append)
        threads = Threads()
        threads.start(1, lambda: one.nodes[1].next_rendezvous(2))
        until(lambda: one.host.membership_changed() or threads.met)
    assert "check that FLATOUT_SECRET is the same" in str(threads.join()[1])
    assert one.said == ["rejected 127.0.0.1: it did not send the secret of this run"]


def test_a_taken_port_is_told():
    with ExitStack() as stack:
        taken = stack.enter_context(listen("127.0.0.1"))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError, match=f"--rdzv {endpoint}: node 0 cannot listen there"):
            HostRendezvous(Nodes(2, 2, 0, endpoint), SECRET, join_s=1.0, log=print)


def until(done: Callable[[], Any]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.01)
