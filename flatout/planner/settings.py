"""What a plan reads of the settings: made of a configuration here, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from flatout.config.model import BaseConfig, FullConfig, LoraConfig
from flatout.config.optim import OptimizerTraits
from flatout.config.parallel import ShardingConfig, StrategyName
from flatout.config.schema import BatchConfig, Config, Recompute


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What decides a run's steps, the memory and FLOPs of their passes, and how ranks share the state."""

    seed: int
    method: Literal["lora", "full"]
    batch: BatchConfig
    lora: LoraConfig
    base: BaseConfig
    full: FullConfig
    sharding: ShardingConfig
    optimizer: OptimizerTraits
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"]
    compiles: bool
    """Whether layers are compiled, graphs recorded and experts grouped where they can be."""
    records_graphs: bool
    groups_experts: bool
    memory: Literal["auto"] | float
    """GiB of a GPU, or of a process on the CPU."""
    recompute: Literal["auto"] | Recompute
    strategy: Literal["auto"] | StrategyName
    deepspeed: dict[str, Any] | None
    expert_ranks: int
    context_ranks: int
    """Ranks that share each layer's experts, or each micro-batch's tokens."""
    trained_parts: frozenset[str]
    has_embedding_noise: bool
    num_new_tokens: int
    computes_in_fp8: bool
    reason_against_sharding: str | None
    """The setting that needs whole weights on every rank, or None."""
    reward_models_bytes: int = 0
    """Weights beside the model, which score a round's answers."""

    @property
    def may_record_graphs(self) -> bool:
        """Whether passes may become CUDA graphs, as far as settings decide it."""
        draws = self.lora.dropout or self.has_embedding_noise
        return self.records_graphs and self.method == "lora" and self.optimizer.is_flat and not draws

    @classmethod
    def of(cls, config: Config) -> Self:
        optimizer = config.optim.traits
        # checks of the configuration do not run a person's own file
        own = f"optim.path: {config.optim.path}, whose update reads whole weights" if optimizer.reads_whole else None
        return cls(
            seed=config.seed,
            method=config.method,
            batch=config.batch,
            lora=config.lora,
            base=config.base,
            full=config.full,
            sharding=config.sharding,
            optimizer=optimizer,
            precision=config.model.precision,
            compiles=config.compile != "off" and not config.deterministic,
            records_graphs=config.cuda_graphs == "auto",
            memory=config.memory,
            recompute=config.recompute,
            strategy=config.strategy,
            deepspeed=config.deepspeed,
            expert_ranks=config.experts.parallel,
            context_ranks=config.context.parallel,
            groups_experts=config.model.experts == "auto",
            trained_parts=frozenset(config.model.trained_parts),
            has_embedding_noise=config.model.neftune_alpha > 0,
            num_new_tokens=len(config.data.added_tokens),
            computes_in_fp8=config.computes_in_fp8,
            reason_against_sharding=config.reason_against_sharding or own,
        )
