"""Profile a few steps, and show how their time is spent by category of kernels, and how much of it was idle.

Their energy is measured as a whole and not divided among the categories. The counter moves every 20 to 100 ms, a
category's kernels run for microseconds, and their power differs: by shares of time, products would get too few joules
and copies too many. Nor do watts of each category, measured once, divide a step: under a power cap the clock follows
what ran in the milliseconds before, so a kernel's power depends on its neighbors. `benchmarks/joules.py` loops each
operation of a step by itself instead, and prints their sum beside the energy of whole steps.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from flatout.errors import ResourceError
from flatout.io.durable_io import DurableIO
from flatout.track.callback import MemoryCallback
from flatout.track.record import RunEnd, StepRecord
from flatout.trainer.rank_meter import read_joules

WARM_UP_STEPS = 3

# ranges set in flatout's code, for work that kernel names cannot identify
RANGES = {"flatout::head": "head", "flatout::optimizer": "optimizer"}

# the first pattern that matches a kernel's or operator's name decides
_CATEGORIES = (
    ("communication", r"nccl|all_reduce|allreduce|all_gather|reduce_scatter"),
    ("attention", r"flash|fmha|attention|mha_|dot_do_o|convert_dq"),
    ("optimizer", r"adam|multi_tensor_apply|_foreach|lpnorm|sgd"),
    # LoRA's matrices are as narrow as its rank, so cuBLAS picks narrow tiles for them
    ("LoRA", r"lora|low_rank|nvjet_\w*?_(?:\d+x(?:8|16|24|32)|(?:8|16|24|32)x\d+)_"),
    ("quantize", r"quanti[sz]e|(?<!_)quant_|nf4|amax"),
    (
        "GEMM",
        r"^segmented_product$|nvjet|matmul|gemm|gemv|cutlass|xmma|cublas|split_?k|^triton_(?:tem|mm)_|scaled_mm|linear",
    ),
    ("GEMM", r"::(?:add|b|baddb)?mm$"),
    ("norms, elementwise", r"^triton_"),
    ("copies", r"memcpy|memset|copy|catarray|::cat$|fill|zero"),
    ("norms, elementwise", r"elementwise|vectorized|reduce|norm|softmax|index|gather|scatter|embedding"),
    ("norms, elementwise", r"silu|mul|add|sum"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel on a device's stream, or an operator on a CPU thread; times in microseconds.

    `own_us` excludes nested operators. `ranges` are the names of the enclosing ranges, outermost first.
    """

    name: str
    start_us: float
    end_us: float
    own_us: float
    ranges: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CategoryTime:
    """One category: seconds per step, share of the step's wall time, kernels per step."""

    category: str
    step_s: float
    share: float
    num_kernels: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Rows sorted by time; they sum to the busy time plus `overlap_s`, the time of work on several streams at once.

    `idle_s` is wall time in which nothing ran. `data_wait_s` is how long the host was blocked for data, which is part
    of `idle_s` if the device had nothing else to do. All are seconds per step.
    """

    num_steps: int
    step_s: float
    rows: tuple[CategoryTime, ...]
    idle_s: float
    overlap_s: float
    data_wait_s: float


def category_of(event: Event) -> str:
    """Return an event's category, from its innermost range in RANGES, else from its name."""
    for name in reversed(event.ranges):
        if name in RANGES:
            return RANGES[name]
    categories = (category for category, pattern in _CATEGORIES if re.search(pattern, event.name, re.IGNORECASE))
    return next(categories, "other")


def break_down(events: Sequence[Event], *, wall_s: float, num_steps: int, data_wait_s: float) -> Breakdown:
    """Break down the time of `num_steps` steps that took `wall_s` in total; `data_wait_s` is per step."""
    own_s: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in events:
        category = category_of(event)
        own_s[category] += event.own_us / 1e6
        counts[category] += 1
    busy_us, reached = 0.0, float("-inf")
    for start, end in sorted((event.start_us, event.end_us) for event in events):
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    by_time = sorted(own_s.items(), key=lambda pair: -pair[1])
    return Breakdown(
        num_steps=num_steps,
        step_s=wall_s / num_steps,
        rows=tuple(CategoryTime(name, s / num_steps, s / wall_s, counts[name] / num_steps) for name, s in by_time),
        idle_s=max(0.0, wall_s - busy_us / 1e6) / num_steps,
        overlap_s=max(0.0, sum(own_s.values()) - busy_us / 1e6) / num_steps,
        data_wait_s=data_wait_s,
    )


