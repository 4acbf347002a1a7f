"""The training loop: steps, evaluations and saves."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flatout.models.compile.layers import report_compilations
from flatout.planner.steps.step_plan import StepPlan
from flatout.trainer.evaluate import evaluate_now
from flatout.trainer.metrics import Meter, is_due
from flatout.trainer.passes import PassesStopped
from flatout.trainer.resume import take_snapshot
from flatout.trainer.rounds import rounds_of
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import Pending, step_launcher
from flatout.trainer.step_guards import require_own_answers, tell_divergence

# on a CPU, an evaluation with more FLOPs (some 20 s on 2 cores) first comes after so many steps
LONG_EVAL_FLOPS, LATE_STEPS = 5e12, 10


def run_steps(run: TrainingRun) -> None:
    """Run the plan's remaining steps, of each round once it is sampled; evaluate and save when due.

    Compilations during training are logged as events. Raises PassesStopped when a stop was requested, which leaves the
    completed steps to be saved, and NumericError if a loss or gradient is not finite (`full.update: backward` finds the
    latter after its updates).
    """

    def on_compiled(seconds: float) -> None:
        run.reporter.event("compiled", {"step": run.progress.step + 1, "seconds": round(seconds, 1)})

    with gc_frozen(run.device), report_compilations(on_compiled):
        meter = Meter(run)
        for round_run in rounds_of(run):
            meter.start_round(round_run)
            take_steps(round_run, meter)


def take_steps(run: TrainingRun, meter: Meter) -> None:
    """Run the remaining steps of a round, or of a run on a data set."""
    evaluate_before_steps(run)
    launch = step_launcher(run)
    launched: deque[tuple[StepPlan, Pending]] = deque()
    meter.start_step()
    for step in run.loader.prefetching(run.plan.steps(start=run.progress.step), run.data_parallel_rank):
        if run.progress.stopped_early:
            break
        run.watch.set_phase("step", step.index)
        launched.append((step, launch(step)))
        # `finish` evaluates and saves after the last step
        completed, is_last = step.index + 1, step.index + 1 == run.plan.num_steps
        evaluates = not is_last and evaluates_after(run, completed)
        saves = not is_last and is_due(completed, run.config.checkpoint.every_steps, run.plan.num_steps)
        # read a step's outcome only after launching the next one, so that the device never waits for the host
        num_pending = 0 if is_last or evaluates or saves or not run.state.num_in_flight else 1
        while len(launched) > num_pending:
            finish_step(run, meter, *launched.popleft())
        if not launched:
            is_best = evaluates and evaluate_now(run)
            if is_best or saves:
                save(run, best=is_best)
            meter.start_step()
    while launched:  # the last step of a round, unless it is the run's
        finish_step(run, meter, *launched.popleft())


def evaluate_before_steps(run: TrainingRun) -> None:
    """Evaluate the weights of a new run, or those of a checkpoint whose evaluation a stop request cut short."""
    step = run.progress.step
    is_whole = run.progress.last_eval_step == step or step == run.plan.num_steps
    if not is_whole and evaluates_after(run, step):
        is_best = evaluate_now(run)
        if is_best and step > 0:
            save(run, best=True)


def evaluates_after(run: TrainingRun, step: int) -> bool:
    """Whether an evaluation follows a step that is not the last; a long one on a CPU waits for LATE_STEPS."""
    flops = 2 * run.planned.shape.num_params * sum(one.step.num_tokens for one in run.eval_sets)
    first = LATE_STEPS if run.device.type == "cpu" and flops > LONG_EVAL_FLOPS else 0
    if step == 0 < first:
        run.reporter.stage("eval", f"first after step {first}, or at the end: it takes long on a CPU")
    is_first = step == first and run.progress.last_eval_step is None
    return is_first or (step > 0 and is_due(step, run.config.eval.every_steps, run.plan.num_steps))


@contextmanager
def gc_frozen(device: torch.device) -> Iterator[None]:
    """Keep Python's garbage collector from scanning objects made during start-up.

    It would scan them again and again, on each rank at a different time: 0.2 s on a CPU, more with compiled layers.
    """
    if device.type == "cuda":
        gc.collect()  # garbage from start-up may hold GPU memory
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def finish_step(run: TrainingRun, meter: Meter, step: StepPlan, pending: Pending) -> None:
    """Wait for a launched step and count it. Raises PassesStopped and NumericError."""
    outcome = pending()
    run.reporter.stepped()
    if outcome is None:
        raise PassesStopped
    run.progress.advance(step, updated=outcome.skipped is None, num_naive_tokens=run.plan.naive_tokens(step))
    if outcome.skipped:
        run.reporter.event("skipped", {"step": step.index + 1, "why": outcome.skipped})
    require_own_answers(run, step, outcome.metrics)
    tell_divergence(run, step, outcome.loss)
    meter.end_step(step, outcome)


def save(run: TrainingRun, *, best: bool = False, required: bool = False) -> None:
    """Write a checkpoint of the completed steps; every rank writes its shard. Waits for it if `required`.

    A full disk raises ResourceError only for a `required` save. Otherwise it is reported, older checkpoints are kept,
    and the next save that is due tries again.
    """
    run.watch.set_phase("save", run.progress.step)
    run.saver.save(take_snapshot(run), best=best, required=required)
