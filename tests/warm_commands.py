"""Commands that a shell starts warm: programs on its PATH ask this process to fork what they name (warm_process.py).

The programs inherit nothing of Python's start-up, so a command takes milliseconds instead of the seconds of imports.
What a warm process starts by `sys.executable`, as launchers start ranks, is warm too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

from warm_process import FILES, WarmProcess

# what it cannot hand over, such as `python -c`, it starts as a real process
PROGRAM = """#!{python} -IS
import json, os, socket, sys
words = {prefix} + [word for word in sys.argv[1:] if word != "-u"]
if words[0][:1] == "-" and words[0] not in ("-m", "-P"):
    os.execv({python!r}, [{python!r}, *words])
files = {{name: int(os.environ[name]) for name in {files} if name in os.environ}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([words, dict(os.environ), [*files], os.getcwd(), os.getpid()])
    socket.send_fds(server, [b"files"], [*files.values()])
    server.sendall(request.encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or 1))
"""


class WarmCommands:
    """Programs in `folder`: each command by the words after `python` that it stands for."""

    def __init__(self, folder: Path, commands: Mapping[str, list[str]]) -> None:
        self.folder, self.address, self.python = folder, str(folder / "socket"), str(folder / "python")
        for name, prefix in {"python": [], **commands}.items():
            told = {"python": sys.executable, "prefix": prefix, "files": FILES, "address": self.address}
            (folder / name).write_text(PROGRAM.format(**told))
            (folder / name).chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen()
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            program, _ = self._server.accept()
            Thread(target=self._answer, args=(program,), daemon=True).start()

    def _answer(self, program: socket.socket) -> None:
        """Run what a program asks for; end it if the program is killed."""
        with program, suppress(OSError):
            _, fds, _, _ = socket.recv_fds(program, 5, len(FILES))
            request = b"".join(iter(lambda: program.recv(65_536), b""))
            words, env, names, cwd, pid = json.loads(request)
            env |= {name: str(fd) for name, fd in zip(names, fds, strict=True)} | {"WARM_PYTHON": self.python}
            output = Path(f"/proc/{pid}/fd/1")
            process = WarmProcess(words, env, output, Path(cwd), append=True)
            for fd in fds:
                os.close(fd)
            while process.poll() is None and Path(f"/proc/{pid}").exists():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
            if process.poll() is None:
                process.terminate()
            code = process.wait()
            program.sendall(str(code if code >= 0 else 128 - code).encode())
