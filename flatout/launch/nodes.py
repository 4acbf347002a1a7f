"""This node's index and the number of nodes, from the command line or a cluster's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flatout.environment import whole_number
from flatout.errors import UsageError

DEFAULT_PORT = 29400
ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Nodes:
    """This node's index among the nodes; elastic if `num_min` < `num_max`. `endpoint` is HOST:PORT of node 0."""

    num_min: int = 1
    num_max: int = 1
    index: int = 0
    endpoint: str = ""

    @property
    def host(self) -> str:
        """The endpoint's host."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The endpoint's port."""
        return int(self.endpoint.rpartition(":")[2])


def parse_nodes(nnodes: str, node_rank: int, rdzv: str | None) -> Nodes:
    """Parse --nnodes (`2` or `1:2`), --node-rank and --rdzv (HOST:PORT of node 0). Raises UsageError."""
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
    seed = whole_number(env, "SLURM_JOB_ID", 0) * 31 + whole_number(env, "SLURM_STEP_ID", 0)
    return {
        "RANK": str(whole_number(env, "SLURM_PROCID")),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0" if own_gpu else str(whole_number(env, "SLURM_LOCALID", 0)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": env.get("MASTER_PORT") or str(20_000 + seed % 10_000),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `node[03-07,12],x1` -> `node03`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")
