"""One optimizer step, exactly: sums over micro-batches and ranks, over the step's normalizer, known from the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from flatout.errors import Fix, NumericError
from flatout.models.auxiliary_loss import StepFacts
from flatout.models.embedding_noise import noisy_embeddings
from flatout.models.model_with_loss import observe_layers
from flatout.models.packed import PackedBatch
from flatout.optim.flat import foreach_accumulate
from flatout.optim.lr_schedule import lr_factor
from flatout.optim.update import (
    BackwardUpdate,
    clear_found_inf,
    divide_in_update,
    set_found_inf,
    set_lr,
    supports_found_inf,
)
from flatout.parallel.shards import local_part
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.passes import (
    add_values,
    autocast,
    compute_step_estimates,
    no_values,
    run_with_oom_retry,
    until_stopped_in_step,
)
from flatout.trainer.rank_meter import HostTotals, RankFigures, StepTotals
from flatout.trainer.state import TrainingRun
from flatout.trainer.step_guards import SKIPPED_SPIKE, guard_spike, require_finite


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step."""

    loss: float | None
    """The mean over the step, divided by its normalizer; None, as norm and rate, if there was nothing to learn."""
    metrics: Mapping[str, float]
    """The objective's other means, by name."""
    grad_norm: float | None
    """The global L2 norm before clipping."""
    lr: float | None
    skipped: str | None = None
    """Why no update was made; None: it was."""
    rank_figures: tuple[RankFigures, ...] = field(default=(), compare=False)
    """What each rank measured, in the order of ranks."""
    ended: torch.cuda.Event | float | None = field(default=None, compare=False)
    """The end on the device of a step that the host did not wait for."""
    aux_loss_sums: tuple[float, ...] = ()
    """`AuxiliaryLoss.sums` over ranks."""


# waits for a step's outcome; None when a stop was requested before the update, which was then skipped
Pending = Callable[[], StepOutcome | None]


def step_launcher(run: TrainingRun) -> Callable[[StepPlan], Pending]:
    """Return what launches this run's steps: it updates after all gradients, or each weight in the backward pass."""
    if run.config.full.update == "backward":
        return partial(launch_backward_update, run, BackwardUpdate(run.optimizer, run.parameters))
    return partial(launch_step, run)


def launch_step(run: TrainingRun, step: StepPlan) -> Pending:
    """Start a step, without waiting for it if the optimizer can skip a bad update on the device.

    At most one later step may be launched before calling the returned function. It waits for the step's outcome:
    None when a stop was requested before the update, NumericError when the loss or the gradient is not finite. In
    both cases no launched step has changed any weight.
    """
    run.optimizer.zero_grad(set_to_none=True)
    if run.planned.normalizers.loss_normalizer(step) == 0:
        return skip_step(run)
    run.rank_meter.start_step(run.loader.wait_s)
    values = accumulate_gradients(run, step)
    figures = run.rank_meter.figures(run.loader.wait_s)
    run.watch.set_phase("sum")
    with run.rank_meter.phase("gradient_sum"):
        # before any other collective, as ranks may have started these sums in their backward passes
        run.strategy.sum_gradients(run.parameters)
    return apply_update(run, step, sum_totals(run, figures, values, run.aux_loss.sums), figures)


def sum_totals(run: TrainingRun, figures: RankFigures, values: Tensor, aux_loss_sums: Tensor) -> StepTotals:
    """Return a step's totals over ranks; collective."""
    sums, maxima = values.tensor_split([len(run.planned.objective.sum_names)])
    mine = StepTotals.of_rank(
        run.rank, figures, stops=run.stop.requested, sums=sums, maxima=maxima, aux_loss_sums=aux_loss_sums
    )
    return mine.over_ranks(run.rank, run.strategy.sum_values)


def skip_step(run: TrainingRun) -> Pending:
    """Skip a step without label tokens, which all ranks do alike; its outcome has the ranks' figures alone."""
    run.rank_meter.start_step(run.loader.wait_s)
    figures = run.rank_meter.figures(run.loader.wait_s)
    nothing = torch.zeros(0, dtype=torch.float64, device=run.device)
    totals = sum_totals(run, figures, nothing, nothing)

    def wait() -> StepOutcome | None:
        read = totals.read()
        if read.num_stopping:
            discard_step(run)
            return None
        return StepOutcome(None, {}, None, None, run.plan.why_empty, read.rank_figures or (figures,))

    return wait


def discard_step(run: TrainingRun) -> None:
    """Drop what a step of which some rank left out passes has computed: it is repeated after resuming."""
    run.optimizer.zero_grad(set_to_none=True)
    clear_found_inf(run.optimizer)


def accumulate_gradients(run: TrainingRun, step: StepPlan) -> Tensor:
    """Run this rank's micro-batches as `run_with_oom_retry`; return the objective's values as `no_values` has them."""
    run_passes = partial(_backward_micro_batches, run, step, compute_step_estimates(run, step))
    return run_with_oom_retry(run, run.plan, step, run.loader, "training", run_passes)


