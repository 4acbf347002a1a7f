"""Runs an answer's code and the tests of its row: `python -I run_code.py`, with the task as JSON at standard input.

It uses the standard library alone. What it prevents, and what it cannot, is in docs/rewards.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

_NEW_USER_AND_NETWORK = 0x10000000 | 0x40000000
_MAX_FILE_BYTES = 16 << 20
# events of Python (sys.audit) that code of an answer has no need of: other hosts, processes, files that are not its own
_REFUSED = (
    "socket.connect", "socket.bind", "socket.send", "socket.get", "subprocess.", "os.exec", "os.fork", "os.posix_spawn",
    "os.spawn", "os.system", "os.kill", "pty.", "ctypes.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod",
    "os.chown", "os.link", "os.symlink", "os.truncate", "os.chdir", "os.chflags", "os.setxattr", "shutil.", "sqlite3.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Text(InspectLoader):
    """Loads a module from a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text


def _hook(folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is not for the code of an answer")
        if event != "open" or not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
            return
        path = arguments[0]
        if isinstance(path, int) or not Path(os.fsdecode(path)).resolve().is_relative_to(folder):
            raise PermissionError("the code of an answer writes in its own folder only")

    return refuse


def main(task: dict[str, Any]) -> None:
    """Run the code, then the tests in the same module, and write the task's word if neither raised."""
    output = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    seconds = int(task["seconds"]) + 1
    for limit, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES), (resource.RLIMIT_CORE, 0)
    ):  # fmt: skip
        resource.setrlimit(limit, (most, most))
    # for a parent that was killed
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with suppress(OSError, AttributeError):
        # where the kernel allows it, a network without any device; elsewhere only the hook is left
        ctypes.CDLL(None).unshare(_NEW_USER_AND_NETWORK)
    sys.addaudithook(_hook(Path.cwd().resolve()))
    spec = spec_from_loader("answer", _Text(task["source"]))
    assert spec is not None
    sys.modules["answer"] = module = module_from_spec(spec)
    for text in (task["source"], task["tests"]):
        _Text(text).exec_module(module)
    os.write(output, task["word"].encode())


if __name__ == "__main__":
    main(json.load(sys.stdin))
    os._exit(0)
