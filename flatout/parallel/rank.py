"""Who this process is among all of the run; the only place that reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flatout.errors import UsageError

# today's name and those that torch reads too
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Rank:
    """`index` of `world` processes; `local_index` is the place on this host (its GPU), of `local_world` (0: all)."""

    index: int = 0
    world: int = 1
    local_index: int = 0
    local_world: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; one process when absent."""
        env = os.environ if env is None else env
        try:
            names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}
            rank = cls(*(int(env.get(name, default)) for name, default in names.items()))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})") from error
        if not 0 <= rank.index < rank.world:
            raise UsageError(f"RANK is {rank.index}, but WORLD_SIZE is {rank.world}")
        return rank

    @property
    def num_nodes(self) -> int:
        """Hosts with equally many ranks each; 1 where they are not."""
        even = self.local_world and self.world % self.local_world == 0
        return self.world // self.local_world if even else 1

    @property
    def is_first(self) -> bool:
        return self.index == 0


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def adopt(values: Mapping[str, str]) -> None:
    """Set variables of this process; those of CUDA and of the group of ranks work only before torch reads them."""
    os.environ.update(values)


def master_address() -> str:
    """Where rank 0 is; this host when no launcher said it."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def ask_for_deterministic_cublas() -> None:
    """Set cuBLAS's workspace so that its results repeat; works only before the first CUDA call of the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def growing_segments(env: Mapping[str, str]) -> dict[str, str]:
    """What has torch's allocator grow segments of GPU memory instead of getting more of them, which fit no other size.

    Steps differ in tokens, so without it the memory that earlier sizes left in pieces can fill a GPU. What a user has
    set for the allocator stays. To be adopted before torch is imported: a library's import may use CUDA already.
    """
    if sys.platform != "linux" or any(name in env for name in _ALLOCATOR_SETTINGS):
        return {}
    return {_ALLOCATOR_SETTINGS[0]: "expandable_segments:True"}


def keep_compiled_kernels() -> str:
    """Let the compiler keep its kernels in this user's cache folder, which outlives a reboot; returns where.

    A folder that the environment names already stays. Where the cache folder cannot be written, the compiler's own
    choice (a folder of temporary files) stays, and the text says so. Works only before the first compilation.
    """
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return named
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout" / "compiler"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        return f"temporary files, as {folder} cannot be written ({error.strerror})"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)
