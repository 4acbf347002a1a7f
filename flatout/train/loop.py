"""The loop: one page that says what happens; the other files say how."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flatout.errors import PreemptedError
from flatout.models.compile import report_compilations
from flatout.plan.types import StepPlan
from flatout.track.record import EvalRecord
from flatout.train.memory import MemoryWatch
from flatout.train.metrics import Meter
from flatout.train.snapshot import take_snapshot
from flatout.train.state import Run
from flatout.train.step import Pending, evaluate
from flatout.train.step_backward import choose_step


def run_steps(run: Run) -> None:
    """Take the plan's remaining steps; evaluate and save when due.

    A layer that is compiled while steps run is told. Raises PreemptedError after saving when a stop was asked for,
    NumericError before a poisoned update.
    """

    def tell_compiled(seconds: float) -> None:
        run.tracker.event("compiled", {"step": run.progress.step + 1, "seconds": round(seconds, 1)})

    with start_up_set_aside(run.device), report_compilations(tell_compiled):
        _take_steps(run)


@contextmanager
def start_up_set_aside(device: torch.device) -> Iterator[None]:
    """Within it Python's collector does not look through what start-up made, again and again, on each rank at another
    time: 0.2 s on a CPU, more where layers are compiled."""
    if device.type == "cuda":
        gc.collect()  # for what start-up left may hold the GPU's memory
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _take_steps(run: Run) -> None:
    meter, memory = Meter(run), MemoryWatch(run)
    if run.progress.step == 0:
        evaluate_now(run)
    launch = choose_step(run)
    launched: deque[tuple[StepPlan, Pending]] = deque()
    meter.start_step()
    for step in run.feed.ahead(run.plan.steps(start=run.progress.step), run.rank.index):
        if run.progress.stopped_early:
            break
        run.watch.at("step", step.index)
        launched.append((step, launch(run, step)))
        # a step under way is finished once the next one is launched, so that the device never waits for the host
        num_under_way = 1 if run.num_in_flight and not is_border(run, step) else 0
        while len(launched) > num_under_way:
            finish_step(run, meter, memory, *launched.popleft())
        if not launched:
            is_best = is_due(run, step, run.config.eval.every_steps) and evaluate_now(run)
            if is_best or is_due(run, step, run.config.checkpoint.every_steps):
                save(run, best=is_best)
            meter.start_step()


def finish_step(run: Run, meter: Meter, memory: MemoryWatch, step: StepPlan, pending: Pending) -> None:
    """Wait for a launched step and count it. Raises PreemptedError after saving, and NumericError."""
    outcome = pending()
    if outcome is None:
        save(run, required=True)
        raise PreemptedError(f"asked to stop: saved {run.progress.step} steps; the same command goes on from there")
    run.progress.advance(step, updated=outcome.skipped is None, num_naive_tokens=run.plan.naive_tokens(step))
    if outcome.skipped:
        run.tracker.event("skipped", {"step": step.index + 1, "why": outcome.skipped})
    meter.end_step(step, outcome)
    memory.end_step(step)


def is_border(run: Run, step: StepPlan) -> bool:
    """True where the run must stand still after a step: to evaluate, to save, to end."""
    due = (is_due(run, step, every) for every in (run.config.eval.every_steps, run.config.checkpoint.every_steps))
    return step.index + 1 == run.plan.num_steps or any(due)


def is_due(run: Run, step: StepPlan, every_steps: int | None) -> bool:
    """True after every so many steps; the last step is the finish's business."""
    completed = step.index + 1
    return every_steps is not None and completed % every_steps == 0 and completed != run.plan.num_steps


def evaluate_now(run: Run) -> bool:
    """Evaluate, tell the tracker, decide to stop early; True for a new best. False without an evaluation set."""
    if run.eval_plan is None:
        return False
    started = time.perf_counter()
    run.watch.at("evaluate", run.progress.step)
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
    record = EvalRecord(progress.step, loss, accuracy, run.eval_plan.num_label_tokens, is_best, eval_s)
    run.tracker.record(record)
    patience = run.config.eval.patience
    if patience is not None and progress.num_evals_without_best >= patience:
        progress.stopped_early = True
        run.tracker.event("early_stop", {"step": progress.step, "best_step": progress.best_step})
    return is_best


def save(run: Run, *, best: bool = False, required: bool = False) -> None:
    """Write a checkpoint of the completed steps; every rank writes its part. A `required` one is waited for.

    A full disk stops only a `required` save, with ResourceError; otherwise it is told, older checkpoints stay as they
    are, and the next save that is due tries again.
    """
    run.watch.at("save", run.progress.step)
    run.saver.save(take_snapshot(run), best=best, required=required)
