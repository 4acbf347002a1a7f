"""What a run reports about itself when it starts: its hardware, versions, sizes and plan."""

from __future__ import annotations

import math
import platform
import time
from contextlib import suppress
from dataclasses import replace
from importlib import metadata

import numpy as np
import torch

from flatout import __version__
from flatout.config.read import flatten
from flatout.config.schema import Config
from flatout.errors import DataError
from flatout.io.redact import redacted
from flatout.models.packed import segment_lengths
from flatout.planner.steps.step_plan import MicroBatch, padding_share
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.track.record import GpuFacts, PlanFacts, RunStart
from flatout.track.run_log import read_start
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.state import TrainingRun

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
        versions=versions(),
        settings=dict(flatten(redacted(config.model_dump(mode="json")))),
        plan=plan_facts(replace(planned, memory=run.memory), config),
        scores=planned.scoring is not None,
    )


def versions() -> dict[str, str]:
    """Return the versions of flatout, Python and the packages that compute, as far as they are installed."""
    version_of = {"flatout": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            version_of[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return version_of


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
    shown = [plan.step(index) for index in range(min(NUM_PACKED_STEPS, plan.num_steps))]
    epochs = plan.epoch_after(plan.step(plan.num_steps - 1))
    return PlanFacts(
        num_steps=plan.num_steps,
        num_samples=plan.num_samples,
        num_eval_samples=sum(len(eval_set.step.sample_ids) for eval_set in planned.eval_sets),
        samples_per_step=config.batch.samples_per_step,
        micro_batch_tokens=plan.batch_layout.micro_batch_tokens,
        epochs=epochs,
        num_tokens=round(int(lengths.sum()) * epochs),
        num_label_tokens=round(int(plan.samples.num_label_tokens.sum()) * epochs),
        padding_avoided=plan.padding_avoided(sampled),
        layout=plan.batch_layout.name,
        padding_share=padding_share(sampled),
        shared_share=plan.shared_share,
        balance=sum(step.balance for step in sampled) / len(sampled),
        memory_bytes=None if estimate is None else estimate.total_bytes,
        length_edges=tuple(edges.tolist()),
        length_counts=tuple(np.histogram(lengths, edges)[0].tolist()),
        packing=tuple(tuple(tuple(_lengths(plan, batch) for batch in rank) for rank in step.by_rank) for step in shown),
        padded=tuple(tuple(tuple(map(tuple, rank)) for rank in plan.naive_batches(step)) for step in shown),
    )


def _lengths(plan: TrainingPlan, batch: MicroBatch) -> tuple[int, ...]:
    lengths = plan.samples.lengths[plan.samples.indices_of(batch.sample_ids)].tolist()
    return tuple(segment_lengths(lengths, batch.shared))
