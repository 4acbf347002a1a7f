"""What an objective estimates over a whole step before its gradients, by passes over KL pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.model_with_loss import sums_of
from flatout.models.packed import PackedBatch
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.data_sets import EvalSet
from flatout.trainer.passes import as_in_training, autocast, run_with_oom_retry, until_stopped, until_stopped_in_step
from flatout.trainer.state import TrainingRun


def compute_step_estimates(run: TrainingRun, step: StepPlan) -> None:
    """Compute what the objective estimates over a step, without gradients and dropout; collective.

    The means are over all samples of the step, on all ranks and in all micro-batches.
    """
    if (kl_pairs := run.planned.kl_pairs) is None:
        return
    plan, loader = kl_pairs.plan, run.loader_of(kl_pairs)
    steps = [plan.step(index) for index in range(step.index, min(step.index + 2, plan.num_steps))]
    kl_step = next(iter(loader.prefetching(steps, run.data_parallel_rank)))
    with as_in_training(run):
        _sum_estimates(run, plan, kl_step, loader, is_evaluation=False)


def compute_eval_estimates(run: TrainingRun, eval_set: EvalSet) -> None:
    """Compute what the objective estimates over an evaluation set; collective."""
    if (kl_pairs := eval_set.kl_pairs) is not None:
        _sum_estimates(run, kl_pairs.plan, kl_pairs.step, run.loader_of(kl_pairs), is_evaluation=True)


def _sum_estimates(
    run: TrainingRun, plan: PlannedSamples, step: StepPlan, loader: BatchLoader, *, is_evaluation: bool
) -> None:
    objective = run.planned.objective

    def run_passes(passes: Sequence[MicroBatch], batches: Iterator[PackedBatch]) -> Tensor:
        sums = torch.zeros(len(objective.estimates), dtype=torch.float64, device=run.device)

        def add(model: PreTrainedModel, batch: PackedBatch, states: Tensor) -> None:
            tokens = run.loss_module.label_tokens(batch, states)
            sums.add_(torch.stack(sums_of(objective, tokens, estimates=True)).double())

        remaining = (until_stopped if is_evaluation else until_stopped_in_step)(run, batches)
        num_tokens = sum(micro_batch.num_padded_tokens for micro_batch in passes)
        timed = nullcontext() if is_evaluation else run.rank_meter.phase("forward", num_tokens=num_tokens)
        with timed, run.aux_loss.observed_by(add):
            for batch in remaining:
                with autocast(run):
                    run.loss_module(batch)
        return sums

    sums = run_with_oom_retry(run, plan, step, loader, "evaluation" if is_evaluation else "estimates", run_passes)
    means = run.strategy.sum_values(sums) / len(step.sample_ids)
    run.aux_loss.estimates = dict(zip(objective.estimates, means.unbind(), strict=True))
