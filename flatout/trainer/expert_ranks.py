"""Leave each rank its part of the experts, and tell the strategy which parameters are parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.models.collectives import RankGroup
from flatout.models.experts.block import experts_modules
from flatout.models.experts.parallel import slice_experts
from flatout.models.load.model import LoadedModel
from flatout.parallel.shards import mark_slice
from flatout.parallel.strategies.protocol import Strategy
from flatout.track.callback import Reporter


def share_experts(loaded: LoadedModel, strategy: Strategy, reporter: Reporter) -> Callable[[], None]:
    """Keep this rank's experts alone if several ranks share them; return what marks the slices, also called here.

    It must be called again after parameters were replaced. Raises UsageError as `slice_experts` does.
    """
    if (mesh := strategy.expert_mesh) is None:
        return lambda: None
    group = RankGroup(mesh.get_group("expert").group_name, mesh.size(1), mesh.get_local_rank("expert"))
    slices = slice_experts(loaded.model, group)
    if loaded.waiting is not None:
        loaded.waiting.narrow(slices, group.size, group.place)
    modules: Any = experts_modules(loaded.model).values()
    numbers = sorted({module.num_experts for module in modules})
    counts = " or ".join(f"{number}, {number // group.size} of them" for number in numbers)
    reporter.stage("experts", f"each layer has {counts} on this rank; {group.size} ranks share them")

    def mark() -> None:
        for name, dim in slices.items():
            path, _, leaf = name.rpartition(".")
            mark_slice(getattr(loaded.model.get_submodule(path), leaf), mesh, dim)

    mark()
    return mark
