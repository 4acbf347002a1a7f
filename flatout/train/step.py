"""One optimizer step, exactly: sums over micro-batches and ranks, divided once by the step's global label count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from flatout.optim.flat import foreach_accumulate
from flatout.optim.lr_schedule import learning_rate
from flatout.optim.update import clear_found_inf, copy_to_host_async, set_found_inf, set_lr, supports_found_inf
from flatout.parallel.strategies.protocol import local_grads
from flatout.plan.schedule.steps import MicroBatch, StepPlan
from flatout.train.dropout_seed import seed_micro_batch
from flatout.train.guards import require_finite
from flatout.train.memory_guard import lower_cap, within_cap
from flatout.train.state import Run


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step. `grad_norm` is the global L2 norm before clipping. `skipped` says why no update was made.

    `busy_s` has each rank's seconds in the forward and backward passes of the latest step its device has finished;
    empty for one rank. `ended` marks the step's end on the device, for a step that the host did not wait for.
    """

    loss: float
    token_accuracy: float
    grad_norm: float
    lr: float
    skipped: str | None = None
    busy_s: tuple[float, ...] = field(default=(), compare=False)
    ended: torch.cuda.Event | float | None = field(default=None, compare=False)


NOTHING_TO_LEARN = StepOutcome(loss=0.0, token_accuracy=0.0, grad_norm=0.0, lr=0.0, skipped="no label tokens")

# waits for a step's outcome; None when a stop was requested before the update, which was then skipped
Pending = Callable[[], StepOutcome | None]


def launch_step(run: Run, step: StepPlan) -> Pending:
    """Start a step, without waiting for it if the optimizer can skip a bad update on the device.

    At most one later step may be launched before calling the returned function. It waits for the step's outcome:
    None when a stop was requested before the update, NumericError when the loss or the gradient is not finite. In
    both cases no launched step has changed any weight.
    """
    run.optimizer.zero_grad(set_to_none=True)
    if step.num_label_tokens == 0:
        return lambda: NOTHING_TO_LEARN
    run.busy.start()
    loss_sum, num_correct = accumulate_gradients(run, step)
    run.busy.stop()
    run.watch.set_phase("sum")
    # before any other collective, as ranks may have started these sums in their backward passes
    run.strategy.sum_gradients(run.parameters)
    # filled on the device, so that the host does not wait; each rank writes its busy seconds at its own index
    stop = torch.full_like(loss_sum, float(run.stop.requested))
    busy_s = torch.zeros(run.rank.world if run.rank.world > 1 else 0, dtype=loss_sum.dtype, device=loss_sum.device)
    busy_s[run.rank.index : run.rank.index + 1] = run.busy.seconds()
    totals = run.strategy.sum_values(torch.cat([torch.stack([loss_sum, num_correct, stop]), busy_s]))
    return apply_update(run, step, totals)


def accumulate_gradients(run: Run, step: StepPlan) -> tuple[Tensor, Tensor]:
    """Run this rank's micro-batches; return the summed loss and the number of correct label tokens, 0-d fp64.

    On out-of-memory, gradients are dropped and the same samples are run again in smaller micro-batches, with the same
    divisor. Raises ResourceError if they cannot get smaller, and under sharded strategies, whose other ranks could not
    run this one's extra passes.
    """
    while True:
        micro_batches = within_cap(run, step)
        sums = _backward_each(run, step, micro_batches)
        if not isinstance(sums, MicroBatch):
            return sums
        # called here because no frame of the failed pass holds tensors any more
        lower_cap(run, step, micro_batches, failed=sums)


def _backward_each(run: Run, step: StepPlan, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor] | MicroBatch:
    """Return the sums over all micro-batches, or the micro-batch that did not fit in memory."""
    run.fused_lora.refresh()
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    num_correct = torch.zeros((), dtype=torch.float64, device=run.device)
    index = 0
    try:
        for index, batch in enumerate(run.feed.batches(micro_batches)):
            # in lockstep every rank must run every pass, or the others would hang
            if run.stop.requested and not run.plan.layout.lockstep:
                break
            seed_micro_batch(run.config.seed, step=step.index, rank=run.rank.index, micro_batch=index)
            with run.strategy.accumulate(last=index == len(micro_batches) - 1), foreach_accumulate(run.optimizer):
                with autocast(run):
                    batch_loss, batch_correct = run.loss(batch)
                # the plan fixes this divisor before step 0, so ranks need no collective for it
                run.scaler.scale(batch_loss / step.num_label_tokens).backward()
            loss_sum += batch_loss.detach()
            num_correct += batch_correct
    except torch.OutOfMemoryError:
        return micro_batches[index]
    return loss_sum, num_correct


