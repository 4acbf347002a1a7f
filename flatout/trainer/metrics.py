"""Turn step outcomes into records of rates; report stragglers, and planned compared with measured memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flatout.checkpoint.manifest import versions
from flatout.config.read import flatten
from flatout.config.schema import Config
from flatout.errors import DataError
from flatout.io.redact import redacted
from flatout.models.packed import segment_lengths
from flatout.planner.devices import GIB, Peak, nominal_peak
from flatout.planner.memory.sizes import TOLERANCE, MicroBatchSize
from flatout.planner.steps.step_plan import MicroBatch, StepPlan, padding_share, shared_flops
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.track.record import MAX_EXPERT_MAPS, GpuFacts, PlanFacts, RunStart, StepRecord
from flatout.track.run_log import read_start
from flatout.trainer.passes import micro_batches_of
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.rank_meter import RankFigures, StepClock, busy_seconds, combined_figures
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import StepOutcome

_ARITHMETIC = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# peak memory is measured after the second step, as the first one allocates the optimizer's state only after its peak
MEASURED_STEP = 2
# a straggler takes so many times as long as the other ranks, for so many steps in a row
STRAGGLER_SLOWDOWN, STRAGGLER_STEPS = 1.5, 20


class Meter:
    """Records the rates of the steps since the last record, over all rounds of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._peak = device_peak(run)
        if self._peak is not None:
            run.reporter.stage("mfu", f"MFU against {self._peak.describe()}; without recomputation")
        self._clock = StepClock(run.device)
        self._stragglers, self._memory = Stragglers(run.reporter.event), PeakMemoryReporter()
        self._steps: list[StepPlan] = []
        self._rank_figures: list[tuple[RankFigures, ...]] = []
        self._elapsed_s = self._num_flops = 0.0
        self._num_rounds, self._between_rounds_s, self._ended_at = 0, 0.0, time.perf_counter()

    def start_round(self, run: TrainingRun) -> None:
        """Take the steps of a round from now on; it was sampled since the last step."""
        self._run = run
        self._num_rounds += 1
        self._between_rounds_s += time.perf_counter() - self._ended_at

    def start_step(self) -> None:
        """Start the clock; evaluation and saving happen between steps and do not count."""
        self._clock.start()

    def end_step(self, step: StepPlan, outcome: StepOutcome) -> None:
        """Count a step, which began when the last one ended; send a record to the reporter when one is due."""
        run, completed = self._run, step.index + 1
        step_s = self._clock.end_step(outcome.ended)
        self._steps.append(step)
        self._rank_figures.append(outcome.rank_figures)
        self._elapsed_s += step_s
        self._num_flops += useful_flops(run, step)
        run.progress.elapsed_s += step_s
        self._stragglers.check(completed, [busy_seconds(rank) for rank in outcome.rank_figures])
        if is_due(completed, run.config.log_every_steps, run.plan.num_steps) or completed == run.plan.num_steps:
            run.reporter.record(self._record(step, outcome))
            self._steps, self._rank_figures, self._elapsed_s, self._num_flops = [], [], 0.0, 0.0
        self._memory.end_step(run, step)
        self._ended_at = time.perf_counter()

    def _record(self, step: StepPlan, outcome: StepOutcome) -> StepRecord:
        run, elapsed_s, num_recorded = self._run, self._elapsed_s, len(self._steps)
        flops_per_s = self._num_flops / elapsed_s
        # a step without label tokens is skipped
        num_tokens = sum(recorded.num_tokens for recorded in self._steps if recorded.num_label_tokens)
        busy_s = tuple(map(busy_seconds, outcome.rank_figures)) if len(outcome.rank_figures) > 1 else ()
        num_left = run.plan.num_steps - step.index - 1
        between_s = self._between_rounds_s / max(1, self._num_rounds) * (num_left // len(run.plan.numbers))
        return StepRecord(
            step=step.index + 1,
            num_steps=run.plan.num_steps,
            epoch=run.plan.epoch_after(step),
            loss=outcome.loss,
            token_accuracy=outcome.metrics.get("token_accuracy"),
            metrics=finite_metrics(run, outcome.metrics),
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            num_samples=len(step.sample_ids),
            num_tokens=step.num_tokens,
            num_label_tokens=step.num_label_tokens,
            num_micro_batches=sum(len(rank) for rank in step.by_rank),
            tokens_per_s=num_tokens / elapsed_s,
            label_tokens_per_s=sum(recorded.num_label_tokens for recorded in self._steps) / elapsed_s,
            step_s=elapsed_s / num_recorded,
            flops_per_s=flops_per_s,
            mfu=None if self._peak is None else flops_per_s / (self._peak.flops_per_s * run.rank.world),
            padding_avoided=run.plan.padding_avoided([step]),
            padding_share=padding_share([step]),
            shared_share=step.num_shared_tokens / max(1, step.num_tokens),
            balance=step.balance,
            elapsed_s=run.progress.elapsed_s,
            busy_min_s=min(busy_s, default=None),
            busy_max_s=max(busy_s, default=None),
            rank_busy_s=busy_s,
            num_recorded=num_recorded,
            num_ranks=run.rank.world,
            tokens_per_s_per_rank=num_tokens / elapsed_s / run.rank.world,
            eta_s=run.progress.elapsed_s / (step.index + 1) * num_left + between_s,
            **combined_figures(self._rank_figures, elapsed_s),
            **_reported(run, step.index + 1, outcome.aux_loss_sums),
        )


def finite_metrics(run: TrainingRun, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return an objective's metrics that are finite numbers, and say once which are not; token_accuracy has a field."""
    bad = {name for name, value in metrics.items() if not math.isfinite(value)}
    if bad and (new := sorted(bad - run.state.not_finite)):
        run.state.not_finite.update(new)
        why = f"{', '.join(new)} of objective {run.planned.objective.name} is not a finite number"
        run.reporter.event("metric", {"why": f"{why}; such values are left out of the records"})
    return {name: value for name, value in metrics.items() if name not in {*bad, "token_accuracy"}}


def _reported(run: TrainingRun, completed: int, values: tuple[float, ...]) -> dict[str, Any]:
    """Return what the auxiliary loss reports after so many steps; some records have figures that take much room."""
    if not values:
        return {}
    num_steps = run.plan.num_steps
    record_steps = interval_steps(run.config.log_every_steps, num_steps)
    map_steps = record_steps * math.ceil(num_steps / record_steps / MAX_EXPERT_MAPS)
    with_maps = completed % map_steps == 0 or completed == num_steps
    return dict(run.aux_loss.report(torch.tensor(values, dtype=torch.float64), with_maps=with_maps))


class Stragglers:
    """Compares the ranks' seconds in each step; reports a slow rank once, and again only after it has caught up."""

    def __init__(self, on_event: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._on_event = on_event
        self._num_slow: dict[int, int] = {}

    def check(self, completed: int, busy_s: Sequence[float]) -> None:
        """Check one step: `busy_s` has all ranks' seconds when `completed` steps are done; empty for one rank."""
        for rank, own_s in enumerate(busy_s if len(busy_s) > 1 else ()):
            others_s = statistics.median(seconds for other, seconds in enumerate(busy_s) if other != rank)
            is_slow = 0 < others_s * STRAGGLER_SLOWDOWN < own_s
            self._num_slow[rank] = self._num_slow.get(rank, 0) + 1 if is_slow else 0
            if self._num_slow[rank] == STRAGGLER_STEPS:
                facts = {"rank": rank, "step": completed, "busy_s": round(own_s, 4), "others_s": round(others_s, 4)}
                self._on_event("straggler", facts)


class PeakMemoryReporter:
    """Logs planned and measured peaks once, after this process's second step, unless memory ran out (a cap is set)."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._largest = MicroBatchSize(0, 0, 0)

    def end_step(self, run: TrainingRun, step: StepPlan) -> None:
        """Keep the largest micro-batch so far; after the second step, log the peaks."""
        self._num_steps += 1
        if self._num_steps > MEASURED_STEP or run.device.type != "cuda":
            return
        for batch in micro_batches_of(run, run.plan, step):
            if batch.num_padded_tokens > self._largest.num_tokens:
                self._largest = batch.size
        if self._num_steps < MEASURED_STEP or run.state.micro_batch_cap is not None:
            return
        # recorded graphs ran at their largest size before the first step
        size, recorded_tokens = self._largest, run.loss_module.decoder.largest_tokens if run.loss_module.decoder else 0
        if recorded_tokens > size.num_tokens:
            recorded_share = recorded_tokens / max(1, size.num_tokens)  # this rank may have had no micro-batch yet
            size = MicroBatchSize(
                recorded_tokens, int(size.num_label_tokens * recorded_share), int(size.num_documents * recorded_share)
            )
        planned = run.memory.estimate(size)
        if planned is None:
            return
        measured_bytes = torch.cuda.max_memory_allocated(run.device)
        line = (
            f"planned {planned.total_bytes / GIB:.1f} GiB, measured {measured_bytes / GIB:.1f} GiB "
            f"with {size.num_tokens:,} tokens in a micro-batch"
        )
        if abs(off := measured_bytes / planned.total_bytes - 1) > TOLERANCE:
            line += f": {abs(off):.0%} {'more' if off > 0 else 'less'} than planned"
        run.reporter.stage("memory", line)


def is_due(num_completed: int, interval: float | None, num_steps: int) -> bool:
    """Whether to log, evaluate or save after so many steps, by `interval_steps`; None: never."""
    return interval is not None and num_completed % interval_steps(interval, num_steps) == 0


def interval_steps(interval: float, num_steps: int) -> int:
    """Return an interval in steps; below 1 it is a share of the run, rounded up."""
    return int(interval) if interval >= 1 else math.ceil(interval * num_steps)


def useful_flops(run: TrainingRun, step: StepPlan) -> float:
    """Return the FLOPs that a step needs over all ranks, by the plan's cost model without recomputation.

    Tokens that samples share count once, and forward passes before the step too.
    """
    if step.num_label_tokens == 0:
        return 0.0  # such a step computes nothing
    cost, samples = run.plan.batch_layout.cost.useful or run.plan.batch_layout.cost, run.plan.samples
    places = samples.indices_of(step.sample_ids)
    num_flops = float(cost.flops(samples.lengths[places], samples.num_label_tokens[places]).sum())
    num_flops += samples.tower_flops_of(places)
    if run.planned.kl_pairs is not None and cost.forward is not None:
        samples = run.planned.kl_pairs.plan.samples
        num_flops += float(cost.forward.flops(samples.lengths[places], samples.num_label_tokens[places]).sum())
    return num_flops - shared_flops(step.micro_batches, cost)


def device_peak(run: TrainingRun) -> Peak | None:
    """Return the nominal peak of the run's device in the arithmetic of its matrix products; None if unknown."""
    if run.device.type != "cuda":
        return None
    arithmetic = "fp8" if run.config.computes_in_fp8 else _ARITHMETIC.get(run.dtype, "")
    return nominal_peak(torch.cuda.get_device_name(run.device), arithmetic)


PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "triton", "torchao")
# a page draws this many steps of the packing and bins of the lengths
NUM_PACKED_STEPS, NUM_LENGTH_BINS = 24, 48
# steps, evenly spaced over the run, that padding and balance are estimated from
NUM_SAMPLED_STEPS = 128
MAX_MODEL_TEXT = 20_000


def gather_gpus(run: TrainingRun) -> tuple[GpuFacts, ...]:
    """Return the GPUs of all ranks; none on the CPU. Collective on GPUs."""
    if run.device.type != "cuda":
        return ()
    properties = torch.cuda.get_device_properties(run.device)
    gpus = run.checkpoints.group.all_gather((properties.name, properties.total_memory))
    return tuple(GpuFacts(*gpu) for gpu in gpus)


def run_start(run: TrainingRun, gpus: tuple[GpuFacts, ...]) -> RunStart:
    """Return the facts of a run that is built and starts its next step, for the first rank, which writes them."""
    config, planned, now = run.config, run.planned, time.time()
    earlier = None
    if run.progress.step:
        with suppress(DataError):  # of another version: only the first start's time is lost
            earlier = read_start(config.folder)
    trained = run.named_parameters.values()
    return RunStart(
        name=config.name,
        folder=str(config.folder.absolute()),
        method=config.method,
        model=redacted(config.model.name),
        data=config.data.name,
        started_at=now,
        first_started_at=earlier.first_started_at if earlier else now,
        resumed_step=run.progress.step or None,
        num_ranks=run.rank.world,
        device=run.device.type,
        gpus=gpus,
        dtype=str(run.dtype).removeprefix("torch."),
        strategy=planned.parallel_layout.strategy,
        num_parameters=planned.shape.num_params,
        num_trained_parameters=sum(math.prod(run.strategy.whole_shape(parameter)) for parameter in trained),
        model_text=str(run.model)[:MAX_MODEL_TEXT],
        versions=versions(PACKAGES),
        settings=dict(flatten(redacted(config.model_dump(mode="json")))),
        plan=plan_facts(replace(planned, memory=run.memory), config),
        scores=planned.scoring is not None,
    )


def plan_facts(planned: PlannedRun, config: Config) -> PlanFacts:
    """Return the plan's totals, estimated from sampled steps where counting would visit every step."""
    plan, memory = planned.plan, planned.memory
    sampled = list(plan.sampled_steps(NUM_SAMPLED_STEPS))
    largest = max(
        (batch for step in sampled for batch in step.micro_batches),
        key=lambda batch: batch.num_padded_tokens,
    )
    estimate = memory.estimate(largest.size)
    lengths = plan.samples.lengths
    edges = np.unique(np.linspace(0, int(lengths.max()) + 1, NUM_LENGTH_BINS + 1).astype(np.int64))
    num_shown = 0 if planned.data.rollouts else min(NUM_PACKED_STEPS, plan.num_steps)  # steps of rounds have bounds
    shown = [plan.step(index) for index in range(num_shown)]
    last = plan.step(plan.num_steps - 1)
    # each step of rounds takes all samples of its bounds, however few prompts those are
    takes = plan.num_steps if planned.data.rollouts else plan.epoch_after(last)
    return PlanFacts(
        num_steps=plan.num_steps,
        num_samples=plan.num_samples,
        num_eval_samples=sum(len(eval_set.step.sample_ids) for eval_set in planned.eval_sets),
        samples_per_step=config.batch.samples_per_step,
        micro_batch_tokens=plan.batch_layout.micro_batch_tokens,
        epochs=plan.epoch_after(last),
        num_tokens=round(int(lengths.sum()) * takes),
        num_label_tokens=round(int(plan.samples.num_label_tokens.sum()) * takes),
        padding_avoided=plan.padding_avoided(sampled),
        layout=plan.batch_layout.name,
        padding_share=padding_share(sampled),
        shared_share=plan.shared_share,
        balance=sum(step.balance for step in sampled) / len(sampled),
        memory_bytes=None if estimate is None else estimate.total_bytes,
        length_edges=tuple(edges.tolist()),
        length_counts=tuple(np.histogram(lengths, edges)[0].tolist()) if shown else (),
        packing=tuple(tuple(tuple(_lengths(plan, batch) for batch in rank) for rank in step.by_rank) for step in shown),
        padded=tuple(tuple(tuple(map(tuple, rank)) for rank in plan.naive_batches(step)) for step in shown),
    )


def _lengths(plan: TrainingPlan, batch: MicroBatch) -> tuple[int, ...]:
    lengths = plan.samples.lengths[plan.samples.indices_of(batch.sample_ids)].tolist()
    return tuple(segment_lengths(lengths, batch.shared))
