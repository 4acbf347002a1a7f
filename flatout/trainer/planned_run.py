"""Decisions made before a model is loaded: the plan of every step, its evaluations, and its memory."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_hexdigest

from flatout.checkpoint.resume_check import config_changes
from flatout.config.objective import REFERENCE, ObjectiveConfig
from flatout.config.own_code import OwnCode
from flatout.config.schema import Config
from flatout.data.kl_pairs import KLStore, make_kl_store
from flatout.data.reference_column import lacks_reference
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, Fix, UsageError, counted
from flatout.io.kept_facts import hashes_of
from flatout.models.lora.adapter_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from flatout.models.scoring import Scoring
from flatout.objectives.protocol import Objective
from flatout.optim.lr_schedule import warmup_note
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.rank import Rank
from flatout.planner.devices import Device
from flatout.planner.memory.budget import MemoryDecision
from flatout.planner.parallel_layout import ParallelLayout
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import ModelShape
from flatout.planner.steps.packing import row_length
from flatout.planner.steps.step_plan import StepPlan, assemble_eval
from flatout.planner.steps.training_plan import PlannedSamples, TrainingPlan, select_samples
from flatout.planner.steps.units import Samples, unit_numbers
from flatout.track.callback import Reporter
from flatout.trainer.eval_prompts import EvalPrompts, read_eval_prompts
from flatout.trainer.normalizers import Normalizers, make_normalizers
from flatout.trainer.run_data import RunData, open_data
from flatout.trainer.steps_and_memory import EXACT, InexactReasons, plan_training

# what ranks compare, in words
FACTS_BY_NAME = {
    "optim": "optimizer's file",
    "data": "samples",
    "eval_data": "evaluation samples",
    "plan": "steps",
    "model": "base model's files",
}
# paths and process counts may differ between nodes; content is compared by fingerprint
NODE_LOCAL = frozenset({"run_dir", "gpus", "data.root", "data.sources", "data.tokenizer", "data.num_procs"})

# runs of fewer steps are told
FEW_STEPS = 10


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation data set."""

    name: str
    store: TokenStore
    plan: PlannedSamples
    step: StepPlan
    """One pass over the samples of `plan`, in the order of their ids."""
    normalizers: Normalizers
    kl_pairs: EvalSet | None = None
    """The KL pairs of its prompts, if the objective estimates anything."""

    @property
    def max_documents(self) -> int:
        """The most samples of a micro-batch."""
        return max(len(batch.sample_ids) for batch in self.step.micro_batches)


