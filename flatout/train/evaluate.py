"""Evaluation: the training loss, without dropout, over rows that are not trained on."""

from __future__ import annotations

import time

import torch

from flatout.track.record import EvalRecord
from flatout.train.state import Run
from flatout.train.step import autocast


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Return the mean loss and token accuracy over the label tokens of the whole evaluation set; collective."""
    assert run.eval_plan is not None
    assert run.eval_feed is not None
    run.model.eval()
    run.fused_lora.refresh()
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)
    # graphs are specialized on train mode; compiling for eval mode would take longer than these forward passes
    with torch.compiler.set_stance("force_eager"):
        for batch in run.eval_feed.batches(run.eval_plan.ranks[run.rank.index]):
            with autocast(run):
                sums = run.loss(batch)
            totals += torch.stack([value.double() for value in sums])
    run.model.train()
    loss_total, correct_total = run.strategy.sum_values(totals).tolist()
    return loss_total / run.eval_plan.num_label_tokens, correct_total / run.eval_plan.num_label_tokens


def evaluate_now(run: Run) -> bool:
    """Evaluate, record it, and decide on early stopping. Returns True for a new best, False without evaluation data."""
    if run.eval_plan is None:
        return False
    started = time.perf_counter()
    run.watch.set_phase("evaluate", run.progress.step)
    loss, accuracy = evaluate(run)
    progress = run.progress
    if progress.first_eval_loss is None:
        progress.first_eval_loss = loss
    is_best = progress.best_eval_loss is None or loss < progress.best_eval_loss - run.config.eval.min_delta
    if is_best:
        progress.best_eval_loss, progress.best_step = loss, progress.step
    progress.last_eval_loss, progress.last_eval_step = loss, progress.step
    progress.num_evals_without_best = 0 if is_best else progress.num_evals_without_best + 1
    eval_s = time.perf_counter() - started
    run.tracker.record(EvalRecord(progress.step, loss, accuracy, run.eval_plan.num_label_tokens, is_best, eval_s))
    patience = run.config.eval.patience
    if patience is not None and progress.num_evals_without_best >= patience:
        progress.stopped_early = True
        run.tracker.event("early_stop", {"step": progress.step, "best_step": progress.best_step})
    return is_best
