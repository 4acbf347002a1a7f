"""Turn step outcomes into records: rates since the last record, and padding avoided compared with a naive loader."""

from __future__ import annotations

import resource
import sys
import time

import torch

from flatout.plan.devices import Peak, nominal_peak
from flatout.plan.schedule.steps import StepPlan
from flatout.track.record import StepRecord
from flatout.train.state import Run
from flatout.train.step import StepOutcome
from flatout.train.stragglers import Stragglers

_ARITHMETIC = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Meter:
    """Adds up tokens, FLOPs and seconds between two records."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._peak = device_peak(run)
        if self._peak is not None:
            run.tracker.stage("mfu", f"MFU against {self._peak.describe()}; recomputation does not count")
        self._clock = StepClock(run.device)
        self._wait_before_s = 0.0
        self._stragglers = Stragglers(run.tracker.event)
        self._num_tokens = self._num_label_tokens = self._num_steps = 0
        self._busy_s = self._flops = 0.0

    def start_step(self) -> None:
        """Start the clock; evaluation and saving happen between steps and do not count."""
        self._clock.start()

    def end_step(self, step: StepPlan, outcome: StepOutcome) -> None:
        """Count a step, which began when the last one ended; send a record to the tracker when one is due."""
        step_s = self._clock.end_step(outcome.ended)
        self._busy_s += step_s
        self._num_steps += 1
        self._num_tokens += step.num_tokens
        self._num_label_tokens += step.num_label_tokens
        self._flops += useful_flops(self._run, step)
        self._run.progress.elapsed_s += step_s
        completed = step.index + 1
        self._stragglers.look(completed, outcome.busy_s)
        if completed % self._run.config.log_every_steps and completed != self._run.plan.num_steps:
            return
        self._run.tracker.record(self._record(step, outcome))
        self._wait_before_s = self._run.feed.wait_s
        self._num_tokens = self._num_label_tokens = self._num_steps = 0
        self._busy_s = self._flops = 0.0

    def _record(self, step: StepPlan, outcome: StepOutcome) -> StepRecord:
        naive = self._run.plan.naive_tokens(step)
        flops_per_s = self._flops / self._busy_s
        peak_flops_per_s = None if self._peak is None else self._peak.flops_per_s * self._run.rank.world
        return StepRecord(
            step=step.index + 1,
            num_steps=self._run.plan.num_steps,
            epoch=self._run.plan.epoch_after(step),
            loss=outcome.loss,
            token_accuracy=outcome.token_accuracy,
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            num_samples=len(step.sample_ids),
            num_tokens=step.num_tokens,
            num_label_tokens=step.num_label_tokens,
            num_micro_batches=sum(len(rank) for rank in step.ranks),
            tokens_per_s=self._num_tokens / self._busy_s,
            label_tokens_per_s=self._num_label_tokens / self._busy_s,
            step_s=self._busy_s / self._num_steps,
            data_wait_s=(self._run.feed.wait_s - self._wait_before_s) / self._num_steps,
            flops_per_s=flops_per_s,
            mfu=None if peak_flops_per_s is None else flops_per_s / peak_flops_per_s,
            padding_avoided=1.0 - step.num_tokens / naive,
            balance=step.balance,
            peak_memory_bytes=peak_memory_bytes(self._run.device),
            elapsed_s=self._run.progress.elapsed_s,
            busy_min_s=min(outcome.busy_s, default=None),
            busy_max_s=max(outcome.busy_s, default=None),
        )


class StepClock:
    """Times each step from the end of the previous one: by CUDA events if steps overlap, otherwise on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Start timing the next step; nothing may be running on the device."""
        self._time_s = time.perf_counter()
        self._event = None
        if self._device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(self._device))

    def end_step(self, ended: torch.cuda.Event | float | None) -> float:
        """Return the seconds of the step that ended at this past event or host time, or just now (None)."""
        end_s = ended if isinstance(ended, float) else time.perf_counter()
        step_s = end_s - self._time_s
        event = None if isinstance(ended, float) else ended
        if event is not None and self._event is not None:
            step_s = self._event.elapsed_time(event) / 1e3
        self._time_s, self._event = end_s, event
        return step_s


def useful_flops(run: Run, step: StepPlan) -> float:
    """Return the FLOPs that a step needs over all ranks, by the plan's cost model without recomputation."""
    if step.num_label_tokens == 0:
        return 0.0  # such a step computes nothing
    cost, samples = run.plan.layout.cost, run.plan.samples
    places = samples.indices_of(step.sample_ids)
    return float((cost.useful or cost).flops(samples.lengths[places], samples.num_labels[places]).sum())


def device_peak(run: Run) -> Peak | None:
    """Return the nominal peak of the run's device in the arithmetic of its matrix products; None if unknown."""
    if run.device.type != "cuda":
        return None
    arithmetic = "fp8" if run.config.computes_in_fp8 else _ARITHMETIC.get(run.dtype, "")
    return nominal_peak(torch.cuda.get_device_name(run.device), arithmetic)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated GPU memory on CUDA, the process's resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts kilobytes, macOS bytes
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
