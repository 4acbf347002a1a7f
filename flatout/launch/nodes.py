"""Which node of how many this is, from the command line or from a cluster's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flatout.errors import UsageError

DEFAULT_PORT = 29400
ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Nodes:
    """This node's place. Fewer `num_min` than `num_max` is elastic; `endpoint` is HOST:PORT of node 0."""

    num_min: int = 1
    num_max: int = 1
    index: int = 0
    endpoint: str = ""

    @property
    def host(self) -> str:
        """Host of the endpoint."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of the endpoint."""
        return int(self.endpoint.rpartition(":")[2])


def parse_nodes(nnodes: str, node_rank: int, rdzv: str | None) -> Nodes:
    """`2` or `1:2` nodes, this one's number and HOST:PORT of node 0. Raises UsageError naming the option at fault."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    if match is None:
        raise UsageError(f"--nnodes is {nnodes!r}; expected a number such as 2, or fewest:most such as 1:2")
    num_min, num_max = int(match[1]), int(match[2] or match[1])
    if not 1 <= num_min <= num_max:
        raise UsageError(f"--nnodes is {nnodes}; expected at least 1 node and fewest:most in this order")
    if not 0 <= node_rank < num_max:
        raise UsageError(f"--node-rank is {node_rank}; expected 0 to {num_max - 1} with --nnodes {nnodes}")
    if num_max == 1:
        return Nodes()
    if rdzv is None:
        raise UsageError("--rdzv is missing; with several nodes give HOST:PORT of node 0, the same on every node")
    found = ENDPOINT.fullmatch(rdzv)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise UsageError(f"--rdzv is {rdzv!r}; expected HOST:PORT of node 0, such as 10.0.0.1:{DEFAULT_PORT}")
    return Nodes(num_min, num_max, node_rank, rdzv)


def nodes_of(env: Mapping[str, str]) -> Nodes:
    """The node's place as a Kubernetes TrainJob or PyTorchJob tells it (PET_NNODES, PET_NODE_RANK, ...)."""
    nnodes = env.get("PET_NNODES", "1")
    address, port = env.get("PET_MASTER_ADDR"), env.get("PET_MASTER_PORT", str(DEFAULT_PORT))
    endpoint = env.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else None)
    return parse_nodes(nnodes, number_of(env, "PET_NODE_RANK", env.get("RANK", "0")), endpoint)


def slurm_rank(env: Mapping[str, str]) -> dict[str, str] | None:
    """RANK and the rest for one task of several that srun started; None elsewhere.

    Only srun sets SLURM_STEP_NUM_TASKS: the batch script itself, which has SLURM_PROCID too, is no rank.
    """
    world = number_of(env, "SLURM_STEP_NUM_TASKS", "1")
    if world < 2 or "SLURM_PROCID" not in env:
        return None
    # srun may bind each task to its own GPU, which then is number 0
    own_gpu = "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    seed = number_of(env, "SLURM_JOB_ID", "0") * 31 + number_of(env, "SLURM_STEP_ID", "0")
    return {
        "RANK": str(number_of(env, "SLURM_PROCID", "0")),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0" if own_gpu else str(number_of(env, "SLURM_LOCALID", "0")),
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": env.get("MASTER_PORT") or str(20_000 + seed % 10_000),
    }


def first_host(nodelist: str) -> str:
    """`node[03-07,12],x1` -> `node03`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")


def number_of(env: Mapping[str, str], name: str, default: str) -> int:
    """A variable's whole number. Raises UsageError for anything else."""
    text = env.get(name) or default
    if not text.isdigit():
        raise UsageError(f"{name} is {text!r} in the environment; expected a whole number")
    return int(text)
