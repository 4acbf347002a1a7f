"""How a run's state lies on its ranks: whole on each, or cut into one part a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.config.deepspeed import offloads, stage_of
from flatout.config.schema import Config
from flatout.errors import UsageError

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "deepspeed"]
# strategies that cut weights, too
CUTS_WEIGHTS = frozenset({"zero3", "fsdp", "hsdp"})
# DeepSpeed's defaults at stage 3: 5e8 gradients in fp32 wait in a bucket, and up to 1e9 weights in bf16 are gathered
DEEPSPEED_3_BUFFERS_BYTES = 4 * 500_000_000 + 2 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Spread:
    """A strategy and its sizes: `num_replicas` groups of `num_shards` ranks, each group holding the whole state once.

    `frees_weights` says that a layer's gathered weights are dropped after its forward pass; `offload` that the state
    waits in host memory; `sums_late` that gradients are whole until the last micro-batch; `keeps_gradients` that their
    memory is held from step to step, beside `buffers_bytes` more; `compiles` that layers can be compiled. `reason` is a
    line for the console.
    """

    strategy: Strategy = "single"
    num_shards: int = 1
    num_replicas: int = 1
    frees_weights: bool = False
    offload: bool = False
    reason: str = "single: one rank"
    sums_late: bool = False
    keeps_gradients: bool = False
    buffers_bytes: int = 0
    compiles: bool = True

    @property
    def lockstep(self) -> bool:
        """Whether passes need every rank, so that all must take equally many."""
        return self.strategy not in ("single", "ddp")


ALONE = Spread()


def spread_of(config: Config, strategy: str, *, num_ranks: int, num_nodes: int, why: str) -> Spread:
    """A strategy by name (not `auto`) over so many ranks. Raises UsageError where it does not fit them."""
    if num_ranks == 1:
        return Spread(reason="single: one rank" + (f", so not {strategy}" if strategy != "single" else ""))
    if strategy == "single":
        raise UsageError(f"strategy: single is for one rank; got {num_ranks}, set strategy: auto or start one process")
    reason = f"{strategy} over {num_ranks} ranks: {why}"
    if strategy == "ddp":
        return Spread("ddp", 1, num_ranks, reason=reason)
    if strategy == "deepspeed":
        stage = stage_of(config.deepspeed)
        return Spread(
            "deepspeed",
            num_ranks,
            frees_weights=stage == 3,
            offload=offloads(config.deepspeed),
            reason=f"{reason}, ZeRO stage {stage}",
            sums_late=stage == 1,
            keeps_gradients=stage != 2,
            buffers_bytes=DEEPSPEED_3_BUFFERS_BYTES if stage == 3 else 0,
            # at stage 3 weights are gathered by hooks on every module, which no compiled layer runs
            compiles=stage < 3,
        )
    num_replicas = _num_replicas(config, num_ranks, num_nodes) if strategy == "hsdp" else 1
    asked = config.sharding.reshard_after_forward
    frees = strategy in CUTS_WEIGHTS if asked == "auto" else asked
    num_shards = num_ranks // num_replicas
    if num_replicas > 1:
        reason += f"; {num_replicas} replicas of {num_shards} parts"
    offload, late = config.sharding.offload, strategy == "zero1"
    return Spread(strategy, num_shards, num_replicas, frees, offload, reason, late)  # type: ignore[arg-type]


def _num_replicas(config: Config, num_ranks: int, num_nodes: int) -> int:
    replicas = config.sharding.replicas or num_nodes
    if replicas < 2 or num_ranks % replicas or num_ranks == replicas:
        raise UsageError(
            f"strategy: hsdp cuts {num_ranks} ranks into at least two replicas of equal size, with at least two ranks "
            f"each; got {replicas}, set sharding.replicas to a divisor up to {num_ranks // 2}, or strategy: fsdp"
        )
    return replicas
