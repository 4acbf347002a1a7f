"""How a run's state is distributed over its ranks: replicated, or sharded."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.config.deepspeed import STAGE_3_BUFFERS_BYTES, offloads, stage_of
from flatout.config.parallel import STRATEGIES, StrategyName
from flatout.errors import Fix, UsageError
from flatout.planner.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A strategy and its sizes."""

    strategy: StrategyName = "single"
    num_shards: int = 1
    """Ranks that hold the whole state together, each a part."""
    num_replicas: int = 1
    """Groups of so many ranks."""
    reshard_after_forward: bool = False
    """Whether a layer's gathered weights are dropped after its forward pass."""
    offload: bool = False
    """Whether the state is kept in host memory."""
    reason: str = "single: one rank"
    """A line for the console."""
    sums_late: bool = False
    """Whether gradients are unsharded until the last micro-batch."""
    keeps_gradients: bool = False
    """Whether their memory stays allocated between steps."""
    buffers_bytes: int = 0
    """Additional buffers of the strategy."""
    compiles: bool = True
    """Whether layers can be compiled."""
    expert_ranks: int = 1
    """Consecutive ranks that share each layer's experts."""
    context_ranks: int = 1
    """Consecutive ranks that share each micro-batch's tokens."""

    def data_parallel_rank_of(self, rank_index: int) -> int:
        """Return which `StepPlan.by_rank` a rank takes: ranks that share micro-batches take the same."""
        return rank_index // self.context_ranks

    @property
    def lockstep(self) -> bool:
        """Whether passes involve every rank, so that all must run the same number of them."""
        return self.shards_state or self.expert_ranks > 1

    @property
    def lockstep_in_inference(self) -> bool:
        """Whether passes without gradients do, too: they gather weights, or tokens for shared experts."""
        return self.shards_weights or self.reshard_after_forward or self.expert_ranks > 1

    @property
    def shards_state(self) -> bool:
        """Whether gradients and optimizer state are sharded, by any strategy."""
        return STRATEGIES[self.strategy].shards_state

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded, too, by one of flatout's own strategies."""
        return STRATEGIES[self.strategy].shards_weights


SINGLE_RANK = ParallelLayout()


def resolve_layout(
    settings: PlanSettings, strategy: StrategyName, *, num_ranks: int, num_nodes: int, why: str
) -> ParallelLayout:
    """Resolve a named strategy (not `auto`) for `num_ranks` ranks. Raises UsageError if it does not fit them."""
    expert_ranks, context_ranks = settings.expert_ranks, settings.context_ranks
    if num_ranks == 1:
        return ParallelLayout(reason="single: one rank" + (f", so not {strategy}" if strategy != "single" else ""))
    if strategy == "single":
        raise UsageError(f"strategy: single is for one rank; got {num_ranks}", [Fix({"strategy": "auto"})])
    reason = f"{strategy} over {num_ranks} ranks: {why}"
    if expert_ranks > 1:
        reason += f"; {expert_ranks} ranks share each layer's experts"
    if context_ranks > 1:
        reason += f"; {context_ranks} ranks share each micro-batch's tokens"
    if strategy == "ddp":
        return ParallelLayout(
            "ddp", 1, num_ranks, reason=reason, expert_ranks=expert_ranks, context_ranks=context_ranks
        )
    if against := settings.reason_against_sharding:
        raise UsageError(f"strategy: {strategy} does not work with {against}", [Fix({"strategy": "ddp"})])
    traits, num_replicas = STRATEGIES[strategy], 1
    if traits.package:
        stage = stage_of(settings.deepspeed)
        return ParallelLayout(
            strategy,
            num_ranks,
            reshard_after_forward=stage == 3,
            offload=offloads(settings.deepspeed),
            reason=f"{reason}, ZeRO stage {stage}",
            sums_late=stage == 1,
            keeps_gradients=stage != 2,
            buffers_bytes=STAGE_3_BUFFERS_BYTES if stage == 3 else 0,
            # stage 3 gathers weights in module hooks, which compiled layers do not run
            compiles=stage < 3,
        )
    if traits.has_replicas:
        num_replicas = settings.sharding.replicas or num_nodes
        if num_replicas < 2 or num_ranks % num_replicas or num_ranks == num_replicas:
            raise UsageError(
                f"strategy: hsdp splits {num_ranks} ranks into at least two replicas of equal size, with at least two "
                f"ranks each; got {num_replicas}; sharding.replicas takes a divisor up to {num_ranks // 2}",
                [Fix({"strategy": "fsdp"})],
            )
        reason += f"; {num_replicas} replicas of {num_ranks // num_replicas} shards"
    asked = settings.sharding.reshard_after_forward
    return ParallelLayout(
        strategy,
        num_ranks // num_replicas,
        num_replicas,
        reshard_after_forward=traits.shards_weights if asked == "auto" else asked,
        offload=settings.sharding.offload,
        reason=reason,
        sums_late=traits.sums_late,
        expert_ranks=expert_ranks,
        context_ranks=context_ranks,
    )
