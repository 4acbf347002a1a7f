"""What an objective estimates over a whole step before its gradients, by passes over KL pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from flatout.models.model_with_loss import ModelWithLoss, sums_of
from flatout.models.packed import PackedBatch
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.data_sets import EvalSet
from flatout.trainer.passes import as_in_training, autocast, run_with_oom_retry, until_stopped, until_stopped_in_step
from flatout.trainer.state import TrainingRun


def compute_step_estimates(run: TrainingRun, step: StepPlan) -> Mapping[str, Tensor]:
    """Return what the objective estimates over a step by name, without gradients and dropout; collective.

    The means are over all samples of the step, on all ranks and in all micro-batches; 0 for a run without KL pairs.
    """
    if (kl_pairs := run.planned.kl_pairs) is None:
        return dict.fromkeys(run.planned.objective.estimates, torch.zeros((), device=run.device))
    plan, loader = kl_pairs.plan, run.loader_of(kl_pairs)
    steps = [plan.step(index) for index in range(step.index, min(step.index + 2, plan.num_steps))]
    kl_step = next(iter(loader.prefetching(steps, run.data_parallel_rank)))
    with as_in_training(run):
        return _mean_estimates(run, plan, kl_step, loader, is_evaluation=False)


def compute_eval_estimates(run: TrainingRun, eval_set: EvalSet) -> Mapping[str, Tensor]:
    """Return what the objective estimates over an evaluation set; collective."""
    if (kl_pairs := eval_set.kl_pairs) is None:
        return {}
    return _mean_estimates(run, kl_pairs.plan, kl_pairs.step, run.loader_of(kl_pairs), is_evaluation=True)


def _estimate_sums(loss: ModelWithLoss, batch: PackedBatch) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in sums_of(loss.objective, loss.label_tokens(batch), estimates=True))


def _mean_estimates(
    run: TrainingRun, plan: PlannedSamples, step: StepPlan, loader: BatchLoader, *, is_evaluation: bool
) -> Mapping[str, Tensor]:
    names = run.planned.objective.estimates

    def run_passes(passes: Sequence[MicroBatch], batches: Iterator[PackedBatch]) -> Tensor:
        sums = torch.zeros(len(names), dtype=torch.float64, device=run.device)
        remaining = (until_stopped if is_evaluation else until_stopped_in_step)(run, batches)
        num_tokens = sum(micro_batch.num_padded_tokens for micro_batch in passes)
        with nullcontext() if is_evaluation else run.rank_meter.phase("forward", num_tokens=num_tokens):
            for batch in remaining:
                with autocast(run):
                    sums += torch.stack(run.loss_module(batch, _estimate_sums)).double()
        return sums

    sums = run_with_oom_retry(run, plan, step, loader, "evaluation" if is_evaluation else "estimates", run_passes)
    means = run.strategy.sum_values(sums) / len(step.sample_ids)
    return dict(zip(names, means.unbind(), strict=True))
