"""One optimizer step, exactly: sums over micro-batches and ranks, divided once by the step's global label count."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.models.head import packed_loss
from flatout.plan.types import StepPlan
from flatout.train.guards import require_finite
from flatout.train.optim import set_lr
from flatout.train.rng import seed_micro_batch
from flatout.train.schedule import lr_factor
from flatout.train.state import Run


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did. `grad_norm` is the global L2 norm before clipping; `skipped` names why nothing was updated."""

    loss: float
    token_accuracy: float
    grad_norm: float
    lr: float
    skipped: str | None = None


def take_step(run: Run, step: StepPlan) -> StepOutcome | None:
    """Forward, backward and update for one planned step; None when a stop was asked for before the update.

    Raises NumericError before the update when the loss or the gradient is not finite.
    """
    run.optimizer.zero_grad(set_to_none=True)
    if step.num_label_tokens == 0:
        return StepOutcome(loss=0.0, token_accuracy=0.0, grad_norm=0.0, lr=0.0, skipped="no label tokens")
    loss_sum, num_correct = accumulate_gradients(run, step)
    stop = torch.full_like(loss_sum, float(run.stop.requested))
    totals = run.strategy.sum_values(torch.stack([loss_sum, num_correct, stop]))
    loss_total, correct_total, num_stopping = totals.tolist()
    if num_stopping:
        # some ranks left out micro-batches: the step is taken again, whole, after the resume
        run.optimizer.zero_grad(set_to_none=True)
        return None
    return _update(run, step, loss_total / step.num_label_tokens, correct_total / step.num_label_tokens)


def accumulate_gradients(run: Run, step: StepPlan) -> tuple[Tensor, Tensor]:
    """Forward and backward of this rank's micro-batches: summed loss and number of correct label tokens, 0-d fp64."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    num_correct = torch.zeros((), dtype=torch.float64, device=run.device)
    micro_batches = step.ranks[run.rank.index]
    for index, batch in enumerate(run.feed.batches(micro_batches)):
        if run.stop.requested:
            break
        seed_micro_batch(run.config.seed, step=step.index, rank=run.rank.index, micro_batch=index)
        with run.strategy.accumulate(last=index == len(micro_batches) - 1):
            with autocast(run):
                sums = packed_loss(run.model, batch)
            # the plan knew this divisor before step 0, so no rank has to ask the others
            run.scaler.scale(sums.loss_sum / step.num_label_tokens).backward()
        loss_sum += sums.loss_sum.detach()
        num_correct += sums.num_correct
    return loss_sum, num_correct


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Mean loss and token accuracy over the evaluation set, without dropout."""
    assert run.eval_plan is not None
    assert run.eval_feed is not None
    run.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)
    # a graph belongs to a mode: compiling another one would cost more than the forward passes do
    with torch.compiler.set_stance("force_eager"):
        for batch in run.eval_feed.batches(run.eval_plan.ranks[run.rank.index]):
            with autocast(run):
                sums = packed_loss(run.model, batch)
            totals += torch.stack([sums.loss_sum.double(), sums.num_correct.double()])
    run.model.train()
    loss_total, correct_total = run.strategy.sum_values(totals).tolist()
    return loss_total / run.eval_plan.num_label_tokens, correct_total / run.eval_plan.num_label_tokens


def autocast(run: Run) -> AbstractContextManager[object]:
    """fp32 master weights compute in the run's precision; frozen bases are stored in it already."""
    return torch.autocast(run.device.type, dtype=run.dtype) if run.autocast else nullcontext()


def _update(run: Run, step: StepPlan, loss: float, token_accuracy: float) -> StepOutcome:
    run.strategy.sum_gradients(run.parameters)
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.grad_norm(run.parameters)
    grad_norm = norm.item()
    lr = run.config.optim.lr * lr_factor(run.config.schedule, run.progress.num_updates, run.plan.num_steps)
    overflow = run.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(grad_norm)
    if not overflow:
        require_finite(
            loss,
            grad_norm,
            step=step.index + 1,
            sample_ids=step.sample_ids,
            named=run.named_parameters,
            origin_of=run.feed.origin,
            dump=run.folder / "non_finite.json",
        )
        if run.config.optim.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(run.parameters, run.config.optim.max_grad_norm, norm)
    set_lr(run.optimizer, lr)
    # the scaler leaves the weights alone and halves its scale when a gradient overflowed
    run.scaler.step(run.optimizer)
    run.scaler.update()
    skipped = "fp16 overflow" if overflow else None
    return StepOutcome(loss, token_accuracy, 0.0 if overflow else grad_norm, lr, skipped)
