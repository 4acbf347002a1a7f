"""Take passes: without gradients, until a stop is requested, and again in smaller micro-batches if memory runs out."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from operator import length_hint
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.errors import Fix, ResourceError
from flatout.models.model_with_loss import ModelWithLoss, sums_of
from flatout.models.packed import PackedBatch
from flatout.optim.update import copy_to_host_async
from flatout.parallel.strategies.protocol import oom_as_resource_error
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.planner.steps.training_plan import PlannedSamples
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.planned_run import EvalSet
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


def why_kernels_differ(run: TrainingRun) -> str | None:
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
    if why_kernels_differ(run) is not None:
        with inference(run):
            yield
    else:
        run.fused_lora.refresh()
        yield


def autocast(run: TrainingRun) -> AbstractContextManager[object]:
    """Let fp32 master weights compute in the run's dtype; frozen base weights are already stored in it."""
    return torch.autocast(run.device.type, dtype=run.dtype) if run.autocast else nullcontext()


During = Literal["training", "estimates", "reference", "evaluation"]
T = TypeVar("T")


def updates_in_pass(run: TrainingRun, during: During) -> bool:
    """Whether a step is one pass that updates weights (`full.update: backward`), so that no part of it is repeated."""
    return during == "training" and run.config.full.update == "backward"


def micro_batches_of(
    run: TrainingRun, plan: PlannedSamples, step: StepPlan, during: During = "training"
) -> Sequence[MicroBatch]:
    """Return this rank's passes of a plan's step: those planned, or smaller ones after an out-of-memory error."""
    planned = step.by_rank[run.data_parallel_rank]
    # in lockstep, all ranks take the planned passes together
    cap_tokens = None if run.shares_passes or updates_in_pass(run, during) else run.state.micro_batch_cap
    if cap_tokens is None or all(batch.num_padded_tokens <= cap_tokens for batch in planned):
        return planned
    return plan.resplit(step, run.data_parallel_rank, max(cap_tokens, plan.largest_unit(planned)))


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
            read, _ = copy_to_host_async(run.strategy.sum_over_pass_ranks(requested))
        elif run.stop.requested:
            return
        yield batch


