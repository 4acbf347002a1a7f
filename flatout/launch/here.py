"""What this host is called where the other nodes see it."""

from __future__ import annotations

import array
import fcntl
import socket

from flatout.errors import ResourceError
from flatout.launch.nodes import Nodes

SIOCGIFADDR = 0x8915


def address_towards(nodes: Nodes) -> str:
    """This node's own address on the way to the endpoint. Raises ResourceError when there is no way."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # connecting a datagram socket sends nothing
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ResourceError(
            f"--rdzv {nodes.endpoint} cannot be reached from here ({error}); check the name and the network"
        ) from error


def interface_of(address: str) -> str | None:
    """Name of the interface with this IPv4 address; None when no one has it."""
    for _, name in socket.if_nameindex():
        request = array.array("B", name.encode().ljust(40, b"\0"))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                fcntl.ioctl(probe, SIOCGIFADDR, request, True)
            except OSError:
                continue
        if socket.inet_ntoa(request.tobytes()[20:24]) == address:
            return name
    return None
