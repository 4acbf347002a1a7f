"""Processes that are ranks of one run, as a launcher would start them; no port is looked up before it is used."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

LOOPBACK = "127.0.0.1"


def start_ranks(
    commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None, **popen: Any
) -> list[subprocess.Popen[Any]]:
    """One process a command, in the order of ranks; the first one's store listens on a socket that is bound here."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
            "WORLD_SIZE": str(len(commands)),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(listener.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        started = []
        for rank, command in enumerate(commands):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            fds = (listener.fileno(),) if rank == 0 else ()
            if fds:
                own["FLATOUT_STORE_SOCKET"] = str(fds[0])
            started.append(subprocess.Popen(command, env=own, pass_fds=fds, **popen))
        return started
