"""Python processes without the seconds of imports: each is forked from a server that has imported torch and flatout.

For what processes do. How a process begins (its options, what an import reads from the environment, a hash seed of its
own) is proved where a real one is started: `distributed/launching.py`, and tests that ask for `real_ranks`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers.models.qwen3", "flatout.cli.main", "flatout.trainer.run"])
# their values are numbers of open files, which the process inherits under other numbers
FILES = ("FLATOUT_STORE_SOCKET", "FLATOUT_STATUS_BOARD")
# what a failed test leaves: multiprocessing would wait for its end when Python ends
STARTED: list[WarmProcess] = []


class Inherited:
    """An open file for the process that gets this as an argument, where it is a number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_of, (DupFd(self.fd),)


def _number_of(file: Any) -> int:
    return file.detach()


class WarmProcess:
    """What is used of `subprocess.Popen`, for `python WORDS` in a session of its own, with both streams in `log`."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None, *, append: bool = False
    ) -> None:
        self.args, self.log = words, log
        files = {name: Inherited(int(env[name])) for name in FILES if name in env}
        mode = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        begin = (words, dict(env), files, str(cwd or Path.cwd()), (str(log.absolute()), mode))
        self._process = CONTEXT.Process(target=_run, args=begin)
        self._process.start()
        STARTED.append(self)
        with suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

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

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def start_python(words: Sequence[str], log: Path, *, append: bool = True, **options: Any) -> WarmProcess:
    """`flatout.io.own_files.start_python`, warm."""
    return WarmProcess(words, options.get("env") or os.environ, log, options.get("cwd"), append=append)


@atexit.register
def kill_all() -> None:
    """End the processes that still run."""
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def _run(
    words: Sequence[str], env: dict[str, str], files: dict[str, int], folder: str, output: tuple[str, int]
) -> None:
    os.setsid()
    fd = os.open(*output, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    if "FLATOUT_PARENT" in env:
        # a rank ends with its parent, which here is the server
        env["FLATOUT_PARENT"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(env | {name: str(number) for name, number in files.items()})
    os.chdir(folder)
    # what a real process takes from its environment at its start
    sys.executable = env.get("WARM_PYTHON", sys.executable)
    sys.path[1:1] = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    words = list(words[words[0] == "-P" :])
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
