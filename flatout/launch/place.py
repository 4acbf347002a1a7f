"""Does this process train by itself, as a rank that a launcher made, or does it start the ranks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.errors import ResourceError, UsageError
from flatout.launch.nodes import DEFAULT_PORT, Nodes, nodes_of, number_of, parse_nodes, slurm_rank

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Here:
    """Train in this process, after setting `environment`."""

    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Start:
    """Start `num_procs` processes on this node (a number, or `gpu` for one a visible GPU).

    `visible` are the CUDA devices to show them, None: leave that as it is.
    """

    num_procs: str
    nodes: Nodes
    visible: tuple[str, ...] | None = None

    def without(self, local_rank: int) -> Start:
        """The same with one process, and its GPU, less."""
        visible = None
        if self.visible is not None:
            visible = tuple(name for place, name in enumerate(self.visible) if place != local_rank)
        return Start(str(int(self.num_procs) - 1), self.nodes, visible)


def decide(env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool, nodes: Nodes | None) -> Here | Start:
    """Where to train. `gpus` counts CPU processes when `on_cpu`; `nodes` are the command line's, None: none given.

    Raises ResourceError when a GPU is asked for that CUDA_VISIBLE_DEVICES hides, UsageError for nonsense.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= env.keys():
        return Here({})
    if slurm := slurm_rank(env):
        return Here(slurm)
    procs = str(len(gpus)) if gpus is not None else _procs_of(env, on_cpu)
    if {"RANK", "WORLD_SIZE"} <= env.keys():
        # one pod of a PyTorchJob: RANK counts pods
        if procs == "1":
            return Here({"LOCAL_RANK": "0"})
        nodes = nodes or _pods(env)
    nodes = nodes or nodes_of(env)
    if nodes.num_max > 1 and gpus is None and "PET_NPROC_PER_NODE" not in env and not on_cpu:
        procs = "gpu"
    visible = None if gpus is None or on_cpu else visible_devices(gpus, env.get(VISIBLE))
    if nodes.num_max == 1 and procs == "1":
        return Here({} if visible is None else {VISIBLE: ",".join(visible)})
    return Start(procs, nodes, visible)


def _procs_of(env: Mapping[str, str], on_cpu: bool) -> str:
    """Processes a node as a TrainJob or PyTorchJob tells it."""
    procs = env.get("PET_NPROC_PER_NODE", "1")
    if procs in ("auto", "cpu", "gpu"):
        return "1" if on_cpu else "gpu"
    if not procs.isdigit():
        raise UsageError(f"PET_NPROC_PER_NODE is {procs!r}; expected a number, auto or gpu")
    return procs


def _pods(env: Mapping[str, str]) -> Nodes:
    """A PyTorchJob's pods as nodes."""
    if "PET_NNODES" in env:
        return nodes_of(env)
    endpoint = f"{env.get('MASTER_ADDR', 'localhost')}:{env.get('MASTER_PORT', str(DEFAULT_PORT))}"
    return parse_nodes(env["WORLD_SIZE"], number_of(env, "RANK", "0"), endpoint)


def only_these(env: Mapping[str, str], *, gpus: Sequence[int] | None, on_cpu: bool) -> Mapping[str, str]:
    """The environment in which one process sees these GPUs alone. Raises as `visible_devices`."""
    return {} if gpus is None or on_cpu else {VISIBLE: ",".join(visible_devices(gpus, env.get(VISIBLE)))}


def visible_devices(gpus: Sequence[int], shown: str | None) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES' entries for these of the GPUs that it shows now (all when None).

    Raises ResourceError for a number it does not show.
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
