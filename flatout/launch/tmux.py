"""Run in tmux: commands, to run or to print, for a session with a window for the run and one for each rank's log."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.errors import ResourceError, UsageError

SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# columns and lines while nobody is attached; the same for all sessions, or lines would wrap again
SIZE = ("-x", "200", "-y", "50")
# a running tmux server has its own environment, so these are passed on; secrets must not be on a command line
PASSED_ON = re.compile(r"(CUDA|NCCL|GLOO|OMP|TORCH|PYTHON|TRITON)[A-Z0-9_]*|(HF_HOME|HF_HUB_OFFLINE|PATH|VIRTUAL_ENV)")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")


def commands(name: str, run: Sequence[str], logs: Sequence[Path], env: Mapping[str, str]) -> list[list[str]]:
    """Return the tmux commands for session `name`: window `run` for the command, `NAME_gpu_N` for the N-th log.

    Each log window is also in a session of the same name, so that `tmux attach -t NAME_gpu_0` opens it. The command
    runs in the folder in which these commands are run. Raises UsageError for a name that tmux would change or
    interpret as a target.
    """
    if not SESSION.fullmatch(name):
        raise UsageError(
            f"--tmux {name!r}: expected up to 64 letters, digits, _ and -, starting with a letter or digit"
        )
    variables = []
    for key, value in sorted(env.items()):
        if PASSED_ON.fullmatch(key) and not SECRET.search(key):
            variables += ["-e", _literal(f"{key}={value}")]
    # without -c, which tmux expands as a format: `#(...)` in a folder's name would run
    start = ["tmux", "new-session", "-d", "-s", name, "-n", "run", *SIZE]
    # kept open after the run ends, so that the last lines can be read
    keep = [";", "set-option", "-w", "-t", f"={name}:run", "remain-on-exit", "on"]
    made = [[*start, *variables, "--", *map(_literal, run), *keep]]
    for number, log in enumerate(logs):
        window = f"{name}_gpu_{number}"
        follow = ["tail", "-n", "+1", "-F", _literal(str(log))]
        made.append(["tmux", "new-window", "-d", "-t", f"={name}:", "-n", window, "--", *follow])
        made.append(["tmux", "new-session", "-d", "-t", f"={name}", "-s", window, *SIZE])
        made.append(["tmux", "select-window", "-t", f"={window}:{window}"])
    return made


def _literal(word: str) -> str:
    """Escape a `;` at the end of a word, which tmux would take for the end of the command; it expands no other part."""
    return f"{word[:-1]}\\;" if word.endswith(";") else word


def start(made: Sequence[Sequence[str]], name: str, folder: Path) -> None:
    """Run the commands in `folder`. Raises ResourceError without tmux, and UsageError when the session exists."""
    if shutil.which("tmux") is None:
        raise ResourceError("--tmux needs tmux, which is not installed here; install it, or remove --tmux")
    if subprocess.run(["tmux", "has-session", "-t", f"={name}"], capture_output=True, check=False).returncode == 0:
        raise UsageError(f"tmux session {name} exists already; attach with `tmux attach -t {name}`, or rename")
    for command in made:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ResourceError(f"{shlex.join(command[:2])} failed: {done.stderr.strip()}; nothing else was started")