class KLPairs(NamedTuple):
    """The steps of a run over KL pairs: its prompts with the answers to other ones."""

    store: KLStore
    plan: TrainingPlan


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Tokens and steps of a run."""

    data: RunData
    plan: TrainingPlan
    eval_sets: tuple[EvalSet, ...]
    prompts: EvalPrompts | None
    parallel_layout: ParallelLayout
    memory: MemoryDecision
    fingerprints: Mapping[str, Any]
    """What identifies the data, the plan and the objective."""
    normalizers: Normalizers
    device: Device | None = None
    """The GPU that the run is planned for; None: the CPU."""
    sharing: str = ""
    """Whether samples share prefixes, and why."""
    inexact_reasons: InexactReasons = EXACT
    """Why the model must not pack samples or share prefixes."""
    kl_pairs: KLPairs | None = None
    """The same steps over KL pairs, if the objective estimates something of them."""

    @property
    def objective(self) -> Objective:
        return self.data.objective

    @property
    def shape(self) -> ModelShape:
        return self.data.shape

    @property
    def store(self) -> TokenStore:
        """The data set to train on."""
        return self.data.split.store

    @property
    def stores(self) -> list[TokenStore]:
        """The data sets to train and to evaluate on."""
        return [self.store, *(eval_set.store for eval_set in self.eval_sets)]

    @property
    def scoring(self) -> Scoring | None:
        return self.data.scoring

    @property
    def data_sets(self) -> list[PlannedDataSet]:
        """What has a store and a plan: the run, its KL pairs, then evaluation sets with theirs."""
        data_sets: list[PlannedRun | EvalSet] = [self, *self.eval_sets]
        return [planned for data_set in data_sets for planned in (data_set, data_set.kl_pairs) if planned is not None]

    @property
    def pass_settings(self) -> list[Any]:
        """What decides how steps are cut into passes, and what passes do: equal on all ranks."""
        layout, memory = self.parallel_layout, self.memory
        return [
            self.plan.batch_layout.name,
            self.plan.shares_prefixes,
            layout.strategy,
            memory.micro_batch_tokens,
            memory.recompute,
            layout.reshard_after_forward,
        ]


PlannedDataSet = PlannedRun | KLPairs | EvalSet


def plan_run(
    config: Config,
    data: RunData,
    reporter: Reporter,
    rank: Rank,
    device: Device | None = None,
    inexact_reasons: InexactReasons = EXACT,
) -> PlannedRun:
    """Choose a micro-batch that fits in device memory, and plan every step.

    `device` is the GPU (as `gpu_of` returns it), None the CPU. `inexact_reasons` are of a model that its config would
    allow to pack and to share prefixes. Raises DataError, UsageError, and ResourceError when the longest sample does
    not fit.
    """
    settings, objective, store = data.settings, data.objective, data.split.store
    steps = plan_training(data, rank, device, reporter, inexact_reasons)
    plan, memory = steps.plan, steps.memory
    if data.rollouts is not None and steps.parallel_layout.lockstep_in_inference:
        text = f"rollout.rounds needs whole weights on every rank, which {steps.parallel_layout.strategy} shards here"
        raise UsageError(text, [Fix({"strategy": "ddp"})])
    if settings.full.update == "backward":
        check_backward_update(settings, plan, rank)
    if note := warmup_note(config.schedule, plan.num_steps):
        reporter.stage("schedule", note)
    if plan.num_steps < FEW_STEPS and config.batch.max_steps is None and data.rollouts is None:
        num_steps = counted(plan.num_steps, "optimizer step")
        why = f"a run of {num_steps} learns little; raise batch.epochs, or lower batch.samples_per_step"
        reporter.event("few_steps", {"why": why})
    reporter.stage("strategy", steps.parallel_layout.reason)
    reporter.stage("memory", memory.reason)
    reporter.stage("plan", plan.describe(steps.parallel_layout.context_ranks))
    report_objective(settings.method, store, plan, reporter, normalizers := make_normalizers(objective, store))
    eval_sets = plan_evaluation(data, config.eval.best, plan, memory.micro_batch_tokens, reporter)
    kl_pairs, eval_sets = plan_kl_pairs(objective, store, plan, eval_sets)
    # a model that scores answers nothing
    evaluated = [] if data.scoring else [(eval_set.store, eval_set.step.sample_ids) for eval_set in eval_sets]
    longest_pass = memory.longest_pass_tokens
    prompts = read_eval_prompts(config, store, evaluated, data.shape.max_positions, longest_pass, reporter)
    fingerprints = fingerprints_of(config, objective, store, plan, eval_sets)
    return PlannedRun(
        data=data, plan=plan, eval_sets=eval_sets, prompts=prompts, parallel_layout=steps.parallel_layout,
        memory=memory, fingerprints=fingerprints, normalizers=normalizers, device=device, sharing=steps.sharing,
        inexact_reasons=inexact_reasons, kl_pairs=kl_pairs,
    )  # fmt: skip


def open_and_plan(config: Config, reporter: Reporter, rank: Rank, device: Device | None = None) -> PlannedRun:
    """Open the data and plan a run that does not start here. Raises what `open_data` and `plan_run` raise."""
    return plan_run(config, open_data(config, reporter, rank, starts=False), reporter, rank, device)


def check_backward_update(settings: PlanSettings, plan: TrainingPlan, rank: Rank) -> None:
    """Raise UsageError unless weights can be updated in the backward pass: one process, one micro-batch per step.

    Checks every step of the plan, unless the longest samples together fit in one micro-batch.
    """
    if rank.world > 1:
        raise UsageError(
            f"full.update: backward updates before ranks can sum gradients; got {rank.world} ranks, use one",
            [Fix({"full.update": "step"})],
        )
    if settings.precision == "fp16":
        raise UsageError("full.update: backward cannot unscale gradients of fp16", [Fix({"model.precision": "bf16"})])
    count = min(plan.batch.samples_per_step, plan.num_units)
    largest = np.partition(plan.unit_tokens, -count)[-count:]
    longest = row_length(int(plan.samples.lengths.max()))
    most = plan.most_samples_per_step * longest if plan.batch_layout.is_padded else largest.sum()
    if int(most) <= plan.batch_layout.micro_batch_tokens:
        return
    for step in plan.steps():
        if (num_batches := len(step.by_rank[0])) > 1:
            raise UsageError(
                f"full.update: backward needs one micro-batch per step; step {step.index + 1} has {num_batches} of "
                f"{step.num_padded_tokens:,} tokens in total",
                [Fix({"batch.micro_batch_tokens": step.num_padded_tokens}), Fix({"full.update": "step"})],
            )


def report_objective(
    method: str, store: TokenStore, plan: TrainingPlan, reporter: Reporter, normalizers: Normalizers
) -> None:
    """Tell what is notable of an objective's data, and what its reference and its estimates cost."""
    objective, part = normalizers.objective, "third" if method == "full" else "half"
    for note in objective.notes({name: float(values.sum()) for name, values in normalizers.values.items()}):
        reporter.event("objective", {"notes": note})
    if lacks_reference(store, objective.reference_columns):
        num_steps = min(plan.num_steps, plan.steps_per_epoch)
        cost = f"forward passes over {num_steps:,} steps before step 0, about a {part} of the time of these"
        cached = "; skipped once they are cached" if REFERENCE in objective.columns else ""
        reporter.event("reference", {"costs": f"{cost}{cached}"})
    if objective.estimates:
        cost = "each step begins with forward passes over its prompts with the answers to other prompts"
        reporter.event("estimates", {"costs": f"{cost}, about a {part} of the time of the rest"})


