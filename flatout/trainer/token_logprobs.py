"""Log-probabilities of a data set's label tokens by the weights that the model has now: one planned pass, no loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.models.model_with_loss import ModelWithLoss
from flatout.models.packed import PackedBatch
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.passes import autocast, run_with_oom_retry
from flatout.trainer.state import TrainingRun


def compute_logprobs(
    run: TrainingRun,
    loader: BatchLoader,
    plan: PlannedSamples,
    step: StepPlan,
    sample_ids: Sequence[int],
    *,
    per: Literal["token", "sample"] = "sample",
) -> NDArray[np.float64]:
    """Return the log-probability of each sample's label tokens, or their sum per sample, in the order of `sample_ids`.

    Collective. `sample_ids` are all samples of the step. Call it within `inference` or `as_in_training`, which choose
    the kernels, with the weights in the model whose log-probabilities are wanted.
    """
    ones = np.ones(len(sample_ids), np.int64)
    counts = ones if per == "sample" else np.asarray(loader.store.num_label_tokens)[list(sample_ids)]
    ends = np.cumsum(counts)
    places = {i: np.arange(end - count, end) for i, end, count in zip(sample_ids, ends, counts, strict=True)}

    def compute(loss: ModelWithLoss, batch: PackedBatch) -> tuple[Tensor]:
        tokens = loss.label_tokens(batch)
        values = tokens.logprobs if per == "token" else tokens.by_sample(tokens.logprobs)
        return (values.detach(),)

    def run_passes(passes: Sequence[MicroBatch], batches: Iterator[PackedBatch]) -> Tensor:
        logprobs = torch.zeros(int(counts.sum()), dtype=torch.float64, device=run.device)
        for planned, batch in zip(passes, batches, strict=True):
            with autocast(run):
                (values,) = run.loss_module(batch, compute)
            if not planned.is_filler:
                logprobs[np.concatenate([places[i] for i in planned.sample_ids])] = values.double()
        return logprobs

    logprobs = run_with_oom_retry(run, plan, step, loader, "reference", run_passes)
    return np.array(run.strategy.sum_values(logprobs).tolist())
