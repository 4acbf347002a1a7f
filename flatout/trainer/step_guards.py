"""What keeps a bad step out of the weights: a loss or gradient that is not finite, and a loss far above the usual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout.config.objective import ADVANTAGE, OBJECTIVES
from flatout.errors import Fix, NumericError, ResourceError
from flatout.io.durable_io import DurableIO
from flatout.parallel.shards import local_part
from flatout.planner.steps.step_plan import StepPlan
from flatout.trainer.run_data import lr_note
from flatout.trainer.state import LossHistory, TrainingRun

MAX_NAMED_SAMPLES = 8
# steps after which losses are judged, and over which their mean and variance reach back
LEAST_LOSSES, WINDOW = 32, 128
# the least deviation, as a share of the mean, so that a flat loss has some room
LEAST_DEVIATION = 0.01
SKIPPED_SPIKE = "loss spike"
# a cross-entropy has diverged near that of a uniform guess, if it was far below at first; another loss at so many times
# its first value
NEAR_GUESS, DIVERGED_TIMES = 0.95, 10.0


def require_own_answers(run: TrainingRun, step: StepPlan, metrics: Mapping[str, float]) -> None:
    """Raise NumericError if the first step of a round finds its answers too unlikely: others' weights sampled them.

    The k3 estimate of the divergence, per token, is 1e-12 in fp32, 1e-3 in bf16, and above 1 for the answers of another
    model.
    """
    rollout, mismatch = run.config.rollout, metrics.get("mismatch/k3", 0.0)
    if rollout.rounds is None or step.index % rollout.steps or mismatch <= rollout.max_mismatch:
        return
    raise NumericError(
        f"step {step.index + 1}: the weights find the answers of round {step.index // rollout.steps + 1} unlikely "
        f"(mismatch/k3 {mismatch:.2g}, rollout.max_mismatch {rollout.max_mismatch:g}): the sampler had other weights, "
        "or computes otherwise",
        [Fix({"model.precision": "fp32"}, "if only rounding differs")],
    )


def require_finite(run: TrainingRun, step: StepPlan, loss: float, grad_norm: float | None) -> None:
    """Raise NumericError unless the loss and the gradient's global norm are finite; call it before the update.

    `grad_norm` is None before the backward pass.

    The message names the step (counted from 1), the samples with their file and row, and this rank's first parameter
    with a non-finite gradient; all of it is also written to non_finite.json in the run folder.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm or 0.0):
        return
    grads = ((name, parameter.grad) for name, parameter in run.named_parameters.items())
    bad = next((name for name, grad in grads if grad is not None and not local_part(grad).isfinite().all()), None)
    origins = origins_of(run, step)
    shown = ", ".join(f"{sample_id} ({origins[sample_id]})" for sample_id in step.sample_ids[:MAX_NAMED_SAMPLES])
    num_more = len(step.sample_ids) - MAX_NAMED_SAMPLES
    facts = {
        "step": step.index + 1,
        "loss": str(loss),  # JSON has no NaN
        "grad_norm": None if grad_norm is None else str(grad_norm),
        "first_non_finite_gradient": bad,
        "samples": origins,
    }
    dump = run.config.folder / "non_finite.json"
    try:
        DurableIO().write_json(dump, facts)
        written = f"written to {dump}"
    except ResourceError as error:
        written = f"they could not be written: {error}"
    raise not_finite(
        run,
        f"step {step.index + 1}: loss {loss}{'' if grad_norm is None else f', gradient norm {grad_norm}'}"
        f"{f'; first non-finite gradient: {bad}' if bad else ''}; the weights were not updated; samples {shown}"
        f"{f' and {num_more} more' if num_more > 0 else ''}; {written}",
    )


def not_finite(run: TrainingRun, what: str) -> NumericError:
    """Return the error of a loss that is not finite, with what to do about it."""
    if note := lr_note(run.config, run.planned.objective, run.planned.shape.num_params):
        return NumericError(f"{what}; training diverged: {note}; lower it")
    return NumericError(f"{what}; check these rows, or lower optim.lr", [Fix({"model.precision": "fp32"})])


