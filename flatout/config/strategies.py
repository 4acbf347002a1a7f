"""The table of strategies and what each one shards, for the configuration, the plan and parallel/strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

StrategyName = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "deepspeed"]


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """What one strategy does. `module` is the module of flatout.parallel.strategies that has its `make`.

    `shards_state`: gradients and optimizer state are sharded, so each pass needs every rank. `shards_weights`: weights
    are sharded too, and gathered layer by layer. `sums_late`: gradients are summed once per step, after its last
    micro-batch. `has_replicas`: several groups of ranks each hold the whole state.
    """

    module: str
    shards_state: bool = True
    shards_weights: bool = False
    sums_late: bool = False
    has_replicas: bool = False


STRATEGIES: Mapping[str, StrategyTraits] = MappingProxyType(
    {
        "single": StrategyTraits("single", shards_state=False),
        "ddp": StrategyTraits("ddp", shards_state=False),
        "zero1": StrategyTraits("sharded", sums_late=True),
        "zero2": StrategyTraits("sharded"),
        "zero3": StrategyTraits("sharded", shards_weights=True),
        "fsdp": StrategyTraits("sharded", shards_weights=True),
        "hsdp": StrategyTraits("sharded", shards_weights=True, has_replicas=True),
        # what it shards depends on its JSON, see flatout.config.deepspeed
        "deepspeed": StrategyTraits("deepspeed"),
    }
)
