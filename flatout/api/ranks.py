"""This process among the ranks of a launcher, such as torchrun or srun."""

from __future__ import annotations

from flatout.environment import environment
from flatout.launch.launch_mode import slurm_rank
from flatout.parallel.rank import Rank

__all__ = ["Rank", "join_ranks", "leave_ranks", "this_rank"]


def this_rank() -> Rank:
    """Return this process's rank, as torchrun or srun set it; a single process without a launcher.

    Raises UsageError if variables are missing or do not fit.
    """
    env = environment()
    return Rank.from_env({**env, **(slurm_rank(env) or {})})


def join_ranks(timeout_s: float) -> None:
    """Join the other ranks, if any, over NCCL (GPU) or gloo (CPU), unless this process has joined already.

    Raises PeerLostError with those that have not joined after `timeout_s`.
    """
    from flatout.parallel.process_group import choose_device, join_group  # lazy, as below: torch

    rank = this_rank()
    join_group(rank, choose_device("auto", rank), join_s=timeout_s)


def leave_ranks() -> None:
    """Leave the other ranks, so that a run can join them itself."""
    from flatout.parallel.process_group import leave_group

    leave_group()
