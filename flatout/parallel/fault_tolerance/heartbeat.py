"""Heartbeats between ranks over separate sockets: a dead peer closes its connection, a hung one goes silent.

torch's store is not used for this, since it hides closed connections and its calls may block while a peer hangs.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

from flatout.errors import PeerLostError, first_line
from flatout.io.bounded_wait import BoundedWait
from flatout.io.peer_sockets import PeerConnection, PeerListener, connect_to_peer

MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A rank's completed steps, its phase, whether it waits for other ranks, and how often its status changed."""

    step: int = 0
    phase: str = "start"
    waits: bool = False
    num_changes: int = 0


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """The lost rank, its host and last status, how the loss showed, and the run's exit code that follows.

    `is_reported` means that the rank itself reported that it ends with an error. `is_exact`: the status is not only the
    last one that was heard of.
    """

    rank: int
    host: str
    status: RankStatus
    how: str
    exit_code: int = PeerLostError.exit_code
    is_reported: bool = False
    is_exact: bool = False

    def __str__(self) -> str:
        at = "in" if self.is_exact or self.is_reported else "; last heard of in"
        place = f"step {self.status.step + 1}, phase {self.status.phase}"
        return f"rank {self.rank} on {self.host} {self.how} {at} {place}".replace(" ;", ";")


_STATUS, _FAILURE = TypeAdapter(RankStatus), TypeAdapter(PeerFailure)


@dataclass(slots=True)
class Peer:
    """A rank at the other end of a connection."""

    host: str
    connection: PeerConnection
    heard_at: float
    changed_at: float
    status: RankStatus = field(default_factory=RankStatus)
    has_left: bool = False


class Heartbeats:
    """This rank's connections to others: of rank 0 to all of them, of every other rank to rank 0. Call `poll` often.

    The other ranks send their status at most once per `every_s`, and rank 0 answers with its own. `listener` is rank
    0's. `on_event` gets the events that other ranks report. Tests may replace `clock`.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        hang_s: float,
        *,
        listener: PeerListener | None = None,
        every_s: float = 0.0,
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, facts: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._world, self._hang_s, self._every_s = rank, world, hang_s, every_s
        self._listener, self._on_event, self._clock = listener, on_event, clock
        self._started_at = self._next_status_at = clock()
        self.peers: dict[int, Peer] = {}
        # events are queued, since only the thread that polls may write to a connection
        self._events: deque[tuple[str, Mapping[str, Any]]] = deque()

    def connect(self, address: tuple[str, int], secret: str) -> Self:
        """Connect to rank 0. Raises PeerLostError when it does not answer within `hang_s`."""
        wait = BoundedWait(self._hang_s, "faults.hang_s", error=lambda text: PeerLostError(text, 0))
        hello = {"rank": self._rank, "host": socket.gethostname()}
        connection = connect_to_peer(address, secret, hello, wait, f"rank 0's heartbeats at {address[0]}:{address[1]}")
        self.peers[0] = Peer(address[0], connection, self._clock(), self._clock())
        return self

    def poll(self, wait_s: float, status: RankStatus) -> PeerFailure | None:
        """Wait up to `wait_s` for messages, and send this rank's status; return the failure of a lost rank, if any.

        Rank 0 may exit normally a moment before this rank; from then on no failure is returned.
        """
        if self._listener is not None:
            self._welcome(self._listener, wait_s)
            wait_s = 0.0
        elif self.peers[0].has_left:
            time.sleep(wait_s)
            return None
        elif self._clock() >= self._next_status_at:
            self._send({"status": asdict(status)})
            self._next_status_at = self._clock() + self._every_s
        self._send_events()
        present = [(rank, peer) for rank, peer in self.peers.items() if not peer.has_left]
        if failures := [failure for rank, peer in present if (failure := self._check(rank, peer, status, wait_s))]:
            # one rank's failure may end others with it: prefer the one that reported its own error
            return min(failures, key=lambda failure: not failure.is_reported)
        if self._listener and len(self.peers) < self._world - 1 and self._clock() - self._started_at > self._hang_s:
            missing = min(set(range(1, self._world)) - self.peers.keys())
            return PeerFailure(missing, "an unknown host", RankStatus(), "never answered")
        return None

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Have rank 0 report an event; thread-safe."""
        self._events.append((kind, facts))

    def broadcast(self, failure: PeerFailure) -> None:
        """Send a failure to every rank that is connected: rank 0 tells the others of it, and they tell rank 0."""
        self._send_events()
        self._send({"failure": asdict(failure)})

    def fail(self, text: str, exit_code: int, status: RankStatus) -> None:
        """Report to the other ranks that this one ends with an error, its last status, and the run's exit code."""
        how, host = f"failed ({text})", socket.gethostname()
        self.broadcast(PeerFailure(self._rank, host, status, how, exit_code, is_reported=True))

    def close(self) -> None:
        """Announce a normal exit and close."""
        self._send_events()
        self._send({"bye": True})
        for peer in self.peers.values():
            peer.connection.close()
        if self._listener is not None:
            self._listener.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        for peer in self.peers.values():
            peer.connection.send(message)

    def _send_events(self) -> None:
        while self._events:
            kind, facts = self._events.popleft()
            self._send({"event": kind, "facts": dict(facts)})

    def _welcome(self, listener: PeerListener, wait_s: float) -> None:
        for connection, hello in listener.accept(wait_s):
            rank, now_s = hello.get("rank"), self._clock()
            if type(rank) is int and 0 < rank < self._world and rank not in self.peers:
                self.peers[rank] = Peer(str(hello.get("host")), connection, now_s, now_s)
            else:
                listener.disconnect(connection, f"it claims to be rank {rank}")

    def _check(self, rank: int, peer: Peer, status: RankStatus, wait_s: float) -> PeerFailure | None:
        """Handle a rank's messages; return its failure, or one that it reports."""
        try:
            for message in peer.connection.receive(wait_s):
                peer.heard_at = self._clock()
                if "failure" in message:
                    return _FAILURE.validate_python(message["failure"])
                self._take(rank, peer, message, status)
        except (ValueError, KeyError, TypeError) as error:
            how = f"sent an invalid heartbeat ({first_line(error)[:MAX_TEXT]})"
            return PeerFailure(rank, peer.host, peer.status, how)
        silent_s = self._clock() - peer.heard_at
        if peer.has_left:
            if self._listener is not None:
                self._listener.disconnect(peer.connection)
        elif not peer.connection.is_open:
            return PeerFailure(rank, peer.host, peer.status, "died")
        elif silent_s > self._hang_s:
            return PeerFailure(rank, peer.host, peer.status, f"has been silent for {silent_s:.0f} s")
        return None

    def _take(self, rank: int, peer: Peer, message: Mapping[str, Any], status: RankStatus) -> None:
        if "event" in message:
            self._on_event(str(message["event"]), {"rank": rank, **message["facts"]})
        if "status" in message:
            now_at = _STATUS.validate_python(message["status"])
            if now_at != peer.status:
                peer.status, peer.changed_at = now_at, self._clock()
            if self._listener is not None:
                peer.connection.send({"status": asdict(status)})
        peer.has_left = peer.has_left or "bye" in message
