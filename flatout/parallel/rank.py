"""This process's rank among all processes of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flatout.environment import environment, whole_number
from flatout.errors import UsageError


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `world`; `local_index` is its index on this host (its GPU), of `local_world` (0: all ranks)."""

    index: int = 0
    world: int = 1
    local_index: int = 0
    local_world: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them; a single process when absent.

        Raises UsageError with the variable if only some of them are set or a value is invalid.
        """
        env = environment() if env is None else env
        world = whole_number(env, "WORLD_SIZE", 1)
        # a single process may omit these; with several, two that both default to rank 0 would hang
        default = 0 if world == 1 else None
        index, local_index = (whole_number(env, name, default) for name in ("RANK", "LOCAL_RANK"))
        if not index < world:
            raise UsageError(f"RANK is {index} in the environment, but WORLD_SIZE is {world}")
        return cls(index, world, local_index, whole_number(env, "LOCAL_WORLD_SIZE", 0))

    @property
    def num_nodes(self) -> int:
        """The number of hosts, if all have the same number of ranks; else 1."""
        even = self.local_world and self.world % self.local_world == 0
        return self.world // self.local_world if even else 1

    @property
    def is_first(self) -> bool:
        return self.index == 0
