"""The training loop."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flatout.errors import PreemptedError
from flatout.models.compile.layers import report_compilations
from flatout.plan.schedule.steps import StepPlan
from flatout.train.evaluate import evaluate_now
from flatout.train.memory_guard import PeakMemoryReporter
from flatout.train.metrics import Meter
from flatout.train.snapshot import take_snapshot
from flatout.train.state import Run
from flatout.train.step import Pending
from flatout.train.step_backward import choose_step


def run_steps(run: Run) -> None:
    """Run the plan's remaining steps; evaluate and save when due.

    Compilations during training are logged as events. Raises PreemptedError after saving when a stop was requested,
    and NumericError if a loss or gradient is not finite (`full.update: backward` finds the latter after its updates).
    """

    def on_compiled(seconds: float) -> None:
        run.tracker.event("compiled", {"step": run.progress.step + 1, "seconds": round(seconds, 1)})

    with start_up_set_aside(run.device), report_compilations(on_compiled):
        meter, memory = Meter(run), PeakMemoryReporter(run)
        if run.progress.step == 0:
            evaluate_now(run)
        launch = choose_step(run)
        launched: deque[tuple[StepPlan, Pending]] = deque()
        meter.start_step()
        for step in run.feed.prefetching(run.plan.steps(start=run.progress.step), run.rank.index):
            if run.progress.stopped_early:
                break
            run.watch.set_phase("step", step.index)
            launched.append((step, launch(run, step)))
            # read a step's outcome only after launching the next one, so that the device never waits for the host
            num_pending = 1 if run.in_flight.num_updates and not is_boundary(run, step) else 0
            while len(launched) > num_pending:
                finish_step(run, meter, memory, *launched.popleft())
            if not launched:
                is_best = is_due(run, step, run.config.eval.every_steps) and evaluate_now(run)
                if is_best or is_due(run, step, run.config.checkpoint.every_steps):
                    save(run, best=is_best)
                meter.start_step()


@contextmanager
def start_up_set_aside(device: torch.device) -> Iterator[None]:
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


def finish_step(run: Run, meter: Meter, memory: PeakMemoryReporter, step: StepPlan, pending: Pending) -> None:
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


def is_boundary(run: Run, step: StepPlan) -> bool:
    """Whether nothing may be in flight after a step: before an evaluation, a save, or the end."""
    due = (is_due(run, step, every) for every in (run.config.eval.every_steps, run.config.checkpoint.every_steps))
    return step.index + 1 == run.plan.num_steps or any(due)


def is_due(run: Run, step: StepPlan, every_steps: int | None) -> bool:
    """Whether this step completes another `every_steps`; never for the last step, which `finish` handles."""
    completed = step.index + 1
    return every_steps is not None and completed % every_steps == 0 and completed != run.plan.num_steps


def save(run: Run, *, best: bool = False, required: bool = False) -> None:
    """Write a checkpoint of the completed steps; every rank writes its shard. Waits for it if `required`.

    A full disk raises ResourceError only for a `required` save. Otherwise it is reported, older checkpoints are kept,
    and the next save that is due tries again.
    """
    run.watch.set_phase("save", run.progress.step)
    run.saver.save(take_snapshot(run), best=best, required=required)
