"""What ranks share: the tokens of each micro-batch, or the experts; which runs can, and what changes in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flatout.config.schema import Config
from flatout.errors import Fix, PackingError, UsageError
from flatout.models.arch_quirks import whole_document_problem
from flatout.models.attention import register_over_ranks
from flatout.models.collectives import RankGroup
from flatout.models.context.check import check_shard
from flatout.models.context.shard import ContextShard
from flatout.models.experts.block import experts_modules
from flatout.models.experts.parallel import slice_experts
from flatout.models.load.model import LoadedModel
from flatout.objectives.protocol import Objective
from flatout.parallel.rank import Rank
from flatout.parallel.shards import mark_slice
from flatout.parallel.strategies.protocol import Strategy
from flatout.planner.parallel_layout import ParallelLayout
from flatout.track.callback import Reporter
from flatout.trainer.model_shape import read_text_config


def check_context(config: Config, rank: Rank, objective: Objective) -> None:
    """Raise UsageError unless the run's ranks can share micro-batches as `context.parallel` says."""
    num_ranks = config.context.parallel
    if num_ranks == 1:
        return
    if rank.world % num_ranks:
        why: str | None = (
            f"it must divide the number of ranks, which is {rank.world} (gpus, or --ranks of flatout plan)"
        )
    elif objective.scope != "token":
        why = f"objective {objective.name} reads all tokens of a {objective.scope}, of which a rank has a shard"
    else:
        why = whole_document_problem(read_text_config(config.model.name, config.model.revision))
    if why is not None:
        raise UsageError(f"context.parallel: {num_ranks}: {why}", [Fix({"context.parallel": 1})])


def context_shard(layout: ParallelLayout, rank: Rank) -> ContextShard | None:
    """Return which shard of each micro-batch a rank takes; None if it takes them whole."""
    num_ranks = layout.context_ranks
    return ContextShard(num_ranks, rank.index % num_ranks) if num_ranks > 1 else None


def setup_context_parallel(
    loaded: LoadedModel, strategy: Strategy, shard: ContextShard | None, config: Config, reporter: Reporter
) -> None:
    """Let the model attend to the keys of all ranks that share a micro-batch, and check on small ones that it does.

    Collective. Raises PackingError on every rank if a shard's hidden states differ from those of whole documents.
    """
    if shard is None:
        return
    assert strategy.context_mesh is not None
    assert loaded.attention != "transformers", "only rows have it"
    group = RankGroup(strategy.context_mesh.get_group("context").group_name, shard.num_shards, shard.rank)
    loaded.model.set_attn_implementation(register_over_ranks(loaded.attention, group))
    with loaded.present():
        # of all ranks, as each must raise if one does
        errors = torch.zeros(strategy.rank.world, dtype=torch.float64, device=loaded.model.device)
        errors[strategy.rank.index], limit = check_shard(loaded, shard, fp8=config.computes_in_fp8)
    if not (worst := strategy.sum_values(errors).max().item()) <= limit:
        raise PackingError(
            f"model type {loaded.model.config.model_type}: hidden states of a rank's shard of the tokens differ from "
            f"those of whole documents by {worst:.1e} (limit {limit:.1e})",
            [Fix({"context.parallel": 1})],
        )
    reporter.stage("context", f"{shard.num_shards} ranks share each micro-batch; equal to whole within {worst:.1e}")


def shard_experts(loaded: LoadedModel, strategy: Strategy, reporter: Reporter) -> Callable[[], None]:
    """Keep this rank's experts alone if several ranks share them; return what marks the slices, also called here.

    It must be called again after parameters were replaced. Raises UsageError as `slice_experts` does.
    """
    if (mesh := strategy.expert_mesh) is None:
        return lambda: None
    group = RankGroup(mesh.get_group("expert").group_name, mesh.size(1), mesh.get_local_rank("expert"))
    slices = slice_experts(loaded.model, group)
    if loaded.deferred_weights is not None:
        loaded.deferred_weights.narrow(slices, group.size, group.rank)
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
