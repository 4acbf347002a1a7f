"""A web server on this machine's loopback, for the stand-ins of services."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def local_server(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None, **attributes: Any
) -> Iterator[str]:
    """Serve within the block, by a handler class with these attributes; gives the address, also with `tls` http's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes)) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