def _backward_micro_batches(
    run: TrainingRun,
    step: StepPlan,
    estimates: Mapping[str, Tensor],
    micro_batches: Sequence[MicroBatch],
    batches: Iterator[PackedBatch],
) -> Tensor:
    run.fused_lora.refresh()
    normalizer = run.planned.normalizers.loss_normalizer(step)
    values = no_values(run)
    start_aux_loss(run, step, micro_batches)
    for index, batch in enumerate(until_stopped_in_step(run, batches)):
        with run.strategy.accumulate(last=index == len(micro_batches) - 1), foreach_accumulate(run.optimizer):
            with run.rank_meter.phase("forward", num_tokens=batch.num_tokens):
                pass_values = forward_pass(run, step, micro_batches, index, batch, None, estimates)
            with run.rank_meter.phase("backward"):
                # the plan fixes this normalizer before step 0, so ranks need no collective for it
                loss = run.scaler.scale(pass_values[0] / normalizer)
                loss.backward()
        add_values(run, values, pass_values)
    return values


def forward_pass(
    run: TrainingRun, step: StepPlan, micro_batches: Sequence[MicroBatch], index: int, batch: PackedBatch, *how: Any
) -> tuple[Tensor, ...]:
    """Call `ModelWithLoss` with a step's micro-batch `index` and `how`, with the dropout and noise that it has."""
    seed, alpha = run.config.seed, run.config.model.neftune_alpha
    seed_micro_batch(seed, step=step.index, rank=run.rank.index, micro_batch=index)
    ids = micro_batches[index].sample_ids
    with autocast(run), noisy_embeddings(run.model, batch, ids, alpha=alpha, seed=(seed, step.index)):
        sums: tuple[Tensor, ...] = run.loss_module(batch, *how)
    return sums


def start_aux_loss(run: TrainingRun, step: StepPlan, micro_batches: Sequence[MicroBatch]) -> None:
    """Start a step of the run's auxiliary loss, with passes without gradients if it needs them."""
    normalizer = run.planned.normalizers.loss_normalizer(step)
    run.aux_loss.start_step(StepFacts(step.index, step.num_tokens, normalizer, run.device, run.strategy.sum_values))
    if not run.aux_loss.needs_passes(len(micro_batches)):
        return
    for index, batch in enumerate(until_stopped_in_step(run, run.loader.batches(micro_batches))):
        with torch.no_grad():
            forward_pass(run, step, micro_batches, index, batch, observe_layers)
    run.aux_loss.end_passes()


def apply_update(run: TrainingRun, step: StepPlan, totals: StepTotals, figures: RankFigures) -> Pending:
    """End a step: update the weights unless a total is not finite or a stop was requested.

    `totals` are sums over ranks, `figures` this rank's. An optimizer that supports `found_inf` decides on the device,
    and the host reads the totals later. For any other optimizer, fp16 loss scaling, and `faults.spike: skip` or `stop`,
    the host reads them first.
    """
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.grad_norm(run.parameters)
    totals = totals._replace(grad_norm=norm.to(torch.float64)[None])
    lr = next_lr(run)
    loss_decides = run.config.faults.spike in ("skip", "stop")
    if run.scaler.is_enabled() or loss_decides or not supports_found_inf(run.optimizer):
        outcome = outcome_of(run, step, lr, totals.read(), figures)
        if outcome is not None and outcome.skipped == SKIPPED_SPIKE:
            run.scaler.update()
        elif outcome is not None:
            _update(run, norm, lr)
            if not outcome.skipped:
                run.aux_loss.after_update(totals.aux_loss_sums)
        return lambda: outcome

    skip = set_found_inf(run.optimizer, totals.is_unusable())
    _update(run, norm, lr)
    run.aux_loss.after_update(totals.aux_loss_sums, skip)
    run.state.num_in_flight += 1
    read, ended = totals.read_later()

    def wait() -> StepOutcome | None:
        run.state.num_in_flight -= 1
        return outcome_of(run, step, lr, read(), figures, ended)

    return wait


def next_lr(run: TrainingRun) -> float:
    """Return the learning rate of the next update."""
    # updates in flight count as done: a non-finite one ends the run anyway
    num_updates = run.progress.num_updates + run.state.num_in_flight
    return run.config.optim.lr * lr_factor(run.config.schedule, num_updates, run.plan.num_steps)


