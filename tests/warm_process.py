"""Python processes without the seconds of imports: each is forked from a server that has imported torch and flatout.

For what processes do together. How a process begins (its options, what an import reads from the environment, a hash
seed of its own) is proved where a real one is started: `distributed/launching.py`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers.models.qwen3", "flatout.cli.main", "flatout.trainer.run"])
# what a failed test leaves: multiprocessing would wait for its end when Python ends
STARTED: list[WarmProcess] = []


class WarmProcess:
    """What tests use of `subprocess.Popen`; `command` is a Python with a script or `-m module`, and `log` gets both
    streams. `listener` is a socket that the process inherits, its number in `FLATOUT_STORE_SOCKET`."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, listener: socket.socket | None = None
    ) -> None:
        if command[0] != sys.executable:
            raise ValueError(f"{command[0]} is not this Python")
        self.args, self.log = command, log
        self._process = CONTEXT.Process(target=_run, args=(command[1:], dict(env), str(log), str(Path.cwd()), listener))
        self._process.start()
        STARTED.append(self)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.log.read_text(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


@atexit.register
def kill_all() -> None:
    """End the processes that still run."""
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def _run(words: Sequence[str], env: dict[str, str], log: str, folder: str, listener: socket.socket | None) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    if listener is not None:
        env["FLATOUT_STORE_SOCKET"] = str(listener.detach())
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