def tell_divergence(run: TrainingRun, step: StepPlan, loss: float | None) -> None:
    """Tell once that training diverged: a loss that is finite, but far above the first one.

    A person's own loss may start anywhere, such as at 0, and is not judged.
    """
    first = run.state.first_loss = loss if run.state.first_loss is None else run.state.first_loss
    objective, shape = run.planned.objective, run.planned.shape
    if run.state.has_diverged or run.config.objective.path or run.config.objective.kind not in OBJECTIVES:
        return
    # a policy's loss begins at about 0, and has either sign; a step without labels has none
    if first is None or loss is None or ADVANTAGE in objective.columns:
        return
    limit, than = DIVERGED_TIMES * abs(first), f"{DIVERGED_TIMES:g} times the first"
    if objective.reads == "labels" and objective.scope == "token":
        guess = math.log(shape.vocab_size)
        limit = max(2 * first, NEAR_GUESS * guess)
        than = f"what guessing any of the {shape.vocab_size:,} tokens costs ({guess:.2f})"
    if loss <= limit:
        return
    run.state.has_diverged = True
    lower = f"start over with a lower optim.lr than {run.config.optim.lr:g}"
    note = lr_note(run.config, objective, shape.num_params) or lower
    why = f"training diverged at step {step.index + 1}: loss {loss:.4f} after {first:.4f} at first, {than}; {note}"
    run.reporter.event("diverged", {"step": step.index + 1, "loss": loss, "first_loss": first, "why": why})


def origins_of(run: TrainingRun, step: StepPlan) -> dict[int, str]:
    """Return the file and row of each sample of a step."""
    return {sample_id: str(run.loader.store.origin(sample_id)) for sample_id in step.sample_ids}


def update_loss_history(history: LossHistory, loss: float, sigmas: float) -> tuple[LossHistory, float | None]:
    """Return the history with a step's loss added, and the limit that the loss exceeds; None if it is a usual one.

    Mean and variance are exponential over `WINDOW` steps. A loss above the limit counts as the limit: one outlier does
    not hide the next, and a level that stays becomes the usual one.
    """
    deviation = max(math.sqrt(history.variance), LEAST_DEVIATION * abs(history.mean))
    limit = history.mean + sigmas * deviation if history.count >= LEAST_LOSSES else math.inf
    weight = 1.0 / min(history.count + 1, WINDOW)
    delta = min(loss, limit) - history.mean
    variance = (1.0 - weight) * (history.variance + weight * delta * delta)
    added = LossHistory(history.count + 1, history.mean + weight * delta, variance)
    return added, limit if loss > limit else None


def guard_spike(run: TrainingRun, step: StepPlan, loss: float) -> str | None:
    """Judge a step's loss by `faults.spike`; return why its update is to be skipped, None if it is not.

    All ranks get the same loss, and so decide alike. A spike is an event, and the first rank writes the step's samples
    to spikes/step-N.json. Raises NumericError for `spike: stop`.
    """
    faults = run.config.faults
    if faults.spike == "off":
        return None
    usual = run.state.loss_history
    run.state.loss_history, limit = update_loss_history(usual, loss, faults.spike_sigmas)
    if limit is None:
        return None
    number = step.index + 1
    facts: dict[str, Any] = {"step": number, "loss": loss, "usual": round(usual.mean, 6), "limit": round(limit, 6)}
    path = run.config.folder / "spikes" / f"step-{number}.json"
    written = f"its samples are in {path}"
    if run.rank.is_first:
        try:
            DurableIO().make_dir(path.parent)
            DurableIO().write_json(path, {**facts, "action": faults.spike, "samples": origins_of(run, step)})
        except ResourceError as error:
            written = f"its samples could not be written: {error}"
    run.reporter.event("loss_spike", {**facts, "action": faults.spike, "samples": written})
    if faults.spike == "stop":
        raise NumericError(
            f"step {number}: loss {loss:.4f} is above {limit:.4f}, {faults.spike_sigmas:g} deviations over the usual "
            f"{usual.mean:.4f} (faults.spike: stop); the weights were not updated; {written}; check these rows or "
            "lower optim.lr",
            [Fix({"faults.spike": "skip", "checkpoint.allow_change": ["faults.spike"]}, "leaves such steps out")],
        )
    return SKIPPED_SPIKE if faults.spike == "skip" else None
