"""Heartbeats over real sockets, with a clock of the test's."""

import socket
import time
from collections.abc import Callable

from flatout.parallel.heartbeat import Hub, Loss, Mark, Spoke

WORKING = Mark(0, "step")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def group(world: int, clock: Callable[[], float], hang_s: float = 10.0) -> tuple[Hub, list[Spoke]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    hub = Hub(listener, token=7, world=world, hang_s=hang_s, clock=clock)
    spokes = [Spoke(address, token=7, rank=rank, hang_s=hang_s, clock=clock) for rank in range(1, world)]
    meet(hub, spokes)
    return hub, spokes


def meet(hub: Hub, spokes: list[Spoke], step: int = 0) -> list[Loss]:
    """Everybody beats a few times; what was lost."""
    losses = []
    for _ in range(3):
        losses += [loss for spoke in spokes if (loss := spoke.beat(Mark(step, "sum")))]
        time.sleep(0.01)
        if loss := hub.beat(0.01, Mark(step, "sum")):
            losses.append(loss)
    return losses


def test_marks_arrive_and_nobody_is_lost() -> None:
    clock = Clock()
    hub, spokes = group(3, clock)
    for step in range(4):
        clock.now_s += 6
        assert meet(hub, spokes, step) == []
    assert {rank: peer.mark for rank, peer in hub.peers.items()} == {1: Mark(3, "sum"), 2: Mark(3, "sum")}


def test_a_closed_connection_is_a_death_told_to_all() -> None:
    hub, (one, two) = group(3, Clock())
    meet(hub, [one, two], 4)
    one._line.close()  # as the kernel does for a killed process
    loss = hub.beat(1.0, WORKING)
    assert loss is not None
    assert (loss.rank, loss.how, loss.mark) == (1, "died", Mark(4, "sum"))
    assert "rank 1 on" in str(loss)
    assert "died in step 5, phase sum" in str(loss)
    hub.tell(loss)
    two.wait(1.0)
    assert two.beat(Mark()) == loss


def test_silence_is_found_after_hang_s_on_both_sides() -> None:
    clock = Clock()
    hub, (_, two) = group(3, clock)
    clock.now_s = 9.0
    meet(hub, [two])
    clock.now_s = 11.0
    loss = hub.beat(0.0, WORKING)
    assert loss is not None
    assert (loss.rank, loss.how) == (1, "has been silent for 11 s")
    assert two.beat(Mark()) is None  # reads the last answer
    clock.now_s = 22.0
    loss = two.beat(Mark())
    assert loss is not None
    assert loss.rank == 0


def test_a_lost_first_rank_is_named_with_its_own_phase() -> None:
    """Another may wait for it in its first step while it still starts."""
    clock = Clock()
    hub, (one,) = group(2, clock)
    assert hub.beat(1.0, Mark(0, "start")) is None
    one.beat(WORKING)
    assert hub.beat(1.0, Mark(0, "start")) is None
    one.wait(1.0)
    assert one.beat(WORKING) is None
    clock.now_s = 11.0
    loss = one.beat(WORKING)
    assert loss is not None
    assert (loss.rank, loss.mark, loss.how) == (0, Mark(0, "start"), "has been silent for 11 s")


def test_a_goodbye_is_no_death_and_a_failure_names_its_cause() -> None:
    hub, (one, two) = group(3, Clock())
    one.close()
    time.sleep(0.02)
    assert hub.beat(1.0, WORKING) is None
    assert hub.beat(0.0, WORKING) is None
    two.fail("DataError: row 3")
    time.sleep(0.02)
    loss = hub.beat(1.0, WORKING)
    assert loss is not None
    assert (loss.rank, loss.how) == (2, "failed (DataError: row 3)")


def test_the_first_ranks_goodbye_is_no_death_however_long_another_stays() -> None:
    hub, (one, two) = group(3, Clock())
    two.close()
    time.sleep(0.02)
    assert hub.beat(1.0, WORKING) is None
    hub.close()
    for _ in range(3):
        started_s = time.monotonic()
        one.wait(0.05)
        assert one.beat(Mark(9, "finish")) is None
    # a connection that has ended does not make it spin
    assert time.monotonic() - started_s >= 0.04
    one.close()


def test_a_rank_that_never_comes_is_named() -> None:
    clock = Clock()
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(listener, token=7, world=2, hang_s=5.0, clock=clock)
    assert hub.beat(0.0, WORKING) is None
    clock.now_s = 6.0
    loss = hub.beat(0.0, WORKING)
    assert loss is not None
    assert (loss.rank, loss.how) == (1, "never answered")


def test_strangers_change_nothing() -> None:
    clock = Clock()
    hub, spokes = group(2, clock)
    address = hub._listener.getsockname()
    for content in (b"\xff\xfe\n", b"[1]\n", b'{"token": 8, "rank": 1, "host": "x"}\n', b'{"token": 7, "rank": 5}\n'):
        with socket.create_connection(address) as stranger:
            stranger.sendall(content)
            assert meet(hub, spokes) == []
    assert list(hub.peers) == [1]
    assert hub._strangers == []
