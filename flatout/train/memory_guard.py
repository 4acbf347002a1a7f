"""GPU memory in a run: recovery from out-of-memory, and planned compared with measured use."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from flatout.errors import ResourceError
from flatout.plan.devices import GIB
from flatout.plan.memory.estimate import MicroBatchSize
from flatout.plan.schedule.steps import MicroBatch, StepPlan
from flatout.train.state import Run

# the second step, as the first one allocates the optimizer's state only after its own peak
MEASURED_STEP = 2


def micro_batches_of(run: Run, step: StepPlan) -> Sequence[MicroBatch]:
    """Return this rank's micro-batches of a step: the plan's, or smaller ones after an out-of-memory error."""
    planned = step.ranks[run.rank.index]
    cap_tokens = run.state.micro_batch_cap
    if cap_tokens is None or all(batch.num_tokens <= cap_tokens for batch in planned):
        return planned
    return run.plan.resplit(step, run.rank.index, max(cap_tokens, _longest(run, planned)))


def lower_cap(run: Run, step: StepPlan, taken: Sequence[MicroBatch], *, failed: MicroBatch) -> None:
    """After an out-of-memory error, drop gradients, free caches, and cap micro-batches at 2/3 of the failed one.

    The cap lasts for the rest of the run and applies to this rank only. Raises ResourceError if the micro-batches
    `taken` could not get smaller.
    """
    run.optimizer.zero_grad(set_to_none=True)
    run.fused_lora.forget()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
        torch.cuda.empty_cache()
    cap_tokens = max(failed.num_tokens * 2 // 3, _longest(run, taken))
    if cap_tokens >= max(batch.num_tokens for batch in taken):
        raise ResourceError(
            f"step {step.index + 1}: out of GPU memory with a micro-batch of {failed.num_tokens:,} tokens, which "
            "cannot be split further, since samples stay whole; set recompute: offload, lower "
            "data.max_tokens, set base.storage: nf4 (lora) or optim.name: adamw8bit (full), or free GPU memory"
        )
    run.state.micro_batch_cap = cap_tokens
    facts = {"step": step.index + 1, "rank": run.rank.index, "tokens": failed.num_tokens, "cap_tokens": cap_tokens}
    run.watch.event("out_of_memory", facts)


def _longest(run: Run, micro_batches: Sequence[MicroBatch]) -> int:
    """Return the tokens of the longest sample in these micro-batches."""
    ids = [sample_id for batch in micro_batches for sample_id in batch.sample_ids]
    return int(run.plan.samples.lengths[run.plan.samples.indices_of(ids)].max())


class PeakMemoryReporter:
    """Logs the planned and the measured peak once, after this process's second step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_steps = 0
        self._largest = MicroBatchSize(0, 0, 0)

    def end_step(self, step: StepPlan) -> None:
        """Keep the largest micro-batch so far; after the second step, log the peaks."""
        run = self._run
        self._num_steps += 1
        if self._num_steps > MEASURED_STEP or run.device.type != "cuda":
            return
        for batch in micro_batches_of(run, step):
            if batch.num_tokens > self._largest.num_tokens:
                self._largest = MicroBatchSize(batch.num_tokens, batch.num_label_tokens, len(batch.sample_ids))
        # recorded graphs ran at their largest size before the first step
        recorded_tokens = run.loss.decoder.largest_tokens if run.loss.decoder else 0
        if recorded_tokens > self._largest.num_tokens:
            size, share = self._largest, recorded_tokens / self._largest.num_tokens
            num_labels, num_documents = int(size.num_labels * share), int(size.num_documents * share)
            self._largest = MicroBatchSize(recorded_tokens, num_labels, num_documents)
        planned = run.memory.estimate(self._largest)
        if planned is None or self._num_steps != MEASURED_STEP:
            return
        measured_bytes = torch.cuda.max_memory_allocated(run.device)
        run.tracker.stage(
            "memory",
            f"planned {planned.total_bytes / GIB:.1f} GiB, measured {measured_bytes / GIB:.1f} GiB "
            f"with {self._largest.num_tokens:,} tokens in a micro-batch",
        )
