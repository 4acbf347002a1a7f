"""One optimizer step, exactly: sums over micro-batches and ranks, divided once by the step's global label count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from flatout.parallel.strategy import local_grads
from flatout.plan.types import MicroBatch, StepPlan
from flatout.train.ahead import can_hold_back, hold_back, let_go, read_later
from flatout.train.flat import adding_at_once
from flatout.train.guards import require_finite
from flatout.train.memory import lower_cap, within_cap
from flatout.train.optim import set_lr
from flatout.train.rng import seed_micro_batch
from flatout.train.schedule import lr_factor
from flatout.train.state import Run


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did. `grad_norm` is the global L2 norm before clipping; `skipped` names why nothing was updated.

    `busy_s` are each rank's seconds in the passes of the newest step that its device had done; empty for one rank.
    `ended` is where the step ends in the device's work, for a step that the host did not wait for.
    """

    loss: float
    token_accuracy: float
    grad_norm: float
    lr: float
    skipped: str | None = None
    busy_s: tuple[float, ...] = field(default=(), compare=False)
    ended: torch.cuda.Event | None = field(default=None, compare=False)


NOTHING_TO_LEARN = StepOutcome(loss=0.0, token_accuracy=0.0, grad_norm=0.0, lr=0.0, skipped="no label tokens")

# waits for a step's figures; None when a stop was asked for before its update, which then was left out
Pending = Callable[[], StepOutcome | None]


def take_step(run: Run, step: StepPlan) -> StepOutcome | None:
    """Forward, backward and update for one planned step; None when a stop was asked for before the update.

    Raises NumericError when the loss or the gradient is not finite; the weights are then those before the step.
    """
    return launch_step(run, step)()


def launch_step(run: Run, step: StepPlan) -> Pending:
    """Start a step without waiting for it where the optimizer can hold back a bad update by itself.

    At most one later step may be launched before the function returned is called; it raises NumericError as
    `take_step` does. After a stop or an error no launched step has changed anything.
    """
    run.optimizer.zero_grad(set_to_none=True)
    if step.num_label_tokens == 0:
        return lambda: NOTHING_TO_LEARN
    run.busy.start()
    loss_sum, num_correct = accumulate_gradients(run, step)
    run.busy.stop()
    run.watch.at("sum")
    # first, since ranks may have started these sums in their backward passes
    run.strategy.sum_gradients(run.parameters)
    totals = run.strategy.sum_values(_figures(run, loss_sum, num_correct))
    if can_hold_back(run.optimizer) and not run.scaler.is_enabled():
        return _update_ahead(run, step, totals)
    done = _update_after_reading(run, step, totals)
    return lambda: done


def _figures(run: Run, loss_sum: Tensor, num_correct: Tensor) -> Tensor:
    """What ranks add up in a step: loss, correct tokens, requests to stop, and each rank's busy seconds in its place.

    Filled in on the device: the host does not wait.
    """
    stop = torch.full_like(loss_sum, float(run.stop.requested))
    busy = torch.zeros(run.rank.world if run.rank.world > 1 else 0, dtype=loss_sum.dtype, device=loss_sum.device)
    busy[run.rank.index : run.rank.index + 1] = run.busy.seconds()
    return torch.cat([torch.stack([loss_sum, num_correct, stop]), busy])


def accumulate_gradients(run: Run, step: StepPlan) -> tuple[Tensor, Tensor]:
    """Forward and backward of this rank's micro-batches: summed loss and number of correct label tokens, 0-d fp64.

    When memory runs out, gradients are dropped and the same samples are taken again in smaller micro-batches, with the
    same divisor. Raises ResourceError when they cannot become smaller, or other ranks could not follow.
    """
    while True:
        micro_batches = within_cap(run, step)
        sums = _backward_each(run, step, micro_batches)
        if not isinstance(sums, MicroBatch):
            return sums
        # here, where no frame of the failed pass holds a tensor any more
        lower_cap(run, step, micro_batches, failed=sums)


