"""The processes of this node's ranks: their environment, how they start, and how the kernel ended them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flatout.environment import LOGS, PARENT, RANK_VARIABLES, STATUS_BOARD, STORE_SOCKET
from flatout.errors import Fix, ResourceError
from flatout.io.bounded_wait import BoundedWait
from flatout.io.gpu_driver import VISIBLE
from flatout.io.own_files import start_python
from flatout.io.status_board import StatusBoard
from flatout.io.stop_signals import SIGNAL_EXIT_CODE
from flatout.launch.rendezvous import LOOPBACK, RendezvousInfo

# -P: modules of the working folder are not imported, as by the `flatout` command
MODULE = ("-P", "-m", "flatout")
PR_SET_PDEATHSIG = 1
COUNT_GPUS = "from flatout.io.gpu_driver import count_gpus; print(count_gpus())"
# files with a count of out-of-memory kills, narrowest scope first: cgroup v2, cgroup v1, host
OOM_COUNTS = ("sys/fs/cgroup{2}/memory.events", "sys/fs/cgroup/memory{1}/memory.oom_control", "proc/vmstat")


def start_ranks(
    argv: Sequence[str],
    info: RendezvousInfo,
    num_ranks: int,
    env: Mapping[str, str],
    folder: Path,
    board: StatusBoard | None = None,
) -> dict[int, subprocess.Popen[bytes]]:
    """Start `flatout WORDS` for each rank of this node, with the output in `folder`/rank-N.log."""
    started = {}
    for local_rank in range(num_ranks):
        rank = info.first_rank + local_rank
        values = (rank, info.world, local_rank, num_ranks, info.host, info.port)
        own = {**env, **dict(zip(RANK_VARIABLES, map(str, values), strict=True))}
        fds: tuple[int, ...] = ()
        if rank == 0 and info.listener is not None:
            fds = (info.listener.fileno(),)
            own[STORE_SOCKET] = str(fds[0])
        if board is not None:
            fds = (*fds, board.fd)
            own[STATUS_BOARD] = str(board.fd)
        # Ctrl-C reaches the ranks only once, through the supervisor
        log = folder / f"rank-{rank}.log"
        started[rank] = start_python([*MODULE, *argv], log, env=own, pass_fds=fds)
    if board is not None:
        os.close(board.fd)
    return started


def shared_environment(
    parent: Mapping[str, str],
    info: RendezvousInfo,
    num_ranks: int,
    *,
    visible: Sequence[str] | None,
    logs: Path,
) -> dict[str, str]:
    """Return `parent` plus what all ranks of this node need; the user's settings for libraries are kept."""
    # drop what another launcher or a cluster set to describe this process: it does not apply to the ranks
    others = ("PET_", "TORCHELASTIC_")
    env = {name: value for name, value in parent.items() if not name.startswith(others) and name not in RANK_VARIABLES}
    env |= {LOGS: str(logs), PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    if visible is not None:
        env[VISIBLE] = ",".join(visible)
    if info.host == LOOPBACK:
        # collectives' sockets stay on this machine
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    elif info.interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", info.interface)
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    return env


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent ends, in any way, so that no rank is left running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # the parent may have died before the call above
    if os.getppid() != parent:
        sys.exit(SIGNAL_EXIT_CODE + signal.SIGTERM)


def count_gpus(limit_s: float, setting: str) -> int:
    """Count the GPUs of the driver in a child process. Raises ResourceError for none, or no answer in `limit_s`."""
    wait = BoundedWait(limit_s, setting, error=ResourceError)
    command = [sys.executable, "-P", "-c", COUNT_GPUS]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        while asked.poll() is None:
            wait.pause("the GPU driver of this node", "run nvidia-smi for details")
        answer = asked.communicate()[0]
    finally:
        asked.kill()
    count = int(answer) if asked.returncode == 0 else 0
    if count == 0:
        on_cpu = Fix({"device": "cpu", "gpus": None}, "on the CPU")
        raise ResourceError("no GPU is visible on this node; set gpus to existing ones", [on_cpu])
    return count


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel killed for lack of memory in this control group, or else on this host."""
    groups = {1: "", 2: ""}
    for line in _lines_of(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            groups[2 if number == "0" else 1] = path.rstrip("/")
    for count in OOM_COUNTS:
        # inside a container the group's folder is the root of the mount
        for file in (count.format("", groups[1], groups[2]), count.format("", "", "")):
            for line in _lines_of(root / file):
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def _lines_of(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").splitlines()
    return []