def _update(run: TrainingRun, norm: Tensor, lr: float) -> None:
    """Clip to `optim.max_grad_norm` and step."""
    set_lr(run.optimizer, lr)
    with run.rank_meter.phase("checkpoint_wait"):
        run.saver.before_update()
    with record_function("flatout::optimizer"), run.rank_meter.phase("optimizer"):
        grads = [local_part(parameter.grad) for parameter in run.parameters if parameter.grad is not None]
        if run.config.optim.max_grad_norm is not None and grads:
            # as torch.nn.utils.clip_grads_with_norm_, on this rank's shards
            factor = (run.config.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].device)
            # GradScaler sets the optimizer's grad_scale itself
            if run.scaler.is_enabled() or not divide_in_update(run.optimizer, factor.reciprocal().float()):
                torch._foreach_mul_(grads, factor)
        # a disabled scaler just calls optimizer.step(); with fp16 an overflow skips the step and halves the scale
        run.scaler.step(run.optimizer)
    run.scaler.update()


def outcome_of(
    run: TrainingRun,
    step: StepPlan,
    lr: float,
    totals: HostTotals,
    figures: RankFigures,
    ended: torch.cuda.Event | float | None = None,
) -> StepOutcome | None:
    """Decide from a step's totals what came of it: None if it is to be repeated after a stop.

    `ended` is the end of a step that the host did not wait for. Raises NumericError as `launch_step`.
    """
    if totals.num_stopping:
        discard_step(run)
        return None
    (loss, metrics), grad_norm = run.planned.normalizers.means(totals.values, step), totals.grad_norm
    skipped = None
    if run.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(grad_norm):
        skipped, grad_norm = "fp16 overflow", 0.0
    elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
        if ended is not None:
            # a later step may have overwritten the gradients; the weights have not changed, so recompute them
            run.optimizer.zero_grad(set_to_none=True)
            accumulate_gradients(run, step)
            run.strategy.sum_gradients(run.parameters)
        require_finite(run, step, loss, grad_norm)
    else:
        skipped = guard_spike(run, step, loss)
    rank_figures = totals.rank_figures or (figures,)
    return StepOutcome(loss, metrics, grad_norm, lr, skipped, rank_figures, ended, totals.aux_loss_sums)


def seed_micro_batch(seed: int, *, step: int, rank: int, micro_batch: int) -> None:
    """Seed torch for one micro-batch's dropout: the same after a resume, so no generator state has to be saved."""
    state = np.random.SeedSequence([seed, step, rank, micro_batch]).generate_state(2)
    torch.manual_seed(int(state[0]) << 32 | int(state[1]))


def launch_backward_update(run: TrainingRun, update: BackwardUpdate, step: StepPlan) -> Pending:
    """Run a step with `full.update: backward`: a forward pass, and a backward pass that updates.

    The step is one micro-batch of one process (`check_backward_update`). The host waits for the loss before the
    backward pass, so a loss that is not finite stops the run before any update. A gradient that is not finite is only
    found after the updates: NumericError then says to resume from the newest checkpoint.
    """
    if run.planned.normalizers.loss_normalizer(step) == 0:
        return skip_step(run)
    run.rank_meter.start_step(run.loader.wait_s)
    run_passes = partial(_update_in_backward, update, run, step, compute_step_estimates(run, step))
    outcome = run_with_oom_retry(run, run.plan, step, run.loader, "training", run_passes)
    return lambda: outcome


def _update_in_backward(
    update: BackwardUpdate,
    run: TrainingRun,
    step: StepPlan,
    estimates: Mapping[str, Tensor],
    micro_batches: Sequence[MicroBatch],
    batches: Iterator[PackedBatch],
) -> StepOutcome | None:
    (batch,) = batches
    start_aux_loss(run, step, micro_batches)
    with run.rank_meter.phase("forward", num_tokens=batch.num_tokens):
        pass_sums = forward_pass(run, step, micro_batches, 0, batch, None, estimates)
    sums = torch.stack([value.detach().double() for value in pass_sums]).tolist()
    if run.stop.requested:
        # passes of the estimates or the auxiliary loss may have been left out
        return None
    (loss, metrics), lr = run.planned.normalizers.means(sums, step), next_lr(run)
    require_finite(run, step, loss, None)
    if skipped := guard_spike(run, step, loss):
        return StepOutcome(loss, metrics, 0.0, lr, skipped, (run.rank_meter.figures(run.loader.wait_s),))
    update.start(lr)
    # weights change inside the backward pass
    with run.rank_meter.phase("checkpoint_wait"):
        run.saver.before_update()
    with run.rank_meter.phase("backward"):
        (pass_sums[0] / run.planned.normalizers.loss_normalizer(step)).backward()
    grad_norm = update.finish().item()
    if not math.isfinite(grad_norm):
        raise NumericError(
            f"step {step.index + 1}: gradient norm {grad_norm}, found after the update (full.update: backward); resume "
            "with a lower optim.lr",
            [Fix({"full.update": "step"}, "checks before it updates")],
        )
    aux_loss_sums = run.aux_loss.sums
    run.aux_loss.after_update(aux_loss_sums)
    figures = (run.rank_meter.figures(run.loader.wait_s),)
    return StepOutcome(loss, metrics, grad_norm, lr, rank_figures=figures, aux_loss_sums=tuple(aux_loss_sums.tolist()))
