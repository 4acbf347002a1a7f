"""What is decided before any model is loaded: the tokens, the plan of every step, and how it fits in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import Config, Recompute
from flatout.data.build import open_or_build
from flatout.data.store import TokenStore
from flatout.data.tokenizer import check_vocabulary
from flatout.models.source import read_model_config
from flatout.parallel.rank import Rank
from flatout.plan.budget import MemoryDecision, TokenStatistics, choose, choose_spread, use_spare
from flatout.plan.cost import CostModel, make_cost
from flatout.plan.devices import Device
from flatout.plan.shape import ModelShape
from flatout.plan.spread import Spread
from flatout.plan.steps import RunPlan, make_eval_plan, make_plan, split_held_out
from flatout.plan.types import StepPlan
from flatout.track.record import Tracker
from flatout.train.optim_backward import check_backward_update

# what a build may do to rows; a run trained on such a set says so
LOST_OR_CUT = ("bad", "too_long", "no_labels", "lost_labels", "truncated", "split")


@dataclass(frozen=True, slots=True)
class Planned:
    """Tokens and steps of a run. `fingerprints` tells the data and the plan from any other."""

    shape: ModelShape
    store: TokenStore
    plan: RunPlan
    eval_store: TokenStore | None
    eval_plan: StepPlan | None
    spread: Spread
    memory: MemoryDecision
    fingerprints: Mapping[str, Any]


def tokenizer_name(config: Config) -> str:
    """The tokenizer that belongs to the run."""
    return config.data.tokenizer or config.model.name


def plan_run(
    config: Config, tracker: Tracker, rank: Rank, device_of: Callable[[], Device | None] = lambda: None
) -> Planned:
    """Open (or build) the tokens, choose what fits in the device's memory, and plan every step.

    `device_of` tells the GPU once tokens are there (`flatout.train.memory.gpu_of` asks the machine); None: the CPU.
    Raises DataError, UsageError, SecurityError, and ResourceError when the longest sample does not fit.
    """
    shape = ModelShape.from_config(
        read_model_config(config.model.name, config.model.revision), origin=f"{config.model.name}/config.json"
    )
    store = open_or_build(config.data, tokenizer_name(config), say=lambda text: tracker.stage("tokens", text))
    num_tokens, num_labels = int(store.lengths.sum()), int(store.num_labels.sum())
    tracker.stage(
        "tokens", f"{store.num_samples:,} samples, {num_tokens:,} tokens, {num_labels / num_tokens:.0%} label"
    )
    if lost := {name: count for name in LOST_OR_CUT if (count := store.meta.counts.get(name, 0))}:
        tracker.event("rows", {**lost, "of": store.meta.counts["rows"], "listed_in": str(store.folder / "report.json")})
    check_vocabulary(store.meta.max_token_id, shape.vocab_size)
    train_ids = eval_ids = None
    if config.eval.fraction:
        train_ids, eval_ids = split_held_out(store.num_samples, config.eval.fraction, config.seed)
    plan, spread, memory = _fitting_plan(config, shape, store, train_ids, rank, device_of())
    tracker.stage("strategy", spread.reason)
    tracker.stage("memory", memory.reason)
    if config.full.update == "backward":
        check_backward_update(config, plan, rank)
    tracker.stage("plan", plan.describe())
    eval_store = _eval_store(config, store)
    eval_plan = None
    if eval_store is not None:
        eval_plan = make_eval_plan(
            eval_store.lengths,
            eval_store.num_labels,
            eval_ids,
            micro_batch_tokens=_eval_tokens(config, memory, eval_store.lengths[eval_ids]),
            num_ranks=rank.world,
            cost=plan.layout.cost,
            lockstep=spread.lockstep,
        )
        _tell_eval(store.hashes if train_ids is None else store.hashes[train_ids], eval_store, eval_plan, tracker)
    fingerprints = {"data": _identity(store), "plan": plan.fingerprint}
    if eval_store is not None:
        fingerprints["eval_data"] = _identity(eval_store)
    return Planned(shape, store, plan, eval_store, eval_plan, spread, memory, fingerprints)


def _fitting_plan(
    config: Config,
    shape: ModelShape,
    store: TokenStore,
    train_ids: NDArray[np.int64] | None,
    rank: Rank,
    device: Device | None,
) -> tuple[RunPlan, Spread, MemoryDecision]:
    """The plan under the token budget that the memory allows; which samples a step holds does not depend on it."""
    whole_steps = make_plan(
        store.lengths,
        store.num_labels,
        config.batch,
        micro_batch_tokens=int(store.lengths.max()) * config.batch.samples_per_step,
        seed=config.seed,
        num_ranks=rank.world,
        cost=cost_model(config, shape, "none"),
        sample_ids=train_ids,
    )
    tokens = TokenStatistics.of(whole_steps)
    spread = choose_spread(config, shape, tokens, device, num_ranks=rank.world, num_nodes=rank.num_nodes)
    memory = choose(config, shape, tokens, device, spread)
    cost = cost_model(config, shape, memory.recompute)
    plan = whole_steps.laid_out(memory.micro_batch_tokens, cost, lockstep=spread.lockstep)
    memory = use_spare(memory, config, tokens, device, plan)
    spread = memory.model.spread if memory.model else spread
    return plan.laid_out(memory.micro_batch_tokens, cost, lockstep=spread.lockstep), spread, memory


def cost_model(config: Config, shape: ModelShape, recompute: Recompute) -> CostModel:
    """What a sample costs in this run."""
    return make_cost(
        shape,
        method=config.method,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
        recompute=recompute in ("layers", "offload"),
    )


def _eval_tokens(config: Config, memory: MemoryDecision, lengths: NDArray[Any]) -> int:
    """Training's micro-batches, longer where a sample needs it: evaluation keeps no activations."""
    if config.batch.micro_batch_tokens is not None:
        return config.batch.micro_batch_tokens
    return max(memory.micro_batch_tokens, int(lengths.max()))


def _eval_store(config: Config, store: TokenStore) -> TokenStore | None:
    if config.eval.data is None:
        return store if config.eval.fraction else None
    eval_config = config.data.model_copy(update={"name": config.eval.data, "sources": []})
    return open_or_build(eval_config, tokenizer_name(config))


def _tell_eval(train_hashes: NDArray[np.uint64], eval_store: TokenStore, eval_plan: StepPlan, tracker: Tracker) -> None:
    tracker.stage("eval", f"{len(eval_plan.sample_ids):,} samples, {eval_plan.num_label_tokens:,} label tokens")
    num_seen = int(np.isin(eval_store.hashes[list(eval_plan.sample_ids)], train_hashes).sum())
    if num_seen:
        tracker.event("overlap", {"eval_samples_also_trained_on": num_seen, "do": "remove the duplicate rows"})


def _identity(store: TokenStore) -> dict[str, Any]:
    return {"name": store.meta.name, "num_samples": store.num_samples, "fingerprint": store.meta.fingerprint}
