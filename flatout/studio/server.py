"""Serves studio on the loopback interface of this machine."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from flatout.errors import Fix, ResourceError
from flatout.studio.app import make_app

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 32
# open pages may take this long to end
SHUTDOWN_S = 2


def serve(
    root: Path, port: int, log: Callable[[str], None], on_ready: Callable[[str], None], models: Sequence[Path] = ()
) -> None:
    """Serve the workspace `root` until Ctrl-C; `port` 0 is any free one. `on_ready` gets the address with its token.
    Models in the folders `models` may be read, too.

    Raises ResourceError if the port cannot be used.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ResourceError(f"port {port} {why}; choose another", [Fix({"--port": 0}, "any free one")]) from error
        listener.listen()
        port, token = listener.getsockname()[1], secrets.token_urlsafe(TOKEN_BYTES)
        config = uvicorn.Config(
            make_app(root, token, port, log, models),
            log_level="error",
            access_log=False,  # addresses have the token
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        on_ready(f"http://{LOOPBACK}:{port}/?token={token}")
        # uvicorn raises the signal again once it has shut down
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
