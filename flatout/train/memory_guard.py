"""GPU memory in a run: what is available, planned compared with measured use, and recovery from out-of-memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from flatout.config.schema import Config
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.choose import choose_device
from flatout.plan.devices import CONTEXT_BYTES, GIB, Device
from flatout.plan.memory.estimate import MicroBatchSize
from flatout.plan.schedule.steps import MicroBatch, StepPlan
from flatout.train.state import Run

# the second step, as the first one allocates the optimizer's state only after its own peak
MEASURED_STEP = 2


def gpu_of(config: Config, rank: Rank) -> Device | None:
    """Return the GPU that this process will train on and the bytes it may use; None on the CPU.

    A single process gets the free memory. Several ranks get the total (less the context), as all must plan the same
    micro-batches; so do deterministic runs, whose plan must not depend on other processes. Raises ResourceError as
    `choose_device` does.
    """
    device = choose_device(config.wanted_device, rank)
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    alike = rank.world > 1 or config.deterministic
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    name = torch.cuda.get_device_name(device)
    return Device(name, total_bytes - CONTEXT_BYTES if alike else free_bytes, has_bf16)


def within_cap(run: Run, step: StepPlan) -> Sequence[MicroBatch]:
    """Return this rank's micro-batches of a step: the plan's, or smaller ones after an out-of-memory error."""
    planned = step.ranks[run.rank.index]
    cap_tokens = run.micro_batch_cap.num_tokens
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
    run.micro_batch_cap.num_tokens = cap_tokens
    facts = {"step": step.index + 1, "rank": run.rank.index, "tokens": failed.num_tokens, "cap_tokens": cap_tokens}
    run.watch.event("out_of_memory", facts)


class PeakMemoryReporter:
    """Logs the planned and the measured peak once, after this process's second step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_steps = 0
        self._largest = MicroBatchSize(0, 0, 0)

    def end_step(self, step: StepPlan) -> None:
        """Keep the largest micro-batch so far; after the second step, log the peaks."""
        self._num_steps += 1
        if self._num_steps > MEASURED_STEP or self._run.device.type != "cuda":
            return
        for batch in within_cap(self._run, step):
            if batch.num_tokens > self._largest.num_tokens:
                self._largest = MicroBatchSize(batch.num_tokens, batch.num_label_tokens, len(batch.sample_ids))
        self._largest = self._with_recordings(self._largest)
        planned = self._run.memory.estimate(self._largest)
        if planned is None or self._num_steps != MEASURED_STEP:
            return
        measured_bytes = torch.cuda.max_memory_allocated(self._run.device)
        self._run.tracker.stage(
            "memory",
            f"planned {planned.total_bytes / GIB:.1f} GiB, measured {measured_bytes / GIB:.1f} GiB "
            f"with {self._largest.num_tokens:,} tokens in a micro-batch",
        )

    def _with_recordings(self, size: MicroBatchSize) -> MicroBatchSize:
        """Account for recorded graphs, which ran at their largest size before the first step."""
        num_tokens = self._run.loss.decoder.largest_tokens if self._run.loss.decoder else 0
        if num_tokens <= size.num_tokens:
            return size
        share = num_tokens / size.num_tokens
        return MicroBatchSize(num_tokens, int(size.num_labels * share), int(size.num_documents * share))


def _longest(run: Run, micro_batches: Sequence[MicroBatch]) -> int:
    """Return the tokens of the longest sample in these micro-batches."""
    ids = [sample_id for batch in micro_batches for sample_id in batch.sample_ids]
    samples = run.plan.samples
    return int(samples.lengths[samples.indices_of(ids)].max())
