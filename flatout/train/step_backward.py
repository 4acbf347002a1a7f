"""One optimizer step whose updates happen in the backward pass: `full.update: backward`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flatout.errors import NumericError
from flatout.optim.update import BackwardUpdate
from flatout.plan.schedule.steps import StepPlan
from flatout.train.dropout_seed import seed_micro_batch
from flatout.train.state import Run
from flatout.train.step import NOTHING_TO_LEARN, Pending, StepOutcome, autocast, check_finite, launch_step, next_lr

Launch = Callable[[Run, StepPlan], Pending]


def choose_step(run: Run) -> Launch:
    """Return how this run launches a step: update after all gradients, or weight by weight in the backward pass."""
    if run.config.full.update == "step":
        return launch_step
    update = BackwardUpdate(run.optimizer, run.parameters)

    def launch(run: Run, step: StepPlan) -> Pending:
        outcome = step_in_backward(update, run, step)
        return lambda: outcome

    return launch


def step_in_backward(update: BackwardUpdate, run: Run, step: StepPlan) -> StepOutcome | None:
    """Run a forward pass and a backward pass that updates; return None when a stop was requested beforehand.

    The step is one micro-batch of one process (`check_backward_update`). The host waits for the loss before the
    backward pass, so a loss that is not finite stops the run before any update. A gradient that is not finite is only
    found after the updates: NumericError then says to resume from the newest checkpoint.
    """
    if step.num_label_tokens == 0:
        return NOTHING_TO_LEARN
    if run.stop.requested:
        return None
    (batch,) = run.feed.batches(step.ranks[run.rank.index])
    seed_micro_batch(run.config.seed, step=step.index, rank=run.rank.index, micro_batch=0)
    with autocast(run):
        batch_loss, batch_correct = run.loss(batch)
    loss_sum, num_correct = torch.stack([batch_loss.detach().double(), batch_correct.double()]).tolist()
    check_finite(run, step, loss_sum, 0.0)
    lr = next_lr(run)
    update.start(lr)
    # weights change inside the backward pass
    run.saver.before_update()
    (batch_loss / step.num_label_tokens).backward()
    grad_norm = update.finish().item()
    if not math.isfinite(grad_norm):
        raise NumericError(
            f"step {step.index + 1}: gradient norm {grad_norm}, found after its updates (full.update: backward); go on "
            "from the newest checkpoint, with a lower optim.lr or with full.update: step, which stops before an update"
        )
    return StepOutcome(loss_sum / step.num_label_tokens, num_correct / step.num_label_tokens, grad_norm, lr)
