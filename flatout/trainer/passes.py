"""Passes without gradients, which a stop request ends at the next micro-batch: evaluations, answers, references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from flatout.models.packed import PackedBatch
from flatout.optim.update import copy_to_host_async
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.state import TrainingRun


class PassesStopped(Exception):  # noqa: N818  (a request, not an error)
    """A stop was requested, so some passes were left out on some rank; what they were for is to be repeated."""


@contextmanager
def inference(run: TrainingRun) -> Iterator[None]:
    """Run passes without gradients, dropout and compiled layers over the current weights."""
    trained = [module for module in run.model.modules() if module.training]
    run.model.eval()
    try:
        # graphs are specialized on train mode; compiling for eval mode would take longer than these passes
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run.fused_lora.refresh()
            yield
    finally:
        for module in trained:
            module.training = True


def other_kernels(run: TrainingRun) -> str | None:
    """Return why passes without dropout take other kernels than training; None if they take the same."""
    text = run.model.config.get_text_config().to_dict()
    if run.config.lora.dropout or any("drop" in name and value for name, value in text.items()):
        return "training has dropout"
    if run.planned.parallel_layout.lockstep:
        return "ranks share the weights"
    return "recompute is offload" if run.memory.recompute == "offload" else None


@contextmanager
def as_in_training(run: TrainingRun) -> Iterator[None]:
    """Run passes with the kernels of training, whose compiled layers differ without gradients, but without dropout."""
    if other_kernels(run) is not None:
        with inference(run):
            yield
    else:
        run.fused_lora.refresh()
        yield


def autocast(run: TrainingRun) -> AbstractContextManager[object]:
    """Let fp32 master weights compute in the run's dtype; frozen base weights are already stored in it."""
    return torch.autocast(run.device.type, dtype=run.dtype) if run.autocast else nullcontext()


def micro_batches_of(run: TrainingRun, plan: PlannedSamples, step: StepPlan) -> Sequence[MicroBatch]:
    """Return this rank's passes of a plan's step: those planned, or smaller ones after an out-of-memory error."""
    planned = step.ranks[run.data_rank]
    # in lockstep, all ranks take the planned passes together
    cap_tokens = None if run.shares_passes else run.state.micro_batch_cap
    if cap_tokens is None or all(batch.num_padded_tokens <= cap_tokens for batch in planned):
        return planned
    return plan.resplit(step, run.data_rank, max(cap_tokens, plan.largest_unit(planned)))


def until_stopped(run: TrainingRun, batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
    """Yield batches until a stop is requested; call `sum_unless_stopped` after the last pass.

    Ranks that share passes leave before the same one. They read what they agreed on one pass later, so that the device
    never waits for the host.
    """
    read: Callable[[], list[float]] | None = None
    for batch in batches:
        if run.shares_passes:
            if read is not None and any(read()):
                return
            requested = torch.tensor([float(run.stop.requested)], device=run.device)
            read, _ = copy_to_host_async(run.strategy.sum_over_sharers(requested))
        elif run.stop.requested:
            return
        yield batch


def sum_unless_stopped(run: TrainingRun, values: Tensor) -> Tensor:
    """Sum a tensor over ranks, as `Strategy.sum_values`. Raises PassesStopped on all if one was asked to stop."""
    stop = values.new_full((1,), run.stop.requested)
    *_, num_stopping = (sums := run.strategy.sum_values(torch.cat([values.flatten(), stop])))
    if num_stopping.item():
        raise PassesStopped
    return sums[:-1].reshape(values.shape)
