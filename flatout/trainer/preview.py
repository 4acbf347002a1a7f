"""What a planned run will do, in figures and as lines of text: for `flatout plan` and for pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from flatout.config.schema import Config
from flatout.data.reference_column import lacks_reference
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank
from flatout.planner.devices import ANY_DEVICE, DEVICES, GIB
from flatout.planner.memory.budget import (
    CPU,
    SMALLER,
    budget_bytes,
    cpu_budget,
    longest_document_tokens,
    memory_model,
)
from flatout.planner.memory.estimate import ELEMENT_BYTES
from flatout.planner.settings import PlanSettings
from flatout.planner.steps.step_plan import StepPlan
from flatout.planner.steps.training_plan import PlannedSamples
from flatout.planner.totals import PlanTotals, add_up, totals_lines, with_forward_passes
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import EvalSet, PlannedRun, plan_run
from flatout.trainer.run_data import open_data
from flatout.trainer.steps_and_memory import fit_plan, gpu_of


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The totals of a plan, and the longest document that its GPU can train on (None: it has none)."""

    planned: PlannedRun
    totals: PlanTotals
    longest_document_tokens: int | None
    # what a run on this computer's CPU may use; None for another device, or if it is not known
    host_bytes: int | None = None
    # why the GPU of this machine, which no one named, is not enough
    why_not: str | None = None

    def __str__(self) -> str:
        return "\n".join(f"{name:<18} {text}" for name, text in self.rows(()))

    def rows(self, events: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
        """Yield the summary and what planning reported as pairs of name and text."""
        device, layout, memory = self.planned.device, self.planned.parallel_layout, self.planned.memory
        needed, budget = self.totals.memory, memory.budget_bytes
        if device and needed and budget:
            sizes = f"{needed.total_bytes / GIB:.1f} GiB of {budget / GIB:.1f}"
            yield "fits", f"{sizes}, {(budget - needed.total_bytes) / GIB:.1f} to spare on {device.name}"
        if self.why_not is not None:
            yield "does not fit", self.why_not
        if self.host_bytes is not None and needed:
            total, has = needed.total_bytes / GIB, self.host_bytes / GIB
            sizes = f"{total:.1f} GiB of {has:.1f} that this computer has free; it trains on its CPU"
            more = f"; {SMALLER}, or name a GPU to plan for" if total > has else f", {has - total:.1f} to spare"
            yield "does not fit" if total > has else "fits", sizes + more
        yield from totals_lines(self.totals)
        if not (self.totals.num_shared_tokens or self.totals.rounds):
            yield "prefixes", self.planned.sharing
        if layout.context_ranks > 1:
            yield "context", f"{layout.context_ranks} ranks share each micro-batch, and count as one rank above"
        if self.totals.num_ranks * layout.context_ranks > 1:
            yield "strategy", layout.reason
        if device:
            yield f"on {device.name}", memory.reason
            yield "longest document", f"{self.longest_document_tokens:,} tokens, alone in a micro-batch"
        for kind, facts in events:
            said = facts.get("why") if len(facts) == 1 else None
            yield kind, said or ", ".join(f"{name} {value}" for name, value in facts.items())


def fit_devices(config: Config, planned: PlannedRun, rank: Rank) -> dict[str, str]:
    """Say for every GPU of `DEVICES` how the planned steps fit on it, by the fitted constants of the memory model."""
    fits, settings = {}, PlanSettings.of(config)
    data = planned.data._replace(settings=settings)
    for device in DEVICES.values():
        try:
            plan, layout, decision, _ = fit_plan(data, planned.plan, rank, device)
        except ResourceError as error:
            fits[device.name] = f"cannot train: {error.text}"
            continue
        largest = plan.largest_pass
        estimate = None if largest is None else decision.estimate(largest[2].size)
        if estimate is None:
            fits[device.name] = "no step has labels"
            continue
        strategy = f"{layout.strategy}, " if rank.world > 1 else ""
        level = decision.model.describe(decision.recompute) if decision.model else decision.recompute
        fits[device.name] = (
            f"{strategy}{decision.micro_batch_tokens:,} tokens per micro-batch, recompute {level}: "
            f"{estimate.total_bytes / GIB:.1f} of {budget_bytes(settings, device) / GIB:.1f} GiB"
        )
    return fits


def plan_at_hand(config: Config, reporter: Reporter, rank: Rank) -> tuple[PlannedRun, str | None]:
    """Plan for the GPU of this machine, if it has one; without it, and with the reason, if the run does not fit."""
    has_gpu = config.wanted_device != "cpu" and torch.cuda.is_available()
    gpu = gpu_of(config, rank) if has_gpu else None
    data = open_data(config, reporter, rank, starts=False)
    try:
        return plan_run(config, data, reporter, rank, gpu), None
    except ResourceError as error:
        if gpu is None or config.full.update == "backward":  # no plan without a GPU is known to fit in one pass
            raise
        return plan_run(config, data, Reporter(), rank), "; or ".join([error.text, *map(str, error.fixes)])


def summarize_plan(
    config: Config, planned: PlannedRun, tokens_per_s: float | None = None, why_not: str | None = None
) -> PlanSummary:
    """Go through every step of a plan. `tokens_per_s`, over all ranks, adds a time estimate."""
    decision, layout, device = planned.memory, planned.parallel_layout, planned.device
    settings, rollouts = planned.data.settings, planned.data.rollouts
    on_cpu = device is None and (config.wanted_device == "cpu" or not torch.cuda.is_available())
    model = decision.model or memory_model(settings, planned.shape, CPU if on_cpu else ANY_DEVICE, layout)
    totals = add_up(
        planned.plan,
        num_held_out=len(rollouts.held_out_ids) if rollouts else planned.store.num_samples - planned.plan.num_samples,
        tokens_per_s=tokens_per_s,
        memory_of=lambda size: model.estimate(size, decision.recompute, accumulates=decision.accumulates),
    )
    if rollouts:
        width = sum(layer.key_width for layer in planned.shape.layers) * ELEMENT_BYTES[model.precision]
        num_answers = -(-rollouts.rounds.prompts // totals.num_ranks) * rollouts.rounds.group
        totals = replace(totals, answers_bytes=num_answers * int(planned.plan.samples.lengths.max()) * width)
    kl_plan = planned.kl_pairs and planned.kl_pairs.plan
    estimates = ((kl_plan, step) for step in kl_plan.steps()) if kl_plan else ()
    totals = with_forward_passes(totals, estimates, _reference_passes(planned))
    longest = None
    if device is not None:
        longest = longest_document_tokens(settings, planned.shape, device, totals.label_share, layout)
    host_bytes = cpu_budget(settings, is_alone=True) if on_cpu and totals.num_ranks == 1 else None
    return PlanSummary(planned, totals, longest, host_bytes, why_not)


def _reference_passes(planned: PlannedRun) -> Iterator[tuple[PlannedSamples, StepPlan]]:
    """Yield the passes of the reference, as `compute_reference` takes them: of one epoch, then of evaluations."""
    if not lacks_reference(planned.store, planned.objective.reference_columns):
        return
    num_steps = min(planned.plan.num_steps, planned.plan.steps_per_epoch)
    for data_set in planned.data_sets:
        steps = [data_set.step] if isinstance(data_set, EvalSet) else islice(data_set.plan.steps(), num_steps)
        yield from ((data_set.plan, step) for step in steps)
