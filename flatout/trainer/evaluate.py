"""Evaluate the current weights on every evaluation data set, and have them answer the run's prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flatout.errors import Fix, NumericError
from flatout.models.packed import PackedBatch
from flatout.planner.steps.step_plan import MicroBatch
from flatout.track.record import EvalFigures, EvalRecord
from flatout.trainer.answers import answer_prompts
from flatout.trainer.metrics import finite_metrics
from flatout.trainer.passes import autocast, inference, run_with_oom_retry, sum_unless_stopped, until_stopped
from flatout.trainer.state import TrainingRun
from flatout.trainer.step_estimates import compute_eval_estimates
from flatout.trainer.step_guards import not_finite
from flatout.trainer.worst_samples import WorstSamples


def evaluate_now(run: TrainingRun) -> bool:
    """Evaluate, record it, answer the prompts, and decide on early stopping; collective.

    Returns True for a new best, False without evaluation data. Raises PassesStopped before `run.progress` changes: a
    resumed run evaluates this step again.
    """
    if not run.eval_sets:
        return False
    started = time.perf_counter()
    progress = run.progress
    run.watch.set_phase("evaluate", progress.step)
    worst = WorstSamples(run)
    total, by_data = evaluate(run, worst)
    loss = total.loss
    if not math.isfinite(loss):
        which = next(name for name, figures in by_data.items() if not math.isfinite(figures.loss))
        what = f"step {progress.step}: the evaluation loss on {which} is {loss}; earlier checkpoints are kept"
        raise not_finite(run, what)
    judged = total.of(best := run.config.eval.best)
    if judged is None:
        text = f"step {progress.step}: eval.best: {best} is no finite number, so none is best; checkpoints are kept"
        raise NumericError(text, [Fix({"eval.best": "loss"})])
    is_best = _is_better(run, judged)
    worst_samples = worst.greatest()
    eval_s = time.perf_counter() - started
    run.reporter.record(
        EvalRecord(
            step=progress.step,
            eval_loss=loss,
            eval_token_accuracy=total.token_accuracy,
            num_label_tokens=total.num_label_tokens,
            is_best=is_best,
            eval_s=eval_s,
            eval_tokens_per_s=sum(eval_set.step.num_tokens for eval_set in run.eval_sets) / eval_s,
            by_data=by_data if len(by_data) > 1 else {},
            metrics=total.metrics,
            worst=worst_samples,
        )
    )
    if progress.step == 0 and run.device.type == "cpu" and run.config.eval.prompts is None:
        # on a CPU they take longer than the evaluation, and nobody has asked for these
        run.reporter.stage("answers", "none before step 1 on a CPU; set eval.prompts to see what the model says then")
    else:
        answer_prompts(run)
    if progress.first_eval_loss is None:
        progress.first_eval_loss = loss
    if is_best:
        progress.best_eval_loss, progress.best_figure, progress.best_step = loss, judged, progress.step
    progress.last_eval_loss, progress.last_eval_step = loss, progress.step
    progress.num_evals_without_best = 0 if is_best else progress.num_evals_without_best + 1
    patience = run.config.eval.patience
    if patience is not None and progress.num_evals_without_best >= patience:
        progress.stopped_early = True
        run.reporter.event("early_stop", {"step": progress.step, "best_step": progress.best_step})
    return is_best


def _is_better(run: TrainingRun, judged: float) -> bool:
    """Whether this value of the metric that `eval.best` names is a new best."""
    progress, name = run.progress, run.config.eval.best
    # a checkpoint of an earlier version has the best loss only
    best = progress.best_eval_loss if progress.best_figure is None and name == "loss" else progress.best_figure
    if best is None:
        return True
    is_higher_better = name != "loss" and run.planned.objective.metrics[name].better == "higher"
    return (judged - best if is_higher_better else best - judged) > run.config.eval.min_delta


def evaluate(run: TrainingRun, worst: WorstSamples) -> tuple[EvalFigures, dict[str, EvalFigures]]:
    """Return figures over all evaluation data sets and of each, without dropout; collective. Raises PassesStopped.

    `worst` reads the losses of their tokens.
    """
    num_sums = len(run.planned.objective.sum_names)
    set_sums = torch.zeros(len(run.eval_sets), num_sums, dtype=torch.float64, device=run.device)
    with inference(run):
        for set_index, (own_sums, eval_set) in enumerate(zip(set_sums, run.eval_sets, strict=True)):
            run_passes = partial(_sum_passes, run, worst, set_index, compute_eval_estimates(run, eval_set))
            loader = run.loader_of(eval_set)
            own_sums += run_with_oom_retry(run, eval_set.plan, eval_set.step, loader, "evaluation", run_passes)
    sums_by_set = sum_unless_stopped(run, set_sums).tolist()
    counts_by_set = [eval_set.normalizers.step_normalizers(eval_set.step) for eval_set in run.eval_sets]
    label_tokens = [eval_set.step.num_label_tokens for eval_set in run.eval_sets]
    by_data = {
        eval_set.name: _figures(run, *figures)
        for eval_set, *figures in zip(run.eval_sets, sums_by_set, counts_by_set, label_tokens, strict=True)
    }
    sums, counts = ([sum(values) for values in zip(*by_set, strict=True)] for by_set in (sums_by_set, counts_by_set))
    return _figures(run, sums, counts, sum(label_tokens)), by_data


def _sum_passes(
    run: TrainingRun,
    worst: WorstSamples,
    set_index: int,
    estimates: Mapping[str, Tensor],
    passes: Sequence[MicroBatch],
    batches: Iterator[PackedBatch],
) -> Tensor:
    total = torch.zeros(len(run.planned.objective.sum_names), dtype=torch.float64, device=run.device)
    worst.start(set_index)
    for micro_batch, batch in zip(passes, until_stopped(run, batches), strict=False):
        with autocast(run), worst.reading(set_index, micro_batch):
            sums = run.loss_module(batch, None, estimates)
        total += torch.stack([value.double() for value in sums])
    return total


def _figures(run: TrainingRun, sums: Sequence[float], counts: Sequence[float], num_label_tokens: int) -> EvalFigures:
    metrics = run.planned.objective.means(sums, counts)
    loss = metrics.pop("loss", 0.0)
    return EvalFigures(loss, metrics.get("token_accuracy"), num_label_tokens, finite_metrics(run, metrics))
