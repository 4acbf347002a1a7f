"""Heartbeats between ranks over sockets of their own: a dead peer shows as a closed connection, a hung one as silence.

torch's store would serve, but it hides closed connections and its calls may block for as long as a peer hangs.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a rank is: completed steps, and what it does now."""

    step: int = 0
    phase: str = "start"


@dataclass(frozen=True, slots=True)
class Loss:
    """Which rank was lost, where it was last heard of, and how that showed."""

    rank: int
    host: str
    mark: Mark
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.how} in step {self.mark.step + 1}, phase {self.mark.phase}"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Loss:
        """The loss that `asdict` wrote."""
        return cls(int(values["rank"]), str(values["host"]), Mark(**values["mark"]), str(values["how"]))


class Line:
    """One connection that carries JSON objects, a line each, without ever blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._received = b""
        self._unsent = b""
        self.is_open = True

    def send(self, values: Mapping[str, Any]) -> None:
        """Send as much as the connection takes now; the rest goes before the next."""
        self._unsent += json.dumps(values).encode() + b"\n"
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            # a peer that reads nothing is found by its silence; nothing piles up for it meanwhile
            self._unsent = self._unsent[:MAX_LINE_BYTES]
        except OSError:
            self.is_open = False

    def receive(self) -> list[dict[str, Any]]:
        """What has come; `is_open` is False after the peer closed. Raises ValueError for what is no line of ours."""
        try:
            while content := self.socket.recv(MAX_LINE_BYTES):
                self._received += content
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            raise ValueError("a line without end")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


@dataclass(slots=True)
class Peer:
    """What rank 0 knows of a rank."""

    host: str
    line: Line
    heard_at: float
    mark: Mark = field(default_factory=Mark)
    has_left: bool = False


class Hub:
    """Rank 0's side: hears all ranks, decides who is lost, tells everybody. `beat` is called over and over.

    `token` keeps strangers out. `clock` is a test's.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: int,
        world: int,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._token, self._world, self._hang_s, self._clock = listener, token, world, hang_s, clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: list[Line] = []
        self._started_at = clock()
        self.peers: dict[int, Peer] = {}

    def beat(self, wait_s: float, mark: Mark) -> Loss | None:
        """Hear what came within `wait_s`, and answer with where rank 0 is; the rank that is lost, if one is."""
        self._selector.select(wait_s)
        self._accept()
        for stranger in list(self._strangers):
            self._greet(stranger)
        losses = [loss for rank, peer in list(self.peers.items()) if (loss := self._hear(rank, peer, mark))]
        if losses:
            # several die together when one takes the others with it: who failed by itself comes first
            return min(losses, key=lambda loss: not loss.how.startswith("failed"))
        if len(self.peers) < self._world - 1 and self._clock() - self._started_at > self._hang_s:
            missing = min(set(range(1, self._world)) - self.peers.keys())
            return Loss(missing, "an unknown host", Mark(), "never answered")
        return None

    def tell(self, loss: Loss) -> None:
        """Tell every rank that can still hear it."""
        for peer in self.peers.values():
            peer.line.send({"lost": asdict(loss)})

    def close(self) -> None:
        """Say goodbye and close."""
        for peer in self.peers.values():
            peer.line.send({"bye": True})
            peer.line.close()
        for stranger in self._strangers:
            stranger.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            line = Line(connection)
            self._strangers.append(line)
            self._selector.register(connection, selectors.EVENT_READ)

    def _greet(self, stranger: Line) -> None:
        try:
            messages = stranger.receive()
            hello = messages[0] if messages else None
            if hello is not None:
                self._strangers.remove(stranger)
                if int(hello["token"]) != self._token or not 0 < int(hello["rank"]) < self._world:
                    raise ValueError("not one of us")
                self.peers[int(hello["rank"])] = Peer(str(hello["host"]), stranger, self._clock())
        except (ValueError, KeyError, TypeError):
            stranger.is_open = False
        if not stranger.is_open:
            self._forget(stranger)
            if stranger in self._strangers:
                self._strangers.remove(stranger)

    def _hear(self, rank: int, peer: Peer, mark: Mark) -> Loss | None:
        if peer.has_left:
            return None
        for message in peer.line.receive():
            peer.heard_at = self._clock()
            if "bye" in message:
                peer.has_left = True
                self._forget(peer.line)
                return None
            if "failed" in message:
                return Loss(rank, peer.host, peer.mark, f"failed ({message['failed']})")
            if "mark" in message:
                peer.mark = Mark(**message["mark"])
                peer.line.send({"mark": asdict(mark)})
        if not peer.line.is_open:
            return Loss(rank, peer.host, peer.mark, "died")
        silent_s = self._clock() - peer.heard_at
        if silent_s > self._hang_s:
            return Loss(rank, peer.host, peer.mark, f"has been silent for {silent_s:.0f} s")
        return None

    def _forget(self, line: Line) -> None:
        if line.socket.fileno() >= 0:
            self._selector.unregister(line.socket)
            line.close()


class Spoke:
    """Another rank's side: tells where it is, hears of losses, and finds rank 0's own."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: int,
        rank: int,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_s, self._clock = hang_s, clock
        self._line = Line(socket.create_connection(address, timeout=hang_s))
        self._line.send({"token": token, "rank": rank, "host": socket.gethostname()})
        self._address = address[0]
        self._heard_at = clock()
        self._next_mark_at = 0.0
        self._first = Mark()
        self._first_has_left = False

    def beat(self, mark: Mark, every_s: float = 0.0) -> Loss | None:
        """Tell where this rank is, unless it did less than `every_s` ago; the rank that is lost, if one is known.

        Once rank 0 has left in good order, which it may a moment before this rank does, nobody is lost any more.
        """
        if self._first_has_left:
            return None
        if time.monotonic() >= self._next_mark_at:
            self._line.send({"mark": asdict(mark)})
            self._next_mark_at = time.monotonic() + every_s
        for message in self._line.receive():
            self._heard_at = self._clock()
            if "lost" in message:
                return Loss.from_json(message["lost"])
            if "bye" in message:
                self._first_has_left = True
                return None
            if "mark" in message:
                self._first = Mark(**message["mark"])
        if not self._line.is_open:
            return Loss(0, self._address, self._first, "died")
        silent_s = self._clock() - self._heard_at
        if silent_s > self._hang_s:
            return Loss(0, self._address, self._first, f"has been silent for {silent_s:.0f} s")
        return None

    def wait(self, wait_s: float) -> None:
        """Sleep until something comes, at most this long."""
        with selectors.DefaultSelector() as selector:
            if self._line.is_open and not self._first_has_left:
                selector.register(self._line.socket, selectors.EVENT_READ)
            selector.select(wait_s)

    def fail(self, text: str) -> None:
        """Tell that this rank ends with an error."""
        self._line.send({"failed": text})

    def close(self) -> None:
        """Say goodbye and close."""
        self._line.send({"bye": True})
        self._line.close()