def apply_update(run: Run, step: StepPlan, totals: Tensor) -> Pending:
    """End a step: update the weights unless a total is not finite or a stop was requested.

    `totals` (3 or 3 + ranks,) are sums over ranks: loss, correct tokens, stop requests, and each rank's busy seconds.
    An optimizer that supports `found_inf` decides on the device, and the host reads the totals later. For any other
    optimizer, and for fp16 loss scaling, the host reads them first.
    """
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.grad_norm(run.parameters)
    totals = torch.cat([totals, norm.to(totals.dtype)[None]])
    lr = next_lr(run)
    if _host_decides(run):
        outcome = _read_totals(run, step, lr, totals.tolist())
        if outcome is not None:
            _update(run, norm, lr)
        return lambda: outcome

    set_found_inf(run.optimizer, ~totals.isfinite().all() | (totals[2] > 0))
    _update(run, norm, lr)
    run.in_flight.num_updates += 1
    read, ended = copy_to_host_async(totals)

    def wait() -> StepOutcome | None:
        run.in_flight.num_updates -= 1
        return _read_totals(run, step, lr, read(), ended)

    return wait


def next_lr(run: Run) -> float:
    """Return the learning rate of the next update."""
    # updates in flight count as done: a non-finite one ends the run anyway
    num_updates = run.progress.num_updates + run.in_flight.num_updates
    return learning_rate(run.config.optim, run.config.schedule, num_updates, run.plan.num_steps)


def _host_decides(run: Run) -> bool:
    return run.scaler.is_enabled() or not supports_found_inf(run.optimizer)


def _update(run: Run, norm: Tensor, lr: float) -> None:
    """Clip to `optim.max_grad_norm` and step."""
    set_lr(run.optimizer, lr)
    run.saver.before_update()
    with record_function("flatout::optimizer"):
        if run.config.optim.max_grad_norm is not None and (grads := local_grads(run.parameters)):
            # as torch.nn.utils.clip_grads_with_norm_, on this rank's shards
            factor = (run.config.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        # a disabled scaler just calls optimizer.step(); with fp16 an overflow skips the step and halves the scale
        run.scaler.step(run.optimizer)
    run.scaler.update()


def _read_totals(
    run: Run, step: StepPlan, lr: float, totals: list[float], ended: torch.cuda.Event | float | None = None
) -> StepOutcome | None:
    """Return the step's outcome from its totals on the host; None after a stop. Raises NumericError."""
    loss_total, correct_total, num_stopping, *busy_s, grad_norm = totals
    if num_stopping:
        # some ranks left out micro-batches: the whole step is repeated after resuming
        run.optimizer.zero_grad(set_to_none=True)
        clear_found_inf(run.optimizer)
        return None
    loss = loss_total / step.num_label_tokens
    skipped = None
    if run.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(grad_norm):
        skipped, grad_norm = "fp16 overflow", 0.0
    elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
        if not _host_decides(run):
            # a later step may have overwritten the gradients; the weights have not changed, so recompute them
            run.optimizer.zero_grad(set_to_none=True)
            accumulate_gradients(run, step)
            run.strategy.sum_gradients(run.parameters)
        check_finite(run, step, loss, grad_norm)
    accuracy = correct_total / step.num_label_tokens
    return StepOutcome(loss, accuracy, grad_norm, lr, skipped, tuple(busy_s), ended)


def check_finite(run: Run, step: StepPlan, loss: float, grad_norm: float) -> None:
    """Raise NumericError, naming the step, its samples and the bad parameter, unless loss and norm are finite."""
    require_finite(
        loss,
        grad_norm,
        step=step.index + 1,
        sample_ids=step.sample_ids,
        named=run.named_parameters,
        origin_of=run.feed.origin,
        dump=run.folder / "non_finite.json",
    )


def autocast(run: Run) -> AbstractContextManager[object]:
    """Return the autocast context of a forward pass: fp32 master weights compute in the run's dtype.

    Frozen base weights are already stored in that dtype.
    """
    return torch.autocast(run.device.type, dtype=run.dtype) if run.autocast else nullcontext()
