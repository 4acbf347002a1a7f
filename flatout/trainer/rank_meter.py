"""What each rank measures of itself in a step, and how all ranks' figures meet without another collective."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from flatout.errors import ResourceError, install
from flatout.optim.update import copy_to_host_async
from flatout.parallel.rank import Rank
from flatout.track.record import STEP, StepRecord


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


# what one rank measures: seconds of the phases of the latest step that its device has finished, as PHASE_s, and what is
# so now. What it does not know is missing.
RankFigures = Mapping[str, float]
# the rows of the table of figures that ranks measure, and the places of measurements in what ranks sum
MEASURED = {name: row for name, row in STEP.items() if row.measured}
NAMES = tuple(dict.fromkeys(row.measured for row in MEASURED.values()))
NUM_FIGURES = len(NAMES)
OPTIONAL = {field.name for field in fields(StepRecord) if field.default is None}
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

        There are no phases before the first step has ended. On a GPU they lag one or two steps. `wait_s` is as in
        `start_step`.
        """
        while self._unread and self._has_ended(self._unread[0]):
            self._seconds = {}
            for name, started, ended in self._unread.popleft():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds_between(started, ended)
        return {
            **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
            "data_wait_s": wait_s - self._wait_before_s,
            "num_processed_tokens": self._num_tokens,
            **memory_bytes(self._device),
            **self._gpu_use.figures(),
        }

    def _has_ended(self, spans: Sequence[_Span]) -> bool:
        last = spans[-1][2]
        return isinstance(last, float) or last.query()


def seconds_between(started: torch.cuda.Event | float, ended: torch.cuda.Event | float) -> float:
    """Return the seconds between two results of `now` on one device; events must have passed."""
    if isinstance(started, float) or isinstance(ended, float):
        return float(ended) - float(started)  # type: ignore[arg-type]  # both are host times
    return float(started.elapsed_time(ended)) / 1e3


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return this process's memory by the names of figures; on a CPU, its largest resident size for each."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)  # one call, because each builds the whole table
        return {name: stats[key] for name, key in MEMORY_STATS.items()}
    # Linux counts kilobytes, macOS bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return dict.fromkeys(MEMORY_STATS, peak)


def scatter_figures(figures: RankFigures, rank: Rank, device: torch.device) -> Tensor:
    """Return (world * NUM_FIGURES,) fp64 zeros with this rank's figures in its place, to be summed over ranks.

    NaN is what it does not know. Empty for one rank. The copy to a GPU does not make the host wait. Raises KeyError for
    a figure without a row in the table.
    """
    if extra := figures.keys() - set(NAMES):
        raise KeyError(f"{sorted(extra)[0]} has no row in the table of figures")
    if rank.world == 1:
        return torch.zeros(0, dtype=torch.float64, device=device)
    rows = torch.zeros(rank.world, NUM_FIGURES, dtype=torch.float64, pin_memory=device.type == "cuda")
    rows[rank.index] = torch.tensor([figures.get(name, math.nan) for name in NAMES], dtype=torch.float64)
    return rows.flatten().to(device, non_blocking=True)


def scatter_maxima(maxima: Tensor, rank: Rank) -> Tensor:
    """Return (world * n,) zeros with a rank's `maxima` (n,) in its place: their sum over ranks has every rank's."""
    rows = maxima.new_zeros(rank.world, len(maxima))
    rows[rank.index] = maxima
    return rows.flatten()


def busy_seconds(figures: RankFigures) -> float:
    """Return a rank's seconds in forward and backward passes."""
    return figures.get("forward_s", 0.0) + figures.get("backward_s", 0.0)


def combined_figures(by_step: Sequence[Sequence[RankFigures]], elapsed_s: float) -> dict[str, Any]:
    """Return the measured figures of a record by name, as the table combines them over ranks and steps.

    `by_step` has every rank's figures in each step of the record, which took `elapsed_s`. What a rank does not know
    counts 0, or makes a figure None that may be None.
    """
    every, combined = [figures for ranks in by_step for figures in ranks], dict[str, Any]()
    for name, row in MEASURED.items():
        ranks, unknown = (by_step[-1] or ({},)) if row.steps == "last" else every, math.nan if name in OPTIONAL else 0.0
        if row.ranks == "mean of busy":
            ranks = [figures for figures in ranks if busy_seconds(figures)]
        values = [figures.get(row.measured, unknown) for figures in ranks]
        total = max(values, default=0.0) if row.ranks == "max" else sum(values)
        if row.ranks in ("mean", "mean of busy"):
            total /= max(1, len(values))
        if row.steps == "rate":
            total /= elapsed_s
        combined[name] = None if math.isnan(total) else int(total) if row.unit == "bytes" else total
    return combined


# a reading takes the host up to a millisecond
MIN_PERIOD_S = 1.0


class GpuUse:
    """This process's GPU, read at most once in MIN_PERIOD_S. Nothing is known of a CPU, nor where NVML does not answer.

    `read` returns the joules so far and the share of time, from 0 to 1, with a kernel running.
    """

    def __init__(self, device: torch.device, read: Callable[[], tuple[float, float]] | None = None) -> None:
        self._read = read or (_joules_and_use if device.type == "cuda" else None)
        self._last: tuple[float, float] | None = None
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """Return the mean power since the reading before, and the last reading's share; empty if not known."""
        now_s = time.monotonic()
        if self._read is None or (self._last is not None and now_s - self._last[0] < MIN_PERIOD_S):
            return self._figures
        try:
            joules, use = self._read()
        except ResourceError:
            # it will not answer later either
            self._read, self._figures = None, {}
            return self._figures
        if self._last is not None:
            self._figures = {"gpu_watts": (joules - self._last[1]) / (now_s - self._last[0]), "gpu_use": use}
        self._last = now_s, joules
        return self._figures


