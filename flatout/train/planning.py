"""What is decided before any model is loaded: the tokens and the plan of every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import Config
from flatout.data.build import open_or_build
from flatout.data.store import TokenStore
from flatout.data.tokenizer import check_vocabulary
from flatout.models.source import read_model_config
from flatout.parallel.rank import Rank
from flatout.plan.cost import CostModel, make_cost
from flatout.plan.shape import ModelShape
from flatout.plan.steps import RunPlan, make_eval_plan, make_plan, split_held_out
from flatout.plan.types import StepPlan
from flatout.track.record import Tracker

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
    fingerprints: Mapping[str, Any]


def tokenizer_name(config: Config) -> str:
    """The tokenizer that belongs to the run."""
    return config.data.tokenizer or config.model.name


def plan_run(config: Config, tracker: Tracker, rank: Rank) -> Planned:
    """Open (or build) the tokens and plan every step. Raises DataError, UsageError and SecurityError."""
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
    cost = cost_model(config, shape)
    train_ids = eval_ids = None
    if config.eval.fraction:
        train_ids, eval_ids = split_held_out(store.num_samples, config.eval.fraction, config.seed)
    plan = make_plan(
        store.lengths,
        store.num_labels,
        config.batch,
        seed=config.seed,
        num_ranks=rank.world,
        cost=cost,
        sample_ids=train_ids,
    )
    tracker.stage("plan", plan.describe())
    eval_store = _eval_store(config, store)
    eval_plan = None
    if eval_store is not None:
        eval_plan = make_eval_plan(
            eval_store.lengths,
            eval_store.num_labels,
            eval_ids,
            micro_batch_tokens=config.batch.micro_batch_tokens,
            num_ranks=rank.world,
            cost=cost,
        )
        _tell_eval(store.hashes if train_ids is None else store.hashes[train_ids], eval_store, eval_plan, tracker)
    fingerprints = {"data": _identity(store), "plan": plan.fingerprint}
    if eval_store is not None:
        fingerprints["eval_data"] = _identity(eval_store)
    return Planned(shape, store, plan, eval_store, eval_plan, fingerprints)


def cost_model(config: Config, shape: ModelShape) -> CostModel:
    """FLOPs of a sample in this run."""
    return make_cost(
        shape,
        method=config.method,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
        recompute=config.model.gradient_checkpointing,
    )


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