def plan_evaluation(
    data: RunData, best: str, plan: TrainingPlan, planned_tokens: int, reporter: Reporter
) -> tuple[EvalSet, ...]:
    """Return the evaluation data sets; empty without one. Logs an event for rows that are also trained on.

    Raises DataError if they have no value of the metric `best`.
    """
    objective, stores, (store, train_ids, eval_ids) = data.objective, data.eval_stores, data.split
    eval_sets = []
    train_hashes = store.hashes if train_ids is None else store.hashes[train_ids]
    for name, eval_store in stores.items():
        # evaluation keeps no activations, so a micro-batch may be as long as its largest unit
        lengths = eval_store.lengths if eval_ids is None else eval_store.lengths[eval_ids]
        unit_offsets = eval_store.unit_offsets
        units = unit_numbers(unit_offsets, eval_ids)
        parts_units = plan.samples.parts_units
        sizes = Samples(lengths, lengths, units=units, parts_units=parts_units).part_tokens(
            is_padded=plan.batch_layout.is_padded, with_padding=False
        )
        budget = data.settings.batch.micro_batch_tokens or max(planned_tokens, int(sizes.max()))
        layout = replace(plan.batch_layout, micro_batch_tokens=budget, prefixes=None)
        samples = select_samples(
            eval_store.lengths, eval_store.num_label_tokens, eval_ids, layout, unit_offsets, parts_units=parts_units
        )
        normalizers = make_normalizers(objective, eval_store)
        eval_sets.append(make_eval_set(name, eval_store, PlannedSamples(samples, layout), normalizers))
        step = eval_sets[-1].step
        of_data = f"{name}: " if len(stores) > 1 else ""
        reporter.stage("eval", f"{of_data}{len(step.sample_ids):,} samples, {step.num_label_tokens:,} label tokens")
        if num_seen := int(np.isin(eval_store.hashes[list(step.sample_ids)], train_hashes).sum()):
            where = {"data": name} if len(stores) > 1 else {}
            reporter.event("overlap", {**where, "eval_samples_also_trained_on": num_seen})
    counts_by_set = [eval_set.normalizers.step_normalizers(eval_set.step) for eval_set in eval_sets]
    counts = [sum(set_counts) for set_counts in zip(*counts_by_set, strict=True)]
    if eval_sets and best not in (known := objective.means([0.0] * len(objective.value_names), counts)):
        raise DataError(
            f"eval.best: {best} has no value on the evaluation data, which lacks the answers that it is a "
            f"mean over; take other rows, or one of {', '.join(known)}"
        )
    return tuple(eval_sets)


def make_eval_set(name: str, store: TokenStore, plan: PlannedSamples, normalizers: Normalizers) -> EvalSet:
    """Return an evaluation data set with one pass over these samples, in the order of their ids."""
    return EvalSet(name, store, plan, assemble_eval(plan.samples, plan.batch_layout), normalizers)


