"""Decide whether this process trains (alone, or as a rank that a launcher started) or starts the ranks of its node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.environment import whole_number
from flatout.errors import ResourceError, UsageError
from flatout.io.gpu_driver import VISIBLE

DEFAULT_PORT = 29400
ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a run, and this one among them; elastic if `num_min` < `num_max`."""

    num_min: int = 1
    num_max: int = 1
    index: int = 0
    """This node's."""
    endpoint: str = ""
    """HOST:PORT of node 0."""


@dataclass(frozen=True, slots=True)
class RunHere:
    """Train in this process, after setting `environment`."""

    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SpawnRanks:
    """Start the processes of this node."""

    num_procs: int | Literal["gpu"]
    """How many; gpu: one for each visible GPU."""
    nodes: Nodes
    visible: tuple[str, ...] | None = None
    """CUDA_VISIBLE_DEVICES for them; None leaves it unchanged."""


LaunchMode = RunHere | SpawnRanks


def choose_launch_mode(
    env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool, nodes: Nodes | None
) -> LaunchMode:
    """Decide where to train, from the environment and the command line.

    With `on_cpu`, the length of `gpus` is the number of CPU processes. `nodes` comes from the command line (None: not
    given). Raises ResourceError for a GPU that CUDA_VISIBLE_DEVICES hides, and UsageError for invalid values.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= env.keys():
        return RunHere({})
    if slurm := slurm_rank(env):
        return RunHere(slurm)
    procs = len(gpus) if gpus is not None else _procs_of(env, on_cpu)
    if {"RANK", "WORLD_SIZE"} <= env.keys():
        # a pod of a PyTorchJob, where RANK is the index of the pod
        if procs == 1:
            return RunHere({"LOCAL_RANK": "0"})
        if nodes is None and "PET_NNODES" not in env:
            port = whole_number(env, "MASTER_PORT", DEFAULT_PORT, below=1 << 16)
            num_pods, index = whole_number(env, "WORLD_SIZE"), whole_number(env, "RANK")
            if not index < num_pods:
                raise UsageError(f"RANK is {index} in the environment, but WORLD_SIZE is {num_pods}")
            nodes = parse_nodes(str(num_pods), index, f"{env.get('MASTER_ADDR') or 'localhost'}:{port}")
    nodes = nodes or nodes_of(env)
    if nodes.num_max > 1 and gpus is None and "PET_NPROC_PER_NODE" not in env and not on_cpu:
        procs = "gpu"
    if nodes.num_max == 1 and procs == 1:
        return RunHere(visible_devices_env(env, gpus=gpus, on_cpu=on_cpu))
    return SpawnRanks(procs, nodes, visible_devices(env, gpus=gpus, on_cpu=on_cpu))


def _procs_of(env: Mapping[str, str], on_cpu: bool) -> int | Literal["gpu"]:
    """Return the processes per node that a TrainJob or PyTorchJob sets."""
    procs = env.get("PET_NPROC_PER_NODE", "1")
    if procs in ("auto", "cpu", "gpu"):
        return 1 if on_cpu else "gpu"
    if not procs.isdigit() or int(procs) < 1:
        raise UsageError(f"PET_NPROC_PER_NODE is {procs!r} in the environment; expected a number, auto or gpu")
    return int(procs)


def parse_nodes(nnodes: str, node_rank: int, rdzv: str | None) -> Nodes:
    """Parse --nnodes (`2` or `1:2`), --node-rank and --rdzv (HOST:PORT of node 0). Raises UsageError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    if match is None:
        raise UsageError(f"--nnodes is {nnodes!r}; expected a number such as 2, or MIN:MAX such as 1:2")
    num_min, num_max = int(match[1]), int(match[2] or match[1])
    if not 1 <= num_min <= num_max:
        raise UsageError(f"--nnodes is {nnodes}; expected at least 1 node, and MIN:MAX with MIN at most MAX")
    if not 0 <= node_rank < num_max:
        raise UsageError(f"--node-rank is {node_rank}; expected 0 to {num_max - 1} with --nnodes {nnodes}")
    if num_max == 1:
        return Nodes()
    if rdzv is None:
        raise UsageError("--rdzv is missing; with several nodes, give HOST:PORT of node 0, the same on every node")
    endpoint = ENDPOINT.fullmatch(rdzv)
    if endpoint is None or not 0 < int(endpoint["port"]) < 65536:
        raise UsageError(f"--rdzv is {rdzv!r}; expected HOST:PORT of node 0, such as 10.0.0.1:{DEFAULT_PORT}")
    return Nodes(num_min, num_max, node_rank, rdzv)


def nodes_of(env: Mapping[str, str]) -> Nodes:
    """Read this node's index from the variables of a TrainJob or PyTorchJob (PET_NNODES, PET_NODE_RANK, ...)."""
    if (nnodes := env.get("PET_NNODES")) is None:
        return Nodes()
    if not re.fullmatch(r"\d+(:\d+)?", nnodes):
        raise UsageError(f"PET_NNODES is {nnodes!r} in the environment; expected a number such as 2, or 1:2")
    address, port = env.get("PET_MASTER_ADDR"), env.get("PET_MASTER_PORT", str(DEFAULT_PORT))
    endpoint = env.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else None)
    index = whole_number(env, "PET_NODE_RANK" if "PET_NODE_RANK" in env else "RANK", 0)
    return parse_nodes(nnodes, index, endpoint)


def slurm_rank(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return RANK and the related variables if srun started this process as one of several tasks, else None.

    Only srun sets SLURM_STEP_NUM_TASKS; SLURM_PROCID is also set in the batch script, which is not a rank.
    """
    world = whole_number(env, "SLURM_STEP_NUM_TASKS", 1)
    if world < 2 or "SLURM_PROCID" not in env:
        return None
    # srun may bind each task to one GPU, which is then GPU 0
    own_gpu = "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    # the first host of a list such as `node[03-07,12],x1`: `node03`
    first = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", env.get("SLURM_STEP_NODELIST", "localhost"))
    assert first is not None
    seed = whole_number(env, "SLURM_JOB_ID", 0) * 31 + whole_number(env, "SLURM_STEP_ID", 0)
    return {
        "RANK": str(whole_number(env, "SLURM_PROCID")),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0" if own_gpu else str(whole_number(env, "SLURM_LOCALID", 0)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or "".join(filter(None, first.groups())),
        "MASTER_PORT": env.get("MASTER_PORT") or str(20_000 + seed % 10_000),
    }


def visible_devices(env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES for `gpus`, which count within its current value; None for all.

    Raises ResourceError for a number beyond the visible GPUs.
    """
    if gpus is None or on_cpu:
        return None
    if (shown := env.get(VISIBLE)) is None:
        return tuple(str(gpu) for gpu in gpus)
    names = [name.strip() for name in shown.split(",") if name.strip()]
    for gpu in gpus:
        if gpu >= len(names):
            raise ResourceError(
                f"gpus names GPU {gpu}, but CUDA_VISIBLE_DEVICES={shown} shows {len(names)} GPUs, numbered from "
                "0; change gpus or that variable"
            )
    return tuple(names[gpu] for gpu in gpus)


def visible_devices_env(env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool) -> Mapping[str, str]:
    """Return the environment in which a process sees only these GPUs. Raises the same errors as `visible_devices`."""
    visible = visible_devices(env, gpus=gpus, on_cpu=on_cpu)
    return {} if visible is None else {VISIBLE: ",".join(visible)}
