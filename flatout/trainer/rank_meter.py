"""What each rank measures of itself in a step, and how all ranks' figures meet without another collective."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from flatout.parallel.rank import Rank
from flatout.trainer.gpu_use import GpuUse


def now(device: torch.device) -> torch.cuda.Event | float:
    """Return an event recorded on the device's current stream, or on a CPU `time.perf_counter` in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class StepClock:
    """Times each step from the end of the previous one: by CUDA events if steps overlap, otherwise on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Start timing the next step; nothing may be running on the device."""
        self._time_s = time.perf_counter()
        self._ended: torch.cuda.Event | float | None = now(self._device)

    def end_step(self, ended: torch.cuda.Event | float | None) -> float:
        """Return the seconds of the step that ended at this past event or host time, or just now (None)."""
        started_s, started = self._time_s, self._ended
        self._time_s, self._ended = ended if isinstance(ended, float) else time.perf_counter(), ended
        return self._time_s - started_s if started is None or ended is None else seconds_between(started, ended)


Phase = Literal["forward", "backward", "gradient_sum", "checkpoint_wait", "optimizer"]
_Span = tuple[str, torch.cuda.Event | float, torch.cuda.Event | float]


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's seconds in the phases of the latest step that its device has finished; its tokens and memory now.

    Tokens count fillers and padding. Memory is in bytes: allocated and reserved, now and at peak. The GPU's power and
    the share of time that it computes are as `GpuUse` has them.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    gradient_sum_s: float = 0.0
    checkpoint_wait_s: float = 0.0
    optimizer_s: float = 0.0
    data_wait_s: float = 0.0
    num_processed_tokens: float = 0.0
    memory_bytes: float = 0.0
    reserved_memory_bytes: float = 0.0
    peak_memory_bytes: float = 0.0
    peak_reserved_memory_bytes: float = 0.0
    gpu_watts: float = 0.0
    gpu_use: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in forward and backward passes."""
        return self.forward_s + self.backward_s


NUM_FIGURES = len(fields(RankFigures))
# keys of torch.cuda.memory_stats
MEMORY_STATS = {
    "memory_bytes": "allocated_bytes.all.current",
    "reserved_memory_bytes": "reserved_bytes.all.current",
    "peak_memory_bytes": "allocated_bytes.all.peak",
    "peak_reserved_memory_bytes": "reserved_bytes.all.peak",
}


class RankMeter:
    """Measures this rank's steps without waiting for the device: call `start_step`, then time each `phase`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu_use = device, GpuUse(device)
        self._spans: list[_Span] = []
        self._unread: deque[list[_Span]] = deque()
        self._seconds: dict[str, float] = {}
        self._wait_before_s, self._num_tokens = 0.0, 0

    def start_step(self, wait_s: float) -> None:
        """Begin a step; the last one ends. `wait_s` is the total time so far that the host waited for data."""
        if self._spans:
            self._unread.append(self._spans)
        self._spans, self._wait_before_s, self._num_tokens = [], wait_s, 0

    @contextmanager
    def phase(self, name: Phase, *, num_tokens: int = 0) -> Iterator[None]:
        """Time work on the current stream, over `num_tokens`; a phase entered several times in a step adds up."""
        started = now(self._device)
        yield
        self._spans.append((name, started, now(self._device)))
        self._num_tokens += num_tokens

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count the passes within only if none fails: those that run out of memory are taken again."""
        num_spans, num_tokens = len(self._spans), self._num_tokens
        try:
            yield
        except BaseException:
            del self._spans[num_spans:]
            self._num_tokens = num_tokens
            raise

    def figures(self, wait_s: float) -> RankFigures:
        """Return this step's tokens, memory and wait for data, and the phases of the latest step that has ended.

        Phases are 0 before the first step has ended. On a GPU they lag one or two steps. `wait_s` is as in
        `start_step`.
        """
        while self._unread and self._has_ended(self._unread[0]):
            self._seconds = {}
            for name, started, ended in self._unread.popleft():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds_between(started, ended)
        return RankFigures(
            **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
            data_wait_s=wait_s - self._wait_before_s,
            num_processed_tokens=self._num_tokens,
            **memory_bytes(self._device),
            **self._gpu_use.figures(),
        )

    def _has_ended(self, spans: Sequence[_Span]) -> bool:
        last = spans[-1][2]
        return isinstance(last, float) or last.query()


def seconds_between(started: torch.cuda.Event | float, ended: torch.cuda.Event | float) -> float:
    """Return the seconds between two results of `now` on one device; events must have passed."""
    if isinstance(started, float) or isinstance(ended, float):
        return float(ended) - float(started)  # type: ignore[arg-type]  # both are host times
    return float(started.elapsed_time(ended)) / 1e3


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return this process's memory by the names of RankFigures; on a CPU, its largest resident size for each."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)  # one call, because each builds the whole table
        return {name: stats[key] for name, key in MEMORY_STATS.items()}
    # Linux counts kilobytes, macOS bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return dict.fromkeys(MEMORY_STATS, peak)


def scatter_figures(figures: RankFigures, rank: Rank, device: torch.device) -> Tensor:
    """Return (world * NUM_FIGURES,) fp64 zeros with this rank's figures in its place, to be summed over ranks.

    Empty for one rank. The copy to a GPU does not make the host wait.
    """
    if rank.world == 1:
        return torch.zeros(0, dtype=torch.float64, device=device)
    rows = torch.zeros(rank.world, NUM_FIGURES, dtype=torch.float64, pin_memory=device.type == "cuda")
    rows[rank.index] = torch.tensor(astuple(figures), dtype=torch.float64)
    return rows.flatten().to(device, non_blocking=True)


def gathered_figures(values: Sequence[float]) -> tuple[RankFigures, ...]:
    """Return every rank's figures from the sum of what `scatter_figures` returned; empty for one rank."""
    return tuple(RankFigures(*values[start : start + NUM_FIGURES]) for start in range(0, len(values), NUM_FIGURES))


def mean_figures(figures: Sequence[RankFigures]) -> RankFigures:
    """Return the mean of each figure, 0 without any."""
    rows = [astuple(rank_figures) for rank_figures in figures] or [(0.0,) * NUM_FIGURES]
    return RankFigures(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))