def plan_kl_pairs(
    objective: Objective, store: TokenStore, plan: TrainingPlan, eval_sets: Sequence[EvalSet]
) -> tuple[KLPairs | None, tuple[EvalSet, ...]]:
    """Plan the same steps and evaluations over KL pairs, if the objective estimates anything.

    Returns None without, and the evaluation sets with theirs.
    """
    if not objective.estimates:
        return None, tuple(eval_sets)
    stores = [store, *(eval_set.store for eval_set in eval_sets)]
    kl_stores = {id(store): make_kl_store(store) for store in stores}
    with_kl_pairs = []
    for eval_set in eval_sets:
        kl_store, ids = kl_stores[id(eval_set.store)], np.sort(eval_set.step.sample_ids)
        layout = plan.batch_layout.for_others(int(kl_store.lengths.max()))
        kl_plan = PlannedSamples(select_samples(kl_store.lengths, kl_store.num_label_tokens, ids, layout), layout)
        own_pairs = make_eval_set(eval_set.name, kl_store, kl_plan, eval_set.normalizers)
        with_kl_pairs.append(replace(eval_set, kl_pairs=own_pairs))
    kl_store = kl_stores[id(store)]
    return KLPairs(kl_store, plan.of_lengths(kl_store.lengths, kl_store.num_label_tokens)), tuple(with_kl_pairs)


def fingerprints_of(
    config: Config, objective: Objective, store: TokenStore, plan: TrainingPlan, eval_sets: Sequence[EvalSet]
) -> dict[str, Any]:
    """Return what identifies the data, the steps and the objective: a checkpoint resumes only with equal ones."""
    columns = objective.needed_columns
    fingerprints: dict[str, Any] = {"data": _identity(store, columns), "plan": plan.fingerprint}
    if eval_sets:
        identities = [_identity(eval_set.store, columns) for eval_set in eval_sets]
        fingerprints["eval_data"] = identities if len(identities) > 1 else identities[0]
    if config.objective != ObjectiveConfig():
        fingerprints["objective"] = objective.identity | reference_identity(config, objective)
    if config.optim.path is not None:
        fingerprints["optim"] = OwnCode.read(config.optim.path, "optim.path", "optimizer").digest
    return fingerprints


def _identity(store: TokenStore, columns: Sequence[str]) -> dict[str, Any]:
    """Return what a checkpoint remembers of a data set; of its own columns, pictures and those the objective reads."""
    columns = [*columns, "picture_hashes"] if store.num_pictures else columns
    identity = {"name": store.meta.name, "num_samples": store.num_samples, "fingerprint": store.meta.fingerprint}
    return identity | ({"columns": {name: store.columns[name].fingerprint for name in columns}} if columns else {})


def reference_identity(config: Config, objective: Objective) -> dict[str, Any]:
    """Return what identifies the adapter that is the reference; empty without one. May raise ResourceError."""
    adapter = config.objective.reference.adapter or config.lora.continue_from
    if adapter is None or not objective.reference_columns:
        return {}
    return {"reference": hashes_of({name: adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)})}


def require_same_run(config: Config, planned: PlannedRun, group: ControlGroup) -> None:
    """Raise on every rank if one has other settings (UsageError) or other data (DataError) than rank 0.

    Collective. For example, a node was started with another config file, or built its data from other rows.
    """
    prompts = planned.prompts
    mine = {
        "host": socket.gethostname(),
        "config": config.model_dump(mode="json"),
        "data": {**planned.fingerprints, "prompts": prompts and xxh3_64_hexdigest(repr(prompts.prompts).encode())},
        "passes": planned.pass_settings,
    }
    first, *others = group.all_gather(mine)
    for index, other in enumerate(others, start=1):
        who = f"rank {index} on {other['host']}"
        changes = config_changes(first["config"], other["config"])
        if changes := [change for change in changes if change.key not in NODE_LOCAL]:
            said = "; ".join(f"{change.key} is {change.now!r}, but {change.saved!r} on rank 0" for change in changes)
            raise UsageError(f"{who} has different settings: {said}; start every node with the same settings")
        if other["data"] != first["data"]:
            names = {**first["data"], **other["data"]}
            differing = [name for name in names if first["data"].get(name) != other["data"].get(name)]
            what = ", ".join(FACTS_BY_NAME.get(name, name) for name in differing)
            raise DataError(
                f"{who} has different data from rank 0 on {first['host']}: its {what} differ; build the data once, in "
                "a folder that all nodes share, or copy the built data set"
            )
        if other["passes"] != first["passes"]:
            raise UsageError(
                f"{who} splits the same steps differently: {other['passes']}, but rank 0 on {first['host']} "
                f"{first['passes']}; install the same version of flatout on every node"
            )
