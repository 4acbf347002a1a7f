"""JSON lines over TCP between processes that share a secret; connections without it are closed without parsing."""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from flatout.io.bounded_wait import BoundedWait
from flatout.io.json_file import parse_json

MAX_LINE_BYTES = 1 << 16
# limits for connections that have not sent the secret yet: number, time and bytes of the first line
MAX_PENDING, HANDSHAKE_S, MAX_HANDSHAKE_BYTES = 64, 5.0, 4096
# how many addresses of rejected connections are reported, so that a flood cannot fill a log
MAX_REPORTED = 16


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket on one address of this machine, or on all if `host` is empty; port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_PENDING)


class PeerConnection:
    """A non-blocking connection for JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket, self.is_open = connection, True
        self._received, self._unsent = b"", b""

    def send(self, values: Mapping[str, Any]) -> None:
        """Send as much as the socket accepts now; the rest is sent before the next message.

        If too much is unsent because the peer does not read, the message is dropped; its silence will be noticed.
        """
        line = json.dumps(values).encode() + b"\n"
        if len(self._unsent) + len(line) <= MAX_LINE_BYTES:
            self._unsent += line
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return what the peer has sent, or sends within `wait_s`; `is_open` is False once it closed.

        Raises ValueError for anything but JSON objects.
        """
        if wait_s:
            with selectors.DefaultSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                selector.select(wait_s)
        try:
            content = self.socket.recv(MAX_LINE_BYTES)
            self._received, self.is_open = self._received + content, bool(content)
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            raise ValueError("a line over the size limit")
        return [parse_object(line) for line in lines]

    def close(self) -> None:
        self.is_open = False
        self.socket.close()


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line's JSON object. Raises ValueError for anything else, including NaN, Infinity and deep nesting."""
    values = parse_json(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {type(values).__name__}")
    return values


class PeerListener:
    """A listening socket that accepts connections whose first line has the secret.

    `on_reject` gets the address of a rejected connection and the reason. Connections that have not sent the secret are
    limited in number, bytes and time. Tests may replace `clock`.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        on_reject: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listener.setblocking(False)
        self.socket, self._secret, self._on_reject, self._clock = listener, secret.encode(), on_reject, clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # connection -> when it was opened and what it has sent
        self._pending: dict[socket.socket, tuple[float, bytes]] = {}
        self._reported: set[str] = set()

    def accept(self, wait_s: float) -> list[tuple[PeerConnection, dict[str, Any]]]:
        """Wait up to `wait_s` for any data, also on accepted connections; return new connections and their hello."""
        self._selector.select(wait_s)
        # too many open files, or a connection that was reset in the queue, are not fatal
        with suppress(OSError):
            for _ in range(MAX_PENDING):
                connection, _ = self.socket.accept()
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                self._pending[connection] = (self._clock(), b"")
                if len(self._pending) > MAX_PENDING:
                    self._reject_pending(next(iter(self._pending)), "too many connections without the secret")
        return [peer for connection in list(self._pending) if (peer := self._handshake(connection)) is not None]

    def disconnect(self, connection: PeerConnection, why: str | None = None) -> None:
        """Close an accepted connection, and report `why` if given."""
        if why is not None:
            self._report(connection.socket, why)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    def close(self) -> None:
        """Close the listener and all connections that were not accepted."""
        for connection in self._pending:
            connection.close()
        self._selector.close()
        self.socket.close()

    def _handshake(self, connection: socket.socket) -> tuple[PeerConnection, dict[str, Any]] | None:
        came_at, received = self._pending[connection]
        try:
            content = connection.recv(MAX_HANDSHAKE_BYTES - len(received))
            received += content
            first, newline, rest = received.partition(b"\n")
            if not newline and content and len(received) < MAX_HANDSHAKE_BYTES:
                self._pending[connection] = (came_at, received)
                return None
            secret, _, hello = first.partition(b" ")
            # nothing is parsed before this comparison, which takes constant time
            if not hmac.compare_digest(secret, self._secret) or not newline or rest:
                raise ValueError("it did not send the secret of this run")
            values = parse_object(hello)
        except BlockingIOError:
            if self._clock() - came_at > HANDSHAKE_S:
                self._reject_pending(connection, f"it sent nothing for {HANDSHAKE_S:.0f} s")
            return None
        except (OSError, ValueError) as error:
            self._reject_pending(connection, str(error))
            return None
        del self._pending[connection]
        peer = PeerConnection(connection)
        peer.send({"accepted": True})
        return peer, values

    def _reject_pending(self, connection: socket.socket, why: str) -> None:
        del self._pending[connection]
        self._report(connection, why)
        self._selector.unregister(connection)
        connection.close()

    def _report(self, connection: socket.socket, why: str) -> None:
        address = "a closed connection"
        with suppress(OSError):
            address = str(connection.getpeername()[0])
        if address not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(address)
            self._on_reject(address, why)


def connect_to_peer(
    address: tuple[str, int], secret: str, hello: Mapping[str, Any], wait: BoundedWait, what: str
) -> PeerConnection:
    """Retry connecting to a PeerListener, described by `what`, until it accepts. Raises `wait`'s error at its limit."""
    while True:
        connection = None
        try:
            connection = socket.create_connection(address, timeout=max(1.0, min(HANDSHAKE_S, wait.left_s)))
            connection.sendall(secret.encode() + b" " + json.dumps(hello).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                # byte by byte, since what follows the answer is for the PeerConnection
                if not (byte := connection.recv(1)) or len(answer) > MAX_HANDSHAKE_BYTES:
                    raise OSError("it closed the connection: check that FLATOUT_SECRET is the same there")
                answer += byte
            if "accepted" not in parse_object(answer):
                raise OSError("it does not answer like a flatout rank")
            return PeerConnection(connection)
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            wait.pause(what, str(error))