def until_stopped_in_step(run: TrainingRun, batches: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
    """Yield batches of a training step until a stop is requested, which ranks tell each other after its passes.

    Where ranks share passes each must run all of them, or the others would hang.
    """
    return takewhile(lambda _: run.shares_passes or not run.stop.requested, batches)


def sum_unless_stopped(run: TrainingRun, values: Tensor) -> Tensor:
    """Sum a tensor over ranks, as `Strategy.sum_values`. Raises PassesStopped on all if one was asked to stop."""
    stop = values.new_full((1,), run.stop.requested)
    *_, num_stopping = (sums := run.strategy.sum_values(torch.cat([values.flatten(), stop])))
    if num_stopping.item():
        raise PassesStopped
    return sums[:-1].reshape(values.shape)


def no_values(run: TrainingRun) -> Tensor:
    """Return the objective's values over no micro-batch, fp64, by `Objective.value_names`: 0, and -inf for maxima."""
    objective = run.planned.objective
    values = torch.zeros(len(objective.value_names), dtype=torch.float64, device=run.device)
    values[len(objective.sum_names) :] = -math.inf
    return values


def add_values(run: TrainingRun, totals: Tensor, values: Sequence[Tensor]) -> None:
    """Add a micro-batch's values to the totals of `no_values`, in place."""
    num_sums = len(run.planned.objective.sum_names)
    for place, (total, value) in enumerate(zip(totals.unbind(), values, strict=True)):
        if place < num_sums:
            total += value.detach()
        else:
            torch.maximum(total, value.detach(), out=total)


def run_with_oom_retry(
    run: TrainingRun,
    plan: PlannedSamples,
    step: StepPlan,
    loader: BatchLoader,
    during: During,
    run_passes: Callable[[Sequence[MicroBatch], Iterator[PackedBatch]], T],
) -> T:
    """Call `run_passes` with this rank's passes of a step and their batches, in order; return what it returns.

    Out of memory, what it computed is dropped, and it is called again with the same samples: first without recorded
    graphs, if there are any, then in smaller micro-batches. So a normalizer of the whole step stays what it was. Raises
    ResourceError if they cannot get smaller, if a pass updates weights, and where other ranks take part in each pass,
    as they could not take this one's extra passes.
    """
    while True:
        passes = micro_batches_of(run, plan, step, during)
        remaining = iter(passes)
        try:
            with run.rank_meter.attempt(), oom_as_resource_error(run.rank) if run.shares_passes else nullcontext():
                return run_passes(passes, (batch for _, batch in zip(remaining, loader.batches(passes), strict=True)))
        except torch.OutOfMemoryError:
            failed = passes[max(0, len(passes) - length_hint(remaining) - 1)]
        # called here because no frame of the failed pass holds tensors any more
        make_room(run, plan, passes, failed=failed, step=step, during=during)


def make_room(
    run: TrainingRun,
    plan: PlannedSamples,
    taken: Sequence[MicroBatch],
    *,
    failed: MicroBatch,
    step: StepPlan,
    during: During,
) -> None:
    """After an out-of-memory error, drop gradients, free caches, and have the next passes need less memory.

    The sampler's slots go first, then recorded graphs, as no other pass can use their memory. Without any,
    micro-batches are capped at 2/3 of the failed one, on this rank only, for the rest of the run. Raises ResourceError
    if those `taken` could not get smaller.
    """
    run.optimizer.zero_grad(set_to_none=True)
    had_slots = run.state.sampler is not None and run.state.sampler.release()
    had_graphs = not had_slots and run.loss_module.decoder is not None
    if had_graphs:
        run.loss_module.decoder = None
    release_memory(run)
    in_step = during in ("training", "estimates")
    number = step.index + 1 if in_step else run.progress.step
    where = {"step": number, "during": during, "rank": run.rank.index}
    if had_slots or had_graphs:
        run.watch.event("slots_released" if had_slots else "graphs_dropped", where)
        return
    updates = updates_in_pass(run, during)
    smallest = failed.num_padded_tokens if updates else plan.largest_unit(taken)
    cap_tokens = max(failed.num_padded_tokens * 2 // 3, smallest)
    if cap_tokens >= max(batch.num_padded_tokens for batch in taken):
        why = "full.update=backward takes each step in one pass" if updates else "samples stay whole"
        less = "batch.samples_per_step or " if updates else ""
        fixes = [Fix({"recompute": "offload"})] if in_step else []
        if run.config.method == "lora":
            fixes.append(Fix({"base.storage": "nf4"}))
        elif run.config.optim.path is None and run.config.optim.traits.outgrows_8_bits:
            fixes.append(Fix({"optim.name": "adamw8bit"}))
        raise ResourceError(
            f"step {number}{'' if during == 'training' else f', {during}'}: out of GPU memory with a micro-batch of "
            f"{failed.num_padded_tokens:,} tokens, which cannot be split as {why}; lower {less}data.max_tokens",
            fixes,
        )
    run.state.micro_batch_cap = cap_tokens
    run.watch.event("out_of_memory", {**where, "tokens": failed.num_padded_tokens, "cap_tokens": cap_tokens})


def release_memory(run: TrainingRun) -> None:
    """Free what a failed pass left, once no frame of it holds tensors any more."""
    run.fused_lora.forget()
    free_memory(run.device)


def free_memory(device: torch.device) -> None:
    """Return to the device the memory of tensors that no frame holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def compute_step_estimates(run: TrainingRun, step: StepPlan) -> Mapping[str, Tensor]:
    """Return what the objective estimates over a step by name, without gradients and dropout; collective.

    The means are over all samples of the step, on all ranks and in all micro-batches; empty without KL pairs.
    """
    if (kl_pairs := run.planned.kl_pairs) is None:
        return {}
    plan, loader = kl_pairs.plan, run.loader_of(kl_pairs)
    steps = [plan.step(index) for index in range(step.index, min(step.index + 2, plan.num_steps))]
    kl_step = next(iter(loader.prefetching(steps, run.data_parallel_rank)))
    with as_in_training(run):
        return _mean_estimates(run, plan, kl_step, loader, is_evaluation=False)


def compute_eval_estimates(run: TrainingRun, eval_set: EvalSet) -> Mapping[str, Tensor]:
    """Return what the objective estimates over an evaluation set; collective."""
    if (kl_pairs := eval_set.kl_pairs) is None:
        return {}
    return _mean_estimates(run, kl_pairs.plan, kl_pairs.step, run.loader_of(kl_pairs), is_evaluation=True)


def _estimate_sums(loss: ModelWithLoss, batch: PackedBatch) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in sums_of(loss.objective, loss.label_tokens(batch), estimates=True))


def _mean_estimates(
    run: TrainingRun, plan: PlannedSamples, step: StepPlan, loader: BatchLoader, *, is_evaluation: bool
) -> Mapping[str, Tensor]:
    names = run.planned.objective.estimates

    def run_passes(passes: Sequence[MicroBatch], batches: Iterator[PackedBatch]) -> Tensor:
        sums = torch.zeros(len(names), dtype=torch.float64, device=run.device)
        remaining = (until_stopped if is_evaluation else until_stopped_in_step)(run, batches)
        num_tokens = sum(micro_batch.num_padded_tokens for micro_batch in passes)
        with nullcontext() if is_evaluation else run.rank_meter.phase("forward", num_tokens=num_tokens):
            for batch in remaining:
                with autocast(run):
                    sums += torch.stack(run.loss_module(batch, _estimate_sums)).double()
        return sums

    sums = run_with_oom_retry(run, plan, step, loader, "evaluation" if is_evaluation else "estimates", run_passes)
    means = run.strategy.sum_values(sums) / len(step.sample_ids)
    return dict(zip(names, means.unbind(), strict=True))


def compute_logprobs(
    run: TrainingRun,
    loader: BatchLoader,
    plan: PlannedSamples,
    step: StepPlan,
    sample_ids: Sequence[int],
    *,
    per: Literal["token", "sample"] = "sample",
    temperature: float = 1.0,
) -> NDArray[np.float64]:
    """Return the log-probability of each sample's label tokens in softmax(logits / temperature), in `sample_ids` order.

    Per sample it is their sum; per token there is a value for each token, 0 without a label. Collective. `sample_ids`
    are all samples of the step. Call it within `inference` or `as_in_training`, which choose the kernels, with the
    weights in the model whose log-probabilities are wanted.
    """
    per_sample = [np.array([place]) for place in range(len(sample_ids))]
    places = dict(zip(sample_ids, loader.store.label_places(sample_ids) if per == "token" else per_sample, strict=True))
    count = int(loader.store.lengths[list(sample_ids)].sum()) if per == "token" else len(sample_ids)

    def compute(loss: ModelWithLoss, batch: PackedBatch) -> tuple[Tensor]:
        tokens = loss.label_tokens(batch)
        values = tokens.logprobs_at(temperature)
        return ((values if per == "token" else tokens.by_sample(values)).detach(),)

    def run_passes(passes: Sequence[MicroBatch], batches: Iterator[PackedBatch]) -> Tensor:
        logprobs = torch.zeros(count, dtype=torch.float64, device=run.device)
        for planned, batch in zip(passes, batches, strict=True):
            with autocast(run):
                (values,) = run.loss_module(batch, compute)
            if not planned.is_filler:
                where = np.concatenate([places[i] for i in planned.sample_ids])
                if per == "token" and batch.label_places is not None:
                    where = where[batch.label_places.cpu().numpy()]
                logprobs[where] = values.double()
        return logprobs

    logprobs = run_with_oom_retry(run, plan, step, loader, "reference", run_passes)
    return np.array(run.strategy.sum_values(logprobs).tolist())
