"""Who this process is among all of the run; the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flatout.errors import UsageError


@dataclass(frozen=True, slots=True)
class Rank:
    """`index` of `world` processes; `local_index` is the place on this host (its GPU)."""

    index: int = 0
    world: int = 1
    local_index: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; one process when they are absent."""
        env = os.environ if env is None else env
        try:
            rank = cls(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0")))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})") from error
        if not 0 <= rank.index < rank.world:
            raise UsageError(f"RANK is {rank.index}, but WORLD_SIZE is {rank.world}")
        return rank

    @property
    def is_first(self) -> bool:
        return self.index == 0


def ask_for_deterministic_cublas() -> None:
    """Set cuBLAS's workspace so that its results repeat; works only before the first CUDA call of the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
