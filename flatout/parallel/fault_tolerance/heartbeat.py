"""Heartbeats between ranks over separate sockets: a dead peer closes its connection, a hung one goes silent.

torch's store is not used for this, since it hides closed connections and its calls may block while a peer hangs.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flatout.errors import PeerLostError
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankStatus:
        """Parse a status written by `asdict`. Raises KeyError, TypeError or ValueError for anything else."""
        step, num_changes = int(values["step"]), int(values["num_changes"])
        return cls(step, str(values["phase"])[:MAX_TEXT], bool(values["waits"]), num_changes)


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


@dataclass(slots=True)
class Peer:
    """Rank 0's record of another rank."""

    host: str
    connection: PeerConnection
    heard_at: float
    changed_at: float
    status: RankStatus = field(default_factory=RankStatus)
    has_left: bool = False


class HeartbeatServer:
    """Rank 0's side: receives all ranks' heartbeats, and detects which rank is lost; call `poll` often.

    `on_event` gets the events that other ranks report. Tests may replace `clock`.
    """

    def __init__(
        self,
        listener: PeerListener,
        *,
        world: int,
        hang_s: float,
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, facts: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._world, self._hang_s = listener, world, hang_s
        self._on_event, self._clock = on_event, clock
        self._started_at = clock()
        self.peers: dict[int, Peer] = {}

    def poll(self, wait_s: float, status: RankStatus) -> PeerFailure | None:
        """Receive messages for up to `wait_s`, and reply with `status`; return the failure of a lost rank, if any."""
        for connection, hello in self._listener.accept(wait_s):
            rank, now_s = hello.get("rank"), self._clock()
            if type(rank) is int and 0 < rank < self._world and rank not in self.peers:
                self.peers[rank] = Peer(str(hello.get("host"))[:MAX_TEXT], connection, now_s, now_s)
            else:
                self._listener.disconnect(connection, f"it claims to be rank {str(rank)[:MAX_TEXT]}")
        present = [(rank, peer) for rank, peer in self.peers.items() if not peer.has_left]
        if failures := [failure for rank, peer in present if (failure := self._check(rank, peer, status))]:
            # one rank's failure may end others with it: prefer the one that reported its own error
            return min(failures, key=lambda failure: not failure.is_reported)
        if len(self.peers) < self._world - 1 and self._clock() - self._started_at > self._hang_s:
            missing = min(set(range(1, self._world)) - self.peers.keys())
            return PeerFailure(missing, "an unknown host", RankStatus(), "never answered")
        return None

    def broadcast(self, failure: PeerFailure) -> None:
        """Send the failure to every rank that is still connected."""
        for peer in self.peers.values():
            peer.connection.send({"lost": asdict(failure)})

    def fail(self, text: str, exit_code: int, status: RankStatus) -> None:
        """Report to the other ranks that this one ends with an error, its last status, and the run's exit code."""
        self.broadcast(PeerFailure(0, socket.gethostname(), status, f"failed ({text})", exit_code, is_reported=True))

    def close(self) -> None:
        """Announce a normal exit to all ranks and close."""
        for peer in self.peers.values():
            peer.connection.send({"bye": True})
            peer.connection.close()
        self._listener.close()

    def _check(self, rank: int, peer: Peer, status: RankStatus) -> PeerFailure | None:
        """Handle a rank's messages; return its failure, if it reports one or is lost."""
        try:
            for message in peer.connection.receive():
                peer.heard_at = self._clock()
                if "failed" in message:
                    how = f"failed ({str(message['failed'])[:MAX_TEXT]})"
                    now_at = RankStatus.from_json(message["status"])
                    return PeerFailure(rank, peer.host, now_at, how, int(message["exit_code"]), is_reported=True)
                if "event" in message:
                    self._on_event(str(message["event"]), {"rank": rank, **message["facts"]})
                if "status" in message:
                    now_at = RankStatus.from_json(message["status"])
                    if now_at != peer.status:
                        peer.status, peer.changed_at = now_at, self._clock()
                    peer.connection.send({"status": asdict(status)})
                peer.has_left = peer.has_left or "bye" in message
        except (ValueError, KeyError, TypeError) as error:
            return PeerFailure(rank, peer.host, peer.status, f"sent an invalid heartbeat ({str(error)[:MAX_TEXT]})")
        silent_s = self._clock() - peer.heard_at
        if peer.has_left:
            self._listener.disconnect(peer.connection)
        elif not peer.connection.is_open:
            return PeerFailure(rank, peer.host, peer.status, "died")
        elif silent_s > self._hang_s:
            return PeerFailure(rank, peer.host, peer.status, f"has been silent for {silent_s:.0f} s")
        return None


class HeartbeatClient:
    """The side of every rank but rank 0: sends its status, is notified of lost ranks, and detects the loss of rank 0.

    It sends its status at most once per `every_s`. Raises PeerLostError when rank 0 does not answer within `hang_s`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        *,
        rank: int,
        hang_s: float,
        every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_s, self._every_s, self._clock = hang_s, every_s, clock
        hello = {"rank": rank, "host": socket.gethostname()}
        what = f"rank 0's heartbeats at {address[0]}:{address[1]}"
        wait = BoundedWait(hang_s, "faults.hang_s", error=lambda text: PeerLostError(text, 0))
        self._connection = connect_to_peer(address, secret, hello, wait, what)
        self._address = address[0]
        self._heard_at = self._next_status_at = clock()
        # events are queued, since only the thread that polls may write to the connection
        self._events: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._first_status = RankStatus()
        self._has_first_left = False

    def poll(self, wait_s: float, status: RankStatus) -> PeerFailure | None:
        """Wait up to `wait_s` for a message, and send this rank's status; return the failure of a lost rank, if any.

        Rank 0 may exit normally a moment before this rank; from then on no failure is returned.
        """
        if self._has_first_left:
            time.sleep(wait_s)
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.socket, selectors.EVENT_READ)
            selector.select(wait_s)
        if self._clock() >= self._next_status_at:
            self._connection.send({"status": asdict(status)})
            self._next_status_at = self._clock() + self._every_s
        self._send_events()
        how = ""
        try:
            for message in self._connection.receive():
                self._heard_at = self._clock()
                if "lost" in message:
                    lost = message["lost"]
                    host, how = str(lost["host"])[:MAX_TEXT], str(lost["how"])[:MAX_TEXT]
                    rank, exit_code = int(lost["rank"]), int(lost["exit_code"])
                    facts = bool(lost["is_reported"]), bool(lost["is_exact"])
                    return PeerFailure(rank, host, RankStatus.from_json(lost["status"]), how, exit_code, *facts)
                if "bye" in message:
                    self._has_first_left = True
                    return None
                if "status" in message:
                    self._first_status = RankStatus.from_json(message["status"])
        except (ValueError, KeyError, TypeError) as error:
            how = f"sent an invalid heartbeat ({str(error)[:MAX_TEXT]})"
        silent_s = self._clock() - self._heard_at
        if not how and not self._connection.is_open:
            how = "died"
        elif not how and silent_s > self._hang_s:
            how = f"has been silent for {silent_s:.0f} s"
        return PeerFailure(0, self._address, self._first_status, how) if how else None

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Have rank 0 report an event; thread-safe."""
        self._events.append((kind, facts))

    def fail(self, text: str, exit_code: int, status: RankStatus) -> None:
        """Report this rank's error to rank 0, which notifies the other ranks."""
        self._send_events()
        self._connection.send({"failed": text, "exit_code": exit_code, "status": asdict(status)})

    def close(self) -> None:
        """Announce a normal exit to rank 0 and close."""
        self._send_events()
        self._connection.send({"bye": True})
        self._connection.close()

    def _send_events(self) -> None:
        while self._events:
            kind, facts = self._events.popleft()
            self._connection.send({"event": kind, "facts": dict(facts)})
