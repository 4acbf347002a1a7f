"""A GPU's memory in a run: what there is, what was planned beside what was used, and what happens when it runs out."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from flatout.config.schema import Config
from flatout.errors import ResourceError
from flatout.parallel.connect import choose_device
from flatout.parallel.rank import Rank
from flatout.plan.devices import CONTEXT_BYTES, GIB, Device
from flatout.plan.memory import MicroBatchSize
from flatout.plan.types import MicroBatch, StepPlan
from flatout.train.state import Run

# the second step: the first one makes the optimizer's state after its own peak
MEASURED_STEP = 2


def gpu_of(config: Config, rank: Rank) -> Device | None:
    """The GPU that this process will train on and the bytes it may take; None on the CPU.

    Free memory for a process alone. All of it (less the context) for several ranks, which must cut alike, and for
    deterministic runs, whose cutting must not depend on what else runs. Raises ResourceError as `choose_device` does.
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
    """This rank's micro-batches of a step: the plan's, or smaller ones once memory has run out."""
    planned = step.ranks[run.rank.index]
    if run.cap_tokens is None or all(batch.num_tokens <= run.cap_tokens for batch in planned):
        return planned
    return run.plan.cut_again(step, run.rank.index, max(run.cap_tokens, _longest(run, planned)))


def lower_cap(run: Run, step: StepPlan, taken: Sequence[MicroBatch], *, failed: MicroBatch) -> None:
    """After an out-of-memory: drop the gradients, free what is cached, and allow 2/3 of the failed micro-batch.

    The cap stays for the rest of the run; no other rank has to know. Raises ResourceError when the micro-batches
    `taken` would stay as large as they were.
    """
    run.optimizer.zero_grad(set_to_none=True)
    run.joined.forget()
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
    run.cap_tokens = cap_tokens
    facts = {"step": step.index + 1, "rank": run.rank.index, "tokens": failed.num_tokens, "cap_tokens": cap_tokens}
    run.tracker.event("out_of_memory", facts)


class MemoryWatch:
    """Tells once, after this process's second step, the measured peak beside what was planned."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_steps = 0
        self._largest = MicroBatchSize(0, 0, 0)

    def end_step(self, step: StepPlan) -> None:
        """Look at what the step's micro-batches were; at the second one, tell."""
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
        """Recorded graphs ran at their largest size before the first step."""
        num_tokens = self._run.loss.decoder.largest_tokens if self._run.loss.decoder else 0
        if num_tokens <= size.num_tokens:
            return size
        share = num_tokens / size.num_tokens
        return MicroBatchSize(num_tokens, int(size.num_labels * share), int(size.num_documents * share))


def _longest(run: Run, micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens of the longest sample in these micro-batches."""
    ids = [sample_id for batch in micro_batches for sample_id in batch.sample_ids]
    samples = run.plan.samples
    return int(samples.lengths[samples.places_of(ids)].max())