def kernels_of(trace: Mapping[str, Any]) -> list[Event]:
    """Return the kernels and copies of a Chrome trace, sorted by start, with the enclosing ranges on their stream."""
    complete = [entry for entry in trace["traceEvents"] if entry.get("ph") == "X"]
    ranges = [entry for entry in complete if entry["cat"] == "gpu_user_annotation" and entry["name"] in RANGES]
    waiting = sorted(ranges, key=lambda entry: -entry["ts"])
    kernels = [entry for entry in complete if entry["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    events: list[Event] = []
    around: list[dict[str, Any]] = []
    for entry in sorted(kernels, key=lambda entry: (entry["ts"], -entry["dur"])):
        start, duration = entry["ts"], entry["dur"]
        while waiting and waiting[-1]["ts"] <= start:
            around.append(waiting.pop())
        around = [one for one in around if one["ts"] + one["dur"] > start]
        names = tuple(one["name"] for one in around if one["tid"] == entry["tid"])
        events.append(Event(entry["name"], start, start + duration, duration, names))
    return events


def operators_of(profile: torch.profiler.profile) -> list[Event]:
    """Return the operators on CPU threads, with the enclosing ranges."""
    events = []
    for event in profile.events() or ():
        if event.device_type.name == "CPU" and not event.is_user_annotation:
            around = [event]
            while around[-1].cpu_parent is not None:
                around.append(around[-1].cpu_parent)
            ranges, times = tuple(one.name for one in reversed(around[1:])), event.time_range
            events.append(Event(event.name, times.start, times.end, event.self_cpu_time_total, ranges))
    return events


def render(breakdown: Breakdown, usual_step_s: float | None = None) -> list[str]:
    """Return the table as lines; `usual_step_s` is a step's time without the overhead of profiling."""
    usual = "" if usual_step_s is None else f" ({usual_step_s * 1e3:,.1f} ms before profiling)"
    lines = [f"{breakdown.num_steps} steps of {breakdown.step_s * 1e3:,.1f} ms{usual}; time per step"]
    rows = [(row.category, row.step_s, f"{row.num_kernels:,.0f} kernels") for row in breakdown.rows]
    rest = ("idle", breakdown.idle_s, ""), ("overlap of streams", -breakdown.overlap_s, "")
    rows += [row for row in rest if abs(row[1]) > 1e-4 * breakdown.step_s]
    rows.append(("host blocked for data", breakdown.data_wait_s, "part of idle"))
    return lines + [
        f"  {name:<28}{seconds * 1e3:>10,.2f} ms {seconds / breakdown.step_s:>7.1%}  {note}".rstrip()
        for name, seconds, note in rows
    ]


class Profiler(MemoryCallback):
    """A callback that profiles some steps after the warm-up; writes profile.json and trace.json.gz to the run folder.

    See Callback for the methods. `say` prints one line. `read_joules` reads a GPU's energy counter; the profile says so
    if it raises ResourceError, and goes on.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        say: Callable[[str], None],
        read_joules: Callable[[], float] = read_joules,
    ) -> None:
        super().__init__()
        self._folder, self._num_steps, self._say, self._read_joules = folder, num_steps, say, read_joules
        self._started_joules: float | None = None
        self._why_no_energy = ""
        self._profile: torch.profiler.profile | None = None
        self._first: StepRecord | None = None
        self._started_s = 0.0
        self._done = False

    def on_step(self, record: StepRecord) -> None:
        """Start profiling after the warm-up steps, and stop after `num_steps`."""
        super().on_step(record)
        if self._done:
            return
        if self._first is None and len(self.steps) >= WARM_UP_STEPS:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
            self._first, self._profile = record, torch.profiler.profile(activities=activities)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._profile.start()
            self._started_joules = self._joules()
            self._started_s = time.perf_counter()
        elif self._first is not None and record.step - self._first.step >= self._num_steps:
            self._finish()

    def on_end(self, end: RunEnd) -> None:
        """Write the result of a run that ended early."""
        self._finish()

    def _finish(self) -> None:
        """Stop profiling and write the result; only the first call has an effect."""
        if self._done:
            return
        self._done = True
        if self._profile is None or self._first is None:
            self._say(f"no step was profiled: the run was shorter than the warm-up of {WARM_UP_STEPS} records")
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - self._started_s
        joules = self._joules()
        self._profile.stop()
        profiled = [record for record in self.steps if record.step > self._first.step]
        if not profiled:
            self._say(f"no step was profiled: the run ended after {self._first.step} steps")
            return
        path = self._folder / "trace.json.gz"
        self._profile.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            kernels = kernels_of(json.load(file))
        breakdown = break_down(
            kernels or operators_of(self._profile),
            wall_s=wall_s,
            num_steps=profiled[-1].step - self._first.step,
            data_wait_s=sum(record.data_wait_s for record in profiled) / len(profiled),
        )
        energy = None
        if self._started_joules is not None and joules is not None:
            # rates are means over the steps since the last record; for one rank, as the counter is that of one GPU
            num_tokens = sum(own.tokens_per_s * own.step_s * own.num_recorded / own.num_ranks for own in profiled)
            num_steps = sum(own.num_recorded for own in profiled)
            energy = Energy(joules - self._started_joules, wall_s, num_steps, num_tokens)
        measured = asdict(energy) if energy else None
        DurableIO().write_json(self._folder / "profile.json", {**asdict(breakdown), "energy": measured})
        for line in render(breakdown, self._first.step_s):
            self._say(line)
        self._say(energy.line if energy else f"energy: not measured: {self._why_no_energy}")
        self._say(f"written to {self._folder / 'profile.json'} and trace.json.gz (chrome://tracing, ui.perfetto.dev)")

    def _joules(self) -> float | None:
        """Read the counter; None, and why, where there is none."""
        try:
            return self._read_joules()
        except ResourceError as error:
            self._why_no_energy = str(error)
            return None


# the counter moves about this often on data-center GPUs; benchmarks/joules.py prints the period it finds
COUNTER_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules that one GPU, memory and board included, used in `wall_s` seconds for its share of `num_tokens` tokens.

    `uncertainty` is relative: the counter may lag by its period at both ends of the window.
    """

    joules: float
    wall_s: float
    num_steps: int
    num_tokens: float

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.joules / self.wall_s

    @property
    def uncertainty(self) -> float:
        """The largest relative error that the counter's period causes."""
        return COUNTER_PERIOD_S / self.wall_s

    @property
    def line(self) -> str:
        return (
            f"energy: {self.joules / self.num_steps:,.1f} J a step, {self.joules / self.num_tokens * 1e3:,.2f} mJ a "
            f"token, {self.watts:,.0f} W on average; {self.joules:,.1f} J in {self.wall_s:.2f} s, within "
            f"{self.uncertainty:.0%}; one GPU, idle power included"
        )
