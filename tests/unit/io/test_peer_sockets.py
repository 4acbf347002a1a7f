"""Who may connect to a PeerListener, and what a line may hold; real sockets on loopback."""

import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from flatout.errors import PeerLostError
from flatout.io.bounded_wait import BoundedWait
from flatout.io.peer_sockets import (
    HANDSHAKE_S,
    MAX_LINE_BYTES,
    MAX_PENDING,
    PeerConnection,
    PeerListener,
    connect_to_peer,
    listen,
    parse_object,
)

SECRET = "0123456789abcdef"
DEADLINE_S = 60.0


def bounded(limit_s: float) -> BoundedWait:
    return BoundedWait(limit_s, "x.y")


class Listening:
    """A listener with a clock of the test's, and why it rejected whom."""

    def __init__(self) -> None:
        self.now_s, self.rejected = 0.0, list[str]()
        self.listener = PeerListener(
            listen("127.0.0.1"), SECRET, lambda _, why: self.rejected.append(why), lambda: self.now_s
        )
        self.address = self.listener.socket.getsockname()
        self.accepted: list[tuple[PeerConnection, dict[str, Any]]] = []

    def accept_until(self, done: Any) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < until_s
            self.accepted += self.listener.accept(0.01)

    def connect(self, secret: str = SECRET, **more: Any) -> PeerConnection:
        """Enter from another thread, as a process does."""
        entered: list[PeerConnection] = []
        values = {"rank": 1, **more}
        thread = threading.Thread(
            target=lambda: entered.append(connect_to_peer(self.address, secret, values, bounded(DEADLINE_S), "it")),
            daemon=True,
        )
        thread.start()
        self.accept_until(lambda: not thread.is_alive())
        return entered[0]


@pytest.fixture
def listening():
    made = Listening()
    yield made
    made.listener.close()


def test_who_knows_the_secret_is_accepted_and_talks(listening):
    connection = listening.connect(host="a")
    ((inner, hello),) = listening.accepted
    assert hello == {"rank": 1, "host": "a"}
    connection.send({"step": 3})
    got: list[dict[str, Any]] = []
    listening.accept_until(lambda: got.extend(inner.receive()) or got)
    assert got == [{"step": 3}]
    assert listening.rejected == []


@pytest.mark.parametrize(
    "content",
    [
        b"\n",
        b"{}\n",
        b"x" * 100_000,
        b"0123456789abcdeF {}\n",
        # a secret in front lets nothing of this in
        SECRET.encode() + b" " + b"[" * 4000 + b"\n",
        SECRET.encode() + b" [1]\n",
        SECRET.encode() + b' {"rank": Infinity}\n',
        SECRET.encode() + b' {"rank": 1}\n{"more": 1}\n',
        b"\xff\xfe\x00\n",
    ],
)
def test_whoever_does_not_is_rejected_and_named(listening, content):
    with socket.create_connection(listening.address) as connection:
        connection.settimeout(DEADLINE_S)
        connection.sendall(content)
        listening.accept_until(lambda: listening.rejected)
        # it may have had more to say
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert listening.accepted == []
    assert listening.connect()


def test_idle_and_many_connections_keep_nobody_out(listening):
    with ExitStack() as stack:
        for _ in range(3 * MAX_PENDING):
            stack.enter_context(socket.create_connection(listening.address))
            listening.listener.accept(0.0)
        assert listening.rejected == ["too many connections without the secret"]
        assert listening.connect()
        assert len(listening.listener._pending) <= MAX_PENDING
        listening.now_s = HANDSHAKE_S + 1
        listening.accept_until(lambda: not listening.listener._pending)


def test_who_is_not_accepted_is_told_why():
    with pytest.raises(PeerLostError, match=r"timed out waiting for it, 0 s .x.y.: .*refused"):
        connect_to_peer(("127.0.0.1", 1), SECRET, {}, bounded(0.0), "it")
    listening = Listening()
    errors: list[PeerLostError] = []

    def try_wrong_secret() -> None:
        try:
            connect_to_peer(listening.address, "another", {}, bounded(0.3), "it")
        except PeerLostError as error:
            errors.append(error)

    thread = threading.Thread(target=try_wrong_secret)
    thread.start()
    listening.accept_until(lambda: not thread.is_alive())
    listening.listener.close()
    assert "check that FLATOUT_SECRET is the same" in str(errors[0])


def test_a_line_that_nobody_reads_stays_whole_lines():
    """What does not fit is left out; what arrives is JSON to the last line."""
    one, other = socket.socketpair()
    writer, reader = PeerConnection(one), PeerConnection(other)
    for number in range(40_000):
        writer.send({"number": number, "text": "x" * 40})
    numbers: list[int] = []
    while -1 not in numbers:
        numbers += [message["number"] for message in reader.receive()]
        writer.send({"number": -1})
    assert numbers[:3] == [0, 1, 2]
    assert len(numbers) < 40_000
    one.close()


def test_a_line_without_end_is_refused():
    one, other = socket.socketpair()
    reader = PeerConnection(other)

    def send_and_receive() -> None:
        for _ in range(3 * MAX_LINE_BYTES // 1000):
            one.sendall(b"x" * 1000)
            reader.receive()

    with pytest.raises(ValueError, match="over the size limit"):
        send_and_receive()
    one.close()


@pytest.mark.parametrize("line", [b"[" * 60_000, b'{"a": NaN}', b'{"a": -Infinity}', b"3", b"null", b"", b"\xff"])
def test_what_is_no_object_of_plain_json_is_a_value_error(line):
    with pytest.raises(ValueError):
        parse_object(line)
