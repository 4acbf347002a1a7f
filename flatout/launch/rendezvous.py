"""Rendezvous of the nodes' launchers before each attempt: node 0 listens, the others connect to it."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from flatout.errors import ResourceError
from flatout.io.bounded_wait import POLL_S, BoundedWait
from flatout.io.peer_sockets import PeerConnection, PeerListener, connect_to_peer, listen
from flatout.launch.launch_mode import Nodes

LOOPBACK = "127.0.0.1"
# once `num_min` nodes have joined: how long to wait for one more
LAST_CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """The ranks of an attempt: this node's start at `first_rank` of `world`; rank 0's store is at host:port."""

    first_rank: int
    world: int
    host: str
    port: int
    listener: socket.socket | None = None
    """The store's socket, on rank 0's node."""
    interface: str | None = None
    """The network interface that reaches the other nodes, if it is known."""


class Rendezvous:
    """The rendezvous of a single machine, and the interface for several; used before and during each attempt."""

    def next_rendezvous(self, num_ranks: int) -> RendezvousInfo:
        """Wait for the other nodes. Raises PeerLostError when too few have joined after faults.join_s."""
        # bound before any rank starts
        listener = listen(LOOPBACK)
        return RendezvousInfo(0, num_ranks, LOOPBACK, listener.getsockname()[1], listener)

    def membership_changed(self) -> bool:
        """Return whether a node has joined, so that the attempt must save, stop and restart."""
        return False

    def close(self) -> None:
        """Disconnect from the other nodes."""


class HostRendezvous(Rendezvous):
    """The rendezvous on node 0. Raises ResourceError if it cannot bind the endpoint."""

    def __init__(self, nodes: Nodes, secret: str, *, join_s: float, log: Callable[[str], None]) -> None:
        self._nodes, self._join_s, self._log = nodes, join_s, log
        host, _, port = nodes.endpoint.rpartition(":")
        try:
            listener = listen(_bindable(host.strip("[]"), int(port)), int(port))
        except OSError as error:
            raise ResourceError(
                f"--rdzv {nodes.endpoint}: node 0 cannot listen there ({error}); use an address of this node and a "
                "free port"
            ) from error
        self._listener = PeerListener(listener, secret, lambda peer, why: log(f"rejected {peer}: {why}"))
        # node -> its connection and its number of ranks
        self._members: dict[int, tuple[PeerConnection, int]] = {}
        self._joining: dict[int, tuple[PeerConnection, int]] = {}

    def next_rendezvous(self, num_ranks: int) -> RendezvousInfo:
        for connection, _ in self._members.values():
            self._listener.disconnect(connection)
        self._members.clear()
        wait = BoundedWait(self._join_s, "faults.join_s", self._log)
        num_before, since_s = 0, 0.0
        while (num_here := len(self._joining) + 1) < self._nodes.num_max:
            if num_here != num_before:
                num_before, since_s = num_here, time.monotonic()
            if num_here >= self._nodes.num_min and time.monotonic() - since_s > LAST_CALL_S:
                break
            missing = min(set(range(1, self._nodes.num_max)) - self._joining.keys())
            wait.check(f"node {missing} of {self._nodes.num_max} at {self._nodes.endpoint}")
            self._accept(POLL_S)
        self._members, self._joining = dict(sorted(self._joining.items())), {}
        members = list(self._members.values())
        # the address at which the others reached this node also works for its ranks
        host = str(members[-1][0].socket.getsockname()[0]) if members else LOOPBACK
        listener = listen(host)
        port = listener.getsockname()[1]
        world, first_rank = num_ranks + sum(brought for _, brought in members), num_ranks
        for connection, brought in members:
            connection.send({"first_rank": first_rank, "world": world, "port": port})
            first_rank += brought
        return RendezvousInfo(0, world, host, port, listener, interface_of(host))

    def membership_changed(self) -> bool:
        self._accept(0.0)
        newcomers = self._joining.keys() - self._members.keys()
        for connection, _ in self._members.values() if newcomers else ():
            connection.send({"membership_changed": True})
        return bool(newcomers)

    def close(self) -> None:
        self._listener.close()

    def _accept(self, wait_s: float) -> None:
        for connection, hello in self._listener.accept(wait_s):
            node, brought = hello.get("node"), hello.get("ranks")
            if type(node) is int and 0 < node < self._nodes.num_max and type(brought) is int and brought > 0:
                if node in self._joining:
                    self._listener.disconnect(self._joining[node][0])
                self._joining[node] = connection, brought
            else:
                self._listener.disconnect(connection, f"it claims to be node {node!r} with {brought!r} ranks")
        for node, (connection, _) in list(self._joining.items()):
            # a waiting node sends nothing: a message or a closed connection means that it is gone
            with suppress(ValueError):
                if not connection.receive() and connection.is_open:
                    continue
            self._listener.disconnect(connection)
            del self._joining[node]


class ClientRendezvous(Rendezvous):
    """The rendezvous on every node but the first."""

    def __init__(self, nodes: Nodes, secret: str, *, join_s: float, log: Callable[[str], None]) -> None:
        self._nodes, self._secret, self._join_s, self._log = nodes, secret, join_s, log
        self._connection: PeerConnection | None = None

    def next_rendezvous(self, num_ranks: int) -> RendezvousInfo:
        wait = BoundedWait(self._join_s, "faults.join_s", self._log)
        host, _, port = self._nodes.endpoint.rpartition(":")
        address = (host.strip("[]"), int(port))
        hello = {"node": self._nodes.index, "ranks": num_ranks}
        what = f"node 0 at {self._nodes.endpoint}"
        while True:
            self.close()
            self._connection = connect_to_peer(address, self._secret, hello, wait, what)
            # node 0 may drop this connection, and accept a new one, while it waits for others
            while self._connection.is_open:
                try:
                    for message in self._connection.receive():
                        peer, own = self._connection.socket.getpeername()[0], self._connection.socket.getsockname()[0]
                        first_rank, world, store_port = (int(message[name]) for name in ("first_rank", "world", "port"))
                        interface = interface_of(str(own))
                        return RendezvousInfo(first_rank, world, str(peer), store_port, interface=interface)
                except (OSError, ValueError, KeyError, TypeError):
                    self._connection.close()
                wait.pause(f"the other nodes, which {what} also waits for")

    def membership_changed(self) -> bool:
        if self._connection is None or not self._connection.is_open:
            return False
        try:
            return any("membership_changed" in message for message in self._connection.receive())
        except ValueError:
            self._connection.close()
            return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _bindable(host: str, port: int) -> str:
    """Return the endpoint's address to bind; empty (all) if its name is a service's, or resolves to loopback here."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    with suppress(OSError), socket.socket() as probe:
        address = str(socket.getaddrinfo(host, port, socket.AF_INET)[0][4][0])
        probe.bind((address, 0))
        return "" if ipaddress.ip_address(address).is_loopback else address
    return ""


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, ones in interfaces if address in [one.address for one in ones]), None)
