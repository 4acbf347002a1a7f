"""Processes that are ranks of one run, as a launcher would start them; no port is looked up before it is used."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warm_process import WarmProcess

LOOPBACK = "127.0.0.1"


def environments(num_ranks: int, listener: socket.socket, env: Mapping[str, str] | None) -> list[dict[str, str]]:
    """Each rank's variables."""
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **(env or {}),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listener.getsockname()[1]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def start_ranks(
    commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None, **popen: Any
) -> list[subprocess.Popen[Any]]:
    """One process a command, in the order of ranks; the first one's store listens on a socket that is bound here."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        started = []
        for command, own in zip(commands, environments(len(commands), listener, env), strict=True):
            fds = () if started else (listener.fileno(),)
            if fds:
                own["FLATOUT_STORE_SOCKET"] = str(fds[0])
            started.append(subprocess.Popen(command, env=own, pass_fds=fds, **popen))
        return started


def start_warm_ranks(
    commands: Sequence[Sequence[str]], logs: Path, env: Mapping[str, str] | None = None
) -> list[WarmProcess]:
    """The same without the imports of each process; what they say is in `logs`, `rank-N.log` each."""
    logs.mkdir(exist_ok=True)
    with socket.create_server((LOOPBACK, 0)) as listener:
        return [
            WarmProcess(command, own, logs / f"rank-{rank}.log", None if rank else listener)
            for rank, (command, own) in enumerate(
                zip(commands, environments(len(commands), listener, env), strict=True)
            )
        ]