def _joules_and_use() -> tuple[float, float]:
    return read_joules(), _ask("use", lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)


def read_joules() -> float:
    """Return the joules that the current CUDA device has used since its driver was loaded.

    It is NVML's nvmlDeviceGetTotalEnergyConsumption, a counter in mJ that is only read. Raises ResourceError in a
    process without CUDA, without nvidia-ml-py, and where the driver has no such counter: before Volta, and for parts of
    a GPU (MIG).
    """
    return _ask("energy", lambda nvml, handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3)


def _ask(what: str, question: Callable[[Any, Any], float]) -> float:
    if not torch.cuda.is_initialized():
        raise ResourceError(f"this process uses no CUDA GPU, whose driver counts the {what}")
    try:
        import pynvml
    except ImportError as error:
        raise ResourceError(f"nvidia-ml-py, which reads the {what}, is not installed; {install('gpu')}") from error
    try:
        return question(pynvml, _handle(torch.cuda.current_device()))
    except pynvml.NVMLError as error:
        raise ResourceError(f"NVML does not give the {what} of this GPU: {error}") from error


@cache
def _handle(index: int) -> Any:
    """Return NVML's handle of a CUDA device, by its UUID, as CUDA may number the GPUs otherwise or see fewer."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


@dataclass(frozen=True, slots=True)
class HostTotals:
    """A step's totals over ranks, read by the host."""

    values: tuple[float, ...]
    """The objective's values in the order of `Objective.value_names`; empty for a step without label tokens."""
    num_stopping: float
    """The number of ranks that were asked to stop."""
    rank_figures: tuple[RankFigures, ...]
    """What each rank measured, in the order of ranks; empty for one rank."""
    aux_loss_sums: tuple[float, ...]
    """Those of `AuxiliaryLoss.sums`."""
    grad_norm: float
    """The global L2 norm before clipping; 0 for a step without label tokens."""


class StepTotals(NamedTuple):
    """A step's totals on the device, fp64: this rank's part, or those over ranks."""

    sums: Tensor
    """(num_sums,): the objective's sums in the order of `Objective.sum_names`."""
    maxima: Tensor
    """(num_maxima,): the objective's maxima; of a rank's part, as `scatter_maxima` returns them."""
    num_stopping: Tensor
    """(1,): the number of ranks that were asked to stop."""
    rank_figures: Tensor
    """(world * NUM_FIGURES,): what each rank measured, see `scatter_figures`."""
    aux_loss_sums: Tensor
    """(num_aux_sums,): those of `AuxiliaryLoss.sums`."""
    grad_norm: Tensor
    """(1,): the global L2 norm before clipping, which is no sum; (0,) until it is known."""

    @classmethod
    def of_rank(
        cls, rank: Rank, figures: RankFigures, *, stops: bool, sums: Tensor, maxima: Tensor, aux_loss_sums: Tensor
    ) -> Self:
        """Return a rank's part of a step; `stops` says whether it was asked to stop."""
        device = sums.device
        # filled on the device, so that the host does not wait
        stop = torch.full((1,), float(stops), dtype=torch.float64, device=device)
        nothing = torch.zeros(0, dtype=torch.float64, device=device)
        by_rank = (scatter_maxima(maxima, rank), stop, scatter_figures(figures, rank, device))
        return cls(sums, *by_rank, aux_loss_sums, nothing)

    def over_ranks(self, rank: Rank, sum_values: Callable[[Tensor], Tensor]) -> Self:
        """Return the totals over ranks, in one collective."""
        totals = type(self)(*sum_values(torch.cat(self)).split(self._lengths))
        return totals._replace(maxima=totals.maxima.view(rank.world, -1).amax(0))

    def is_unusable(self) -> Tensor:
        """Return whether no update may be made (0-d): the loss or the norm is not finite, or a rank stops."""
        is_finite = torch.stack([self.sums[0], self.grad_norm[0]]).isfinite().all()
        return ~is_finite | (self.num_stopping[0] > 0)

    def read(self) -> HostTotals:
        """Wait for the device, and return the totals."""
        return self._unpack(torch.cat(self).tolist())

    def read_later(self) -> tuple[Callable[[], HostTotals], torch.cuda.Event | float]:
        """Start copying to the host; return what waits for the totals, and when the copy ended on the device."""
        read, ended = copy_to_host_async(torch.cat(self))
        return lambda: self._unpack(read()), ended

    @property
    def _lengths(self) -> list[int]:
        return [len(part) for part in self]

    def _unpack(self, values: Sequence[float]) -> HostTotals:
        remaining = iter(values)
        parts = [tuple(next(remaining) for _ in range(length)) for length in self._lengths]
        sums, maxima, (num_stopping,), figures, aux_loss_sums, grad_norm = parts
        # every rank's row of what `scatter_figures` returned; empty for one rank
        rows = (figures[start : start + NUM_FIGURES] for start in range(0, len(figures), NUM_FIGURES))
        named = (zip(NAMES, row, strict=True) for row in rows)
        by_rank = tuple({name: value for name, value in row if not math.isnan(value)} for row in named)
        return HostTotals((*sums, *maxima), num_stopping, by_rank, aux_loss_sums, *(grad_norm or (0.0,)))
