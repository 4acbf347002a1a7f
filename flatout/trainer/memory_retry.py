"""Passes that run out of memory are taken again in smaller micro-batches, whatever they are for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from operator import length_hint
from typing import Literal, TypeVar

import torch

from flatout.errors import ResourceError
from flatout.models.packed import PackedBatch
from flatout.parallel.strategies.protocol import oom_as_resource_error
from flatout.planner.steps.planned_samples import PlannedSamples
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.passes import micro_batches_of
from flatout.trainer.state import TrainingRun

During = Literal["training", "estimates", "reference", "evaluation"]
T = TypeVar("T")


def take_passes(
    run: TrainingRun,
    plan: PlannedSamples,
    step: StepPlan,
    loader: BatchLoader,
    during: During,
    take: Callable[[Sequence[MicroBatch], Iterator[PackedBatch]], T],
) -> T:
    """Call `take` with this rank's passes of a step and their batches, in order; return what it returns.

    Out of memory, what it computed is dropped, and it is called again with the same samples: first without recorded
    graphs, if there are any, then in smaller micro-batches. So a normalizer of the whole step stays what it was. Raises
    ResourceError if they cannot get smaller, and where other ranks take part in each pass, as they could not take this
    one's extra passes.
    """
    while True:
        passes = micro_batches_of(run, plan, step)
        left = iter(passes)
        try:
            with oom_as_resource_error(run.rank) if run.shares_passes else nullcontext():
                return take(passes, (batch for _, batch in zip(left, loader.batches(passes), strict=True)))
        except torch.OutOfMemoryError:
            failed = passes[max(0, len(passes) - length_hint(left) - 1)]
        # called here because no frame of the failed pass holds tensors any more
        if drop_graphs(run, step, during):
            continue
        lower_cap(run, plan, passes, failed=failed, step=step, during=during)


def drop_graphs(run: TrainingRun, step: StepPlan, during: During) -> bool:
    """Drop recorded graphs, whose memory no other pass can use, and all gradients; return whether there were any."""
    if run.loss.decoder is None:
        return False
    run.loss.decoder = None
    run.optimizer.zero_grad(set_to_none=True)
    release_memory(run)
    number = step.index + 1 if during in ("training", "estimates") else run.progress.step
    run.watch.event("graphs_dropped", {"step": number, "during": during, "rank": run.rank.index})
    return True


def lower_cap(
    run: TrainingRun,
    plan: PlannedSamples,
    taken: Sequence[MicroBatch],
    *,
    failed: MicroBatch,
    step: StepPlan,
    during: During,
) -> None:
    """After an out-of-memory error, drop gradients, free caches, and cap micro-batches at 2/3 of the failed one.

    The cap lasts for the rest of the run and applies to this rank only. Raises ResourceError if the micro-batches
    `taken` could not get smaller.
    """
    run.optimizer.zero_grad(set_to_none=True)
    release_memory(run)
    cap_tokens = max(failed.num_padded_tokens * 2 // 3, plan.largest_unit(taken))
    in_step = during in ("training", "estimates")
    number = step.index + 1 if in_step else run.progress.step
    if cap_tokens >= max(batch.num_padded_tokens for batch in taken):
        less = "set recompute: offload, lower" if in_step else "lower"
        raise ResourceError(
            f"step {number}{'' if during == 'training' else f', {during}'}: out of GPU memory with a micro-batch of "
            f"{failed.num_padded_tokens:,} tokens, which cannot be split further because samples stay whole; {less} "
            "data.max_tokens, set base.storage: nf4 (lora) or optim.name: adamw8bit (full), or free GPU memory"
        )
    run.state.micro_batch_cap = cap_tokens
    facts = {
        "step": number,
        "during": during,
        "rank": run.rank.index,
        "tokens": failed.num_padded_tokens,
        "cap_tokens": cap_tokens,
    }
    run.watch.event("out_of_memory", facts)


def release_memory(run: TrainingRun) -> None:
    """Free what a failed pass left, once no frame of it holds tensors any more."""
    run.fused_lora.forget()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
        torch.cuda.empty_cache()