def _backward_each(run: Run, step: StepPlan, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor] | MicroBatch:
    """The sums over all micro-batches, or the one that did not fit in memory."""
    run.joined.refresh()
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    num_correct = torch.zeros((), dtype=torch.float64, device=run.device)
    index = 0
    try:
        for index, batch in enumerate(run.feed.batches(micro_batches)):
            # in lockstep other ranks wait for every pass of this one
            if run.stop.requested and not run.plan.layout.lockstep:
                break
            seed_micro_batch(run.config.seed, step=step.index, rank=run.rank.index, micro_batch=index)
            with run.strategy.accumulate(last=index == len(micro_batches) - 1), adding_at_once(run.optimizer):
                with autocast(run):
                    batch_loss, batch_correct = run.loss(batch)
                # the plan knew this divisor before step 0, so no rank has to ask the others
                run.scaler.scale(batch_loss / step.num_label_tokens).backward()
            loss_sum += batch_loss.detach()
            num_correct += batch_correct
    except torch.OutOfMemoryError:
        return micro_batches[index]
    return loss_sum, num_correct


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Mean loss and token accuracy over the evaluation set, without dropout."""
    assert run.eval_plan is not None
    assert run.eval_feed is not None
    run.model.eval()
    run.joined.refresh()
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)
    # a graph belongs to a mode: compiling another one would cost more than the forward passes do
    with torch.compiler.set_stance("force_eager"):
        for batch in run.eval_feed.batches(run.eval_plan.ranks[run.rank.index]):
            with autocast(run):
                sums = run.loss(batch)
            totals += torch.stack([value.double() for value in sums])
    run.model.train()
    loss_total, correct_total = run.strategy.sum_values(totals).tolist()
    return loss_total / run.eval_plan.num_label_tokens, correct_total / run.eval_plan.num_label_tokens


def autocast(run: Run) -> AbstractContextManager[object]:
    """fp32 master weights compute in the run's precision; frozen bases are stored in it already."""
    return torch.autocast(run.device.type, dtype=run.dtype) if run.autocast else nullcontext()


def _update_ahead(run: Run, step: StepPlan, totals: Tensor) -> Pending:
    """Update if the figures, known on the device only, are good."""
    norm = _norm(run)
    figures = torch.cat([totals, norm.to(totals.dtype)[None]])
    hold_back(run.optimizer, ~figures.isfinite().all() | (totals[2] > 0))
    lr = next_lr(run)
    set_lr(run.optimizer, lr)
    run.saver.before_update()
    with record_function("flatout::optimizer"):
        _clip(run, norm)
        run.optimizer.step()
    run.num_in_flight += 1
    read, ended = read_later(figures)

    def outcome() -> StepOutcome | None:
        run.num_in_flight -= 1
        loss_total, correct_total, num_stopping, *busy_s, grad_norm = read()
        if num_stopping:
            _leave_out(run)
            return None
        loss = loss_total / step.num_label_tokens
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            # no update happened since, so the same gradients come again, to name the parameter at fault
            run.optimizer.zero_grad(set_to_none=True)
            accumulate_gradients(run, step)
            run.strategy.sum_gradients(run.parameters)
            check_finite(run, step, loss, grad_norm)
        accuracy = correct_total / step.num_label_tokens
        return StepOutcome(loss, accuracy, grad_norm, lr, busy_s=tuple(busy_s), ended=ended)

    return outcome


def _update_after_reading(run: Run, step: StepPlan, totals: Tensor) -> StepOutcome | None:
    """Update once the host knows that the figures are good."""
    loss_total, correct_total, num_stopping, *busy_s = totals.tolist()
    if num_stopping:
        _leave_out(run)
        return None
    loss = loss_total / step.num_label_tokens
    norm = _norm(run)
    grad_norm = norm.item()
    overflow = run.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(grad_norm)
    if not overflow:
        check_finite(run, step, loss, grad_norm)
        _clip(run, norm)
    lr = next_lr(run)
    set_lr(run.optimizer, lr)
    run.saver.before_update()
    # the scaler leaves the weights alone and halves its scale when a gradient overflowed
    with record_function("flatout::optimizer"):
        run.scaler.step(run.optimizer)
    run.scaler.update()
    skipped = "fp16 overflow" if overflow else None
    accuracy = correct_total / step.num_label_tokens
    return StepOutcome(loss, accuracy, 0.0 if overflow else grad_norm, lr, skipped, tuple(busy_s))


def _norm(run: Run) -> Tensor:
    run.scaler.unscale_(run.optimizer)
    return run.strategy.grad_norm(run.parameters)


def _clip(run: Run, norm: Tensor) -> None:
    if run.config.optim.max_grad_norm is not None and (grads := local_grads(run.parameters)):
        # as torch.nn.utils.clip_grads_with_norm_, on this rank's parts
        factor = (run.config.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor.to(grads[0].device))


def next_lr(run: Run) -> float:
    """The learning rate of the next update."""
    # updates under way count: one that turns out bad ends the run
    num_updates = run.progress.num_updates + run.num_in_flight
    return run.config.optim.lr * lr_factor(run.config.schedule, num_updates, run.plan.num_steps)


def _leave_out(run: Run) -> None:
    """Some ranks left out micro-batches: the step is taken again, whole, after the resume."""
    run.optimizer.zero_grad(set_to_none=True)
    let_go(run.optimizer)


def check_finite(run: Run, step: StepPlan, loss: float, grad_norm: float) -> None:
    """Raise NumericError with the step, its samples and the parameter at fault unless both figures are finite."""
    require_finite(
        loss,
        grad_norm,
        step=step.index + 1,
        sample_ids=step.sample_ids,
        named=run.named_parameters,
        origin_of=run.feed.origin,
        dump=run.folder / "non_finite.json",
    )
