"""The command line and the environment of torch's elastic launcher for one attempt of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.launch.place import VISIBLE, Start

LOGS_VARIABLE = "FLATOUT_LOGS"
JOIN_TIMEOUT_S = 900
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks of this node. `run_id` is equal on all nodes; `address` and `interface` are this node's.

    `words` follow `python -m flatout`.
    """

    start: Start
    words: Sequence[str]
    run_id: str
    address: str = LOOPBACK
    interface: str | None = "lo"


def launcher_argv(attempt: Attempt, python: str) -> list[str]:
    """torch's launcher with a store of its own on a free loopback port, or at the endpoint of several nodes.

    It restarts nothing itself: every attempt is a new launcher, so no address of a dead rank outlives it. It stops when
    this process dies.
    """
    nodes = attempt.start.nodes
    argv = [python, "-m", "flatout.launch.agent", str(os.getpid()), "torch.distributed.run"]
    argv += [f"--nproc-per-node={attempt.start.num_procs}"]
    argv += [f"--nnodes={nodes.num_min}:{nodes.num_max}", "--max-restarts=0", f"--rdzv-id={attempt.run_id}"]
    if nodes.num_max == 1:
        argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0"]
    else:
        conf = f"is_host={int(nodes.index == 0)},join_timeout={JOIN_TIMEOUT_S},last_call_timeout=5"
        argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}", f"--rdzv-conf={conf}"]
    return [*argv, f"--local-addr={attempt.address}", "-m", "flatout", *attempt.words]


def launcher_environment(attempt: Attempt, parent: Mapping[str, str], logs: Path, num_cores: int) -> dict[str, str]:
    """`parent` with what the ranks need; what the user set stays."""
    # variables by which torch's launcher and a cluster describe this process are not the ranks'
    env = {name: value for name, value in parent.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    if attempt.start.nodes.num_max > 1:
        # ranks that share the store of a launcher at a fixed endpoint may meet the addresses of dead ones
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        # each attempt's launcher has a store of its own; another one's port is only looked up before ranks start, and
        # may be another process's by the time the first of them listens there
        env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    env[LOGS_VARIABLE] = str(logs)
    env["PYTHONUNBUFFERED"] = "1"
    if attempt.start.visible is not None:
        env[VISIBLE] = ",".join(attempt.start.visible)
    if attempt.interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", attempt.interface)
    if attempt.start.num_procs.isdigit():
        env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // int(attempt.start.num_procs))))
    return env
