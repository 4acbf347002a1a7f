"""Make or complete the virtual environment of this clone; `make setup` runs this.

Nothing is installed yet when this starts, and its Python may be too old for flatout: it uses the standard library only,
and no syntax that is newer than Python 3.7.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

OLDEST = (3, 11)
# PyTorch's own index of CPU builds: the torch of the general index brings CUDA's libraries on Linux
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# seconds that an index has to answer, and between two lines of progress
ANSWER_S, LINE_S = 5.0, 4.0
_DOWNLOAD = re.compile(r"Downloading (\S+?)-\d\S* \(")
_BYTES = re.compile(r"Progress (\d+) of (\d+)")
_INSTALL = "Installing collected packages: "
_RARE = "/(tests|testing)/|/transformers/models/"
_SHOW_VERSION = "import sys; print(*sys.version_info[:2])"


class Progress:
    """What pip does, by its output: `doing` is a few words, `tail` the last lines."""

    def __init__(self) -> None:
        self.doing = ""
        self.tail: collections.deque[str] = collections.deque(maxlen=30)
        self._file = ""

    def read(self, lines: Iterable[str]) -> None:
        """Read pip's output to its end."""
        for line in lines:
            self._read_line(line)

    def _read_line(self, line: str) -> None:
        size = _BYTES.match(line)
        if size:
            done, total = (int(number) / 1e6 for number in size.groups())
            self.doing = f"downloading {self._file}, {done:,.0f} of {total:,.0f} MB"
            return
        if not line.startswith("WARNING: Location"):  # a folder of wheels without this package
            self.tail.append(line)
        download = _DOWNLOAD.search(line)
        if download:
            self._file = download.group(1)
            self.doing = f"downloading {self._file}"
        elif line.startswith(_INSTALL):
            self.doing = f"installing {line.count(',') + 1} packages"
        elif not self.doing.startswith("installing") and not line.startswith(("Requirement already", "WARNING")):
            self.doing = line.strip()[:70]


def run(what: str, command: list[str], *, check: bool = True) -> None:
    """Run a command quietly, with a line of progress every few seconds. Exits with its last lines if it fails."""
    print(what, flush=True)
    progress, began = Progress(), time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        errors="replace",
    )
    assert process.stdout is not None
    reader = threading.Thread(target=progress.read, args=[process.stdout])
    reader.start()
    while reader.is_alive():
        reader.join(LINE_S)
        if reader.is_alive():
            print(f"  {time.monotonic() - began:.0f} s  {progress.doing}".rstrip(), flush=True)
    if process.wait() and check:
        sys.stderr.write("".join(progress.tail))
        sys.exit(f"make: this failed with exit code {process.returncode}: {' '.join(command)}")


def version_of(python: str) -> tuple[int, ...]:
    """Return major and minor version of a Python; () if it does not run or has no pip."""
    done = subprocess.run(
        [python, "-c", f"import pip; {_SHOW_VERSION}" if os.sep in python else _SHOW_VERSION],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return () if done.returncode else tuple(map(int, done.stdout.split()))


def problem_of(venv: Path) -> str | None:
    """Return one sentence that says why `venv` cannot be made or used, and what to do; None if it can."""
    python = venv / "bin" / "python"
    needs, runs = f"flatout needs Python {OLDEST[0]}.{OLDEST[1]} or newer", ".".join(map(str, sys.version_info[:3]))
    if os.path.lexists(str(python)):
        version = version_of(str(python)) if python.exists() else ()
        if not version:
            return f"{venv} is damaged: its Python does not run or has no pip; remove it: rm -r {venv}"
        if version < OLDEST:
            return f"{needs}; {venv} has {'.'.join(map(str, version))}; remove it: rm -r {venv}"
        return None
    if sys.version_info[:2] < OLDEST:
        newer = (f"python3.{minor}" for minor in (13, 12, 11))
        found = next((name for name in newer if shutil.which(name) and version_of(name) >= OLDEST), None)
        step = f"make PYTHON={found} setup" if found else "install one, and name it: make PYTHON=python3.11 setup"
        return f"{needs}; {sys.executable} is Python {runs}; {step}"
    if find_spec("ensurepip") is None:
        return "this Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
    return None


def torch_index() -> list[str]:
    """Return pip's options for torch's CPU build; [] with an NVIDIA driver, or if its index does not answer."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        print("This machine has an NVIDIA driver: torch with CUDA, about 3 GB")
        return []
    print("No NVIDIA driver: torch's CPU build", flush=True)
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=ANSWER_S).close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        print(f"{CPU_INDEX} does not answer ({reason}).")
        print("  pip takes torch from where it is set up to look: from the public index, that brings CUDA, about 3 GB")
        return []
    return ["--extra-index-url", CPU_INDEX]


def main(venv: Path, extra: str) -> int:
    """Make `venv` if it is missing, and install flatout with an extra into it. Returns the exit status."""
    problem = problem_of(venv)
    if problem:
        print(f"make: {problem}", file=sys.stderr)
        return 2
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        run(f"Making {venv} with Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", str(venv)])
    pip = [python, "-m", "pip", "--no-input", "install", "--no-compile", "-c", "constraints.txt"]
    # an older pip shows no progress to a pipe, and tries for minutes where no versions fit
    run("Updating pip", [*pip, "-U", "pip"])
    pip.append("--progress-bar=raw")
    index = torch_index()
    if index:
        run("Installing torch", [*pip, "--no-deps", *index, "torch"])
    run(f"Installing flatout with its extra `{extra}`", [*pip, "-e", f".[{extra}]"])
    # its one dependency is flatout
    run("Installing flatout-migrate", [*pip, "--no-deps", "-e", "migrate"])
    # pip compiles in one process, and what few programs import too; a few files of other packages are no Python 3
    compile_all = [python, "-m", "compileall", "-j", "0", "-x", _RARE, str(venv / "lib")]
    run("Compiling", compile_all, check=False)
    print(f"{venv} is ready. To use the command flatout in this shell: . {venv}/bin/activate")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
    except KeyboardInterrupt:
        sys.exit("make: stopped; the same command continues")
