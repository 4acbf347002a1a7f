"""Processes that are ranks of one run, as a launcher would start them; no port is looked up before it is used."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
    made = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    made[0]["FLATOUT_STORE_SOCKET"] = str(listener.fileno())
    return made


class ColdProcess(subprocess.Popen[bytes]):
    """`python WORDS` as it is started anywhere, with both streams in `log`: a forked process cannot use CUDA."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        files = [int(env["FLATOUT_STORE_SOCKET"])] if "FLATOUT_STORE_SOCKET" in env else []
        # modules beside the tests, as a forked process has them
        env = {**env, "PYTHONPATH": os.pathsep.join(sys.path)}
        with log.open("wb") as file:
            super().__init__([sys.executable, *words], env=env, stdout=file, stderr=subprocess.STDOUT, pass_fds=files)


def start_warm_ranks(
    num_ranks: int, words: Callable[[int], Sequence[str]], logs: Path, kind: Any = WarmProcess
) -> list[Any]:
    """So many of `python WORDS(RANK)`, without the imports of each; what they say is in `logs`, `rank-N.log` each."""
    logs.mkdir(exist_ok=True)
    with socket.create_server((LOOPBACK, 0)) as listener:
        return [
            kind(words(rank), env, logs / f"rank-{rank}.log")
            for rank, env in enumerate(environments(num_ranks, listener, None))
        ]
