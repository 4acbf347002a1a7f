"""Two watches in one process: what one rank does is told to the other."""

import subprocess
import sys
import threading
from typing import Any

import pytest

from flatout.config.faults import FaultsConfig
from flatout.errors import DataError, PeerLostError, PreemptedError
from flatout.parallel import watch as watch_module
from flatout.parallel.rank import Rank
from flatout.parallel.watch import Watch


class Together:
    """Two threads as two ranks that exchange values."""

    def __init__(self, rank: int, shared: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank = Rank(rank, 2, rank)
        self._shared, self._barrier = shared, barrier

    def exchange(self, value: Any) -> list[Any]:
        self._shared[self.rank.index] = value
        self._barrier.wait(10)
        return [self._shared[0], self._shared[1]]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watch_module, "LEAVE_S", 0.2)
    told: list[list[Any]] = [[], []]
    left: list[list[PeerLostError]] = [[], []]

    def made(rank: int, **faults: float) -> Watch:
        def leave(error: PeerLostError) -> None:
            left[rank].append(error)

        return Watch(FaultsConfig(hang_s=2, **faults), lambda *words: told[rank].append(words), leave=leave)

    def start(**faults: float) -> Any:
        shared: dict[int, Any] = {}
        barrier = threading.Barrier(2)
        watches = [made(rank, **faults) for rank in range(2)]
        threads = [
            threading.Thread(target=watch.start, args=(Together(rank, shared, barrier),))
            for rank, watch in enumerate(watches)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return watches, told, left

    return start


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_told_to_the_other(pair: Any, failing: int) -> None:
    watches, told, left = pair()
    watches[failing].at("step", 6)
    for _ in range(2):  # a beat carries the mark
        watches[failing]._lost.wait(0.3)
    with pytest.raises(DataError), watches[failing].guard():
        raise DataError("row 3 is bad")
    other = 1 - failing
    said = f"rank {failing} on .* failed .DataError: row 3 is bad."
    with pytest.raises(PeerLostError, match=said) as caught, watches[other].guard():
        raise RuntimeError("gloo: Connection closed by peer")
    assert caught.value.rank == failing
    watches[other]._thread.join(5)
    # a rank that a collective held would have been ended, with the same words
    assert str(left[other][0]) == str(caught.value)
    assert left[failing] == []
    assert told[other][0][0] == "peer_lost"


@pytest.mark.parametrize("first", [0, 1])
def test_leaving_in_good_order_is_no_loss(pair: Any, first: int) -> None:
    watches, told, left = pair()
    with watches[first].guard():
        pass
    # the other one is still at work
    assert not watches[1 - first]._lost.wait(1)
    with pytest.raises(PreemptedError), watches[1 - first].guard():
        raise PreemptedError("saved")
    assert not watches[1 - first]._lost.wait(0.3)
    assert (told, left) == ([[], []], [[], []])


def test_an_error_of_its_own_stays_what_it_is(pair: Any) -> None:
    watches, _, _ = pair()
    with pytest.raises(RuntimeError, match="size mismatch"), watches[1].guard():
        raise RuntimeError("size mismatch")
    assert watches[0]._lost.wait(5)


def test_who_does_not_move_is_named(pair: Any) -> None:
    """Both threads beat, but rank 1 waits for data while rank 0 waits in a sum."""
    watches, _, left = pair(stall_s=1)
    watches[0].at("sum", 4)
    watches[1].at("step", 4)
    assert watches[0]._lost.wait(5)
    watches[0]._thread.join(5)
    assert left[0][0].rank == 1
    assert "has not moved for" in str(left[0][0])


HOLDS_THE_INTERPRETER = """
import ctypes
from flatout.parallel.watch import show_stacks_after

def stuck_in_a_library():
    ctypes.PyDLL(None).sleep(2)

show_stacks_after(0.5)
stuck_in_a_library()
"""


def test_a_rank_that_holds_the_interpreter_shows_where() -> None:
    """No thread of Python can run in it, so the others know only that it is silent."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_INTERPRETER], capture_output=True, text=True, timeout=120, check=True
    )
    assert "stuck_in_a_library" in done.stderr
