"""Decide whether this process trains (alone, or as a rank that a launcher started) or starts the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.environment import whole_number
from flatout.errors import ResourceError, UsageError
from flatout.launch.nodes import DEFAULT_PORT, Nodes, nodes_of, parse_nodes, slurm_rank

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class RunHere:
    """Train in this process, after setting `environment`."""

    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SpawnRanks:
    """Start `num_procs` processes on this node; `gpu` means one for each visible GPU.

    `visible` is CUDA_VISIBLE_DEVICES for them; None leaves it unchanged.
    """

    num_procs: int | Literal["gpu"]
    nodes: Nodes
    visible: tuple[str, ...] | None = None


def choose_launch_mode(
    env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool, nodes: Nodes | None
) -> RunHere | SpawnRanks:
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
    visible = None if gpus is None or on_cpu else visible_devices(gpus, env.get(VISIBLE))
    if nodes.num_max == 1 and procs == 1:
        return RunHere({} if visible is None else {VISIBLE: ",".join(visible)})
    return SpawnRanks(procs, nodes, visible)


def _procs_of(env: Mapping[str, str], on_cpu: bool) -> int | Literal["gpu"]:
    """Return the processes per node that a TrainJob or PyTorchJob sets."""
    procs = env.get("PET_NPROC_PER_NODE", "1")
    if procs in ("auto", "cpu", "gpu"):
        return 1 if on_cpu else "gpu"
    if not procs.isdigit() or int(procs) < 1:
        raise UsageError(f"PET_NPROC_PER_NODE is {procs!r} in the environment; expected a number, auto or gpu")
    return int(procs)


def visible_devices_env(env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool) -> Mapping[str, str]:
    """Return the environment in which a process sees only these GPUs. Raises the same errors as `visible_devices`."""
    return {} if gpus is None or on_cpu else {VISIBLE: ",".join(visible_devices(gpus, env.get(VISIBLE)))}


def visible_devices(gpus: Sequence[int], shown: str | None) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES for `gpus`, which count within its current value `shown`.

    If `shown` is None, all GPUs are visible. Raises ResourceError for a number beyond the visible GPUs.
    """
    if shown is None:
        return tuple(str(gpu) for gpu in gpus)
    names = [name.strip() for name in shown.split(",") if name.strip()]
    for gpu in gpus:
        if gpu >= len(names):
            raise ResourceError(
                f"gpus names GPU {gpu}, but CUDA_VISIBLE_DEVICES={shown} shows {len(names)}, which are numbered from "
                "0; name others, or change that variable"
            )
    return tuple(names[gpu] for gpu in gpus)
