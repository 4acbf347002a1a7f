"""From step outcomes to records: rates over the time since the last record, padding against a naive loader."""

from __future__ import annotations

import resource
import sys
import time

import torch

from flatout.plan.types import StepPlan
from flatout.track.record import StepRecord
from flatout.train.state import Run
from flatout.train.step import StepOutcome


class Meter:
    """Adds up tokens and seconds between two records."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step_started = time.perf_counter()
        self._wait_before_s = 0.0
        self._num_tokens = self._num_label_tokens = self._num_steps = 0
        self._busy_s = 0.0

    def start_step(self) -> None:
        """The clock of one step starts; evaluation and saving lie between steps and do not count."""
        self._step_started = time.perf_counter()

    def end_step(self, step: StepPlan, outcome: StepOutcome) -> None:
        """Count a step; every `log_every_steps` steps and at the last one, tell the tracker."""
        step_s = time.perf_counter() - self._step_started
        self._busy_s += step_s
        self._num_steps += 1
        self._num_tokens += step.num_tokens
        self._num_label_tokens += step.num_label_tokens
        self._run.progress.elapsed_s += step_s
        completed = step.index + 1
        if completed % self._run.config.log_every_steps and completed != self._run.plan.num_steps:
            return
        self._run.tracker.record(self._record(step, outcome))
        self._wait_before_s = self._run.feed.wait_s
        self._num_tokens = self._num_label_tokens = self._num_steps = 0
        self._busy_s = 0.0

    def _record(self, step: StepPlan, outcome: StepOutcome) -> StepRecord:
        naive = self._run.plan.naive_tokens(step)
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
            padding_avoided=1.0 - step.num_tokens / naive,
            balance=step.balance,
            peak_memory_bytes=peak_memory_bytes(self._run.device),
            elapsed_s=self._run.progress.elapsed_s,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory allocated so far: the GPU's for CUDA, the process's resident size for CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts kilobytes, macOS bytes
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
