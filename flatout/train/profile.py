"""Where a step's time goes: a few profiled steps, each kernel put into one of a dozen rooms, and what was idle."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.track.record import Record, StepRecord
from flatout.train.storage import Storage

WARM_UP_STEPS = 3

# ranges that our own code sets around what kernel names cannot tell
RANGES = {"flatout::head": "head", "flatout::optimizer": "optimizer"}

# the first pattern found in a kernel's or operator's name counts
_ROOMS = tuple(
    (room, re.compile(pattern, re.IGNORECASE))
    for room, pattern in (
        ("communication", r"nccl|all_reduce|allreduce|all_gather|reduce_scatter"),
        ("attention", r"flash|fmha|attention|mha_"),
        ("optimizer", r"adam|multi_tensor_apply|_foreach|lpnorm|sgd"),
        # LoRA's products are as narrow as its rank, and so are the tiles that cuBLAS picks for them
        ("LoRA", r"lora|low_rank|nvjet_\w*?_(?:\d+x(?:8|16|24|32)|(?:8|16|24|32)x\d+)_"),
        ("quantise", r"quanti[sz]e|(?<!_)quant_|nf4|amax"),
        (
            "GEMM",
            r"nvjet|matmul|gemm|gemv|cutlass|xmma|cublas|split_?k|^triton_(?:tem|mm)_|scaled_mm|::(?:add|b|baddb)?mm$|linear",
        ),
        ("norms, elementwise", r"^triton_"),
        ("copies", r"memcpy|memset|copy|catarray|::cat$|fill|zero"),
        (
            "norms, elementwise",
            r"elementwise|vectorized|reduce|norm|softmax|index|gather|scatter|embedding|silu|mul|add|sum",
        ),
    )
)
_REST = "other"


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel on a device's stream, or an operator on a CPU thread; times in microseconds.

    `ranges` are the names of the ranges around it.
    """

    name: str
    start_us: float
    duration_us: float
    stream: int
    ranges: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One room: seconds a step, share of the step's wall time, kernels a step."""

    room: str
    step_s: float
    share: float
    num_kernels: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Rows by time. Rooms sum to the busy time plus `overlap_s`, what ran at once on several streams.

    `idle_s` is wall time in which nothing ran; `data_wait_s` how long the host was blocked for data, which lies within
    it where the device had nothing else to do. All are seconds a step.
    """

    num_steps: int
    step_s: float
    rows: tuple[Row, ...]
    idle_s: float
    overlap_s: float
    data_wait_s: float


def room_of(event: Event) -> str:
    """By the innermost range that is ours, else by name."""
    for name in reversed(event.ranges):
        if name in RANGES:
            return RANGES[name]
    return next((room for room, pattern in _ROOMS if pattern.search(event.name)), _REST)


def break_down(events: Sequence[Event], *, wall_s: float, num_steps: int, data_wait_s: float) -> Breakdown:
    """Where the time of `num_steps` steps went that took `wall_s`; `data_wait_s` is a step's."""
    totals: dict[str, list[float]] = {}
    for event in events:
        total = totals.setdefault(room_of(event), [0.0, 0.0])
        total[0] += event.duration_us / 1e6
        total[1] += 1
    busy_s = union_us((event.start_us, event.start_us + event.duration_us) for event in events) / 1e6
    rows = [Row(room, s / num_steps, s / wall_s, count / num_steps) for room, (s, count) in totals.items()]
    return Breakdown(
        num_steps=num_steps,
        step_s=wall_s / num_steps,
        rows=tuple(sorted(rows, key=lambda row: -row.step_s)),
        idle_s=max(0.0, wall_s - busy_s) / num_steps,
        overlap_s=max(0.0, sum(row.step_s for row in rows) - busy_s / num_steps),
        data_wait_s=data_wait_s,
    )


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """Kernels and copies of a Chrome trace with the ranges around them; without a device, pieces of operators."""
    complete = [entry for entry in trace["traceEvents"] if entry.get("ph") == "X"]
    kernels = [entry for entry in complete if entry.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        return _with_ranges(kernels, [entry for entry in complete if entry.get("cat") == "gpu_user_annotation"])
    operators = [entry for entry in complete if entry.get("cat") == "cpu_op"]
    ranges = [entry for entry in complete if entry.get("cat") == "user_annotation"]
    return [own for event in _by_stream(_with_ranges(operators, ranges)) for own in _own_times(event)]


def _with_ranges(entries: list[dict[str, Any]], ranges: list[dict[str, Any]]) -> list[Event]:
    """Events in order of start; a range is around what starts in it on the same stream, or thread."""
    events: list[Event] = []
    waiting = sorted((entry for entry in ranges if entry["name"] in RANGES), key=lambda entry: -entry["ts"])
    open_ranges: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: (entry["ts"], -entry["dur"])):
        while waiting and waiting[-1]["ts"] <= entry["ts"]:
            open_ranges.append(waiting.pop())
        open_ranges = [one for one in open_ranges if one["ts"] + one["dur"] > entry["ts"]]
        names = tuple(one["name"] for one in open_ranges if one["tid"] == entry["tid"])
        events.append(Event(entry["name"], entry["ts"], entry["dur"], _number(entry["tid"]), names))
    return events


def _number(stream: object) -> int:
    return stream if isinstance(stream, int) else hash(stream)


def _by_stream(events: list[Event]) -> list[list[Event]]:
    streams: dict[int, list[Event]] = {}
    for event in events:
        streams.setdefault(event.stream, []).append(event)
    return list(streams.values())


def _own_times(nested: list[Event]) -> list[Event]:
    """Nested events of one thread, by start, as disjoint pieces: each moment belongs to the innermost event."""
    pieces: list[Event] = []
    stack: list[Event] = []
    reached = float("-inf")

    def close_until(time_us: float) -> None:
        nonlocal reached
        while stack:
            end = stack[-1].start_us + stack[-1].duration_us
            until = min(end, time_us)
            if until > reached:
                inner = stack[-1]
                pieces.append(Event(inner.name, reached, until - reached, inner.stream, inner.ranges))
                reached = until
            if end > time_us:
                return
            stack.pop()

    for event in nested:
        close_until(event.start_us)
        stack.append(event)
        reached = max(reached, event.start_us)
    close_until(float("inf"))
    return pieces


def render(breakdown: Breakdown, usual_step_s: float | None = None) -> list[str]:
    """The table as lines; `usual_step_s` is a step's time before profiling slowed the host down."""
    usual = "" if usual_step_s is None else f" ({usual_step_s * 1e3:,.1f} ms before profiling)"
    lines = [f"{breakdown.num_steps} steps of {breakdown.step_s * 1e3:,.1f} ms{usual}; a step's time went to"]
    rest = {"idle": breakdown.idle_s, "at once on several streams": -breakdown.overlap_s}
    rows = [(row.room, row.step_s, f"{row.num_kernels:,.0f} kernels") for row in breakdown.rows]
    rows += [(name, seconds, "") for name, seconds in rest.items() if abs(seconds) > 1e-4 * breakdown.step_s]
    rows.append(("host blocked for data", breakdown.data_wait_s, "within idle, if at all"))
    return lines + [
        f"  {name:<28}{seconds * 1e3:>10,.2f} ms {seconds / breakdown.step_s:>7.1%}  {note}".rstrip()
        for name, seconds, note in rows
    ]


class Profiler:
    """A tracker that profiles some steps after the warm-up and writes profile.json and trace.json.gz to the run folder.

    See Tracker for the methods. `say` prints one line.
    """

    def __init__(self, folder: Path, num_steps: int, say: Callable[[str], None]) -> None:
        self._folder, self._num_steps, self._say = folder, num_steps, say
        self._seen: list[StepRecord] = []
        self._profile: Any = None
        self._first: StepRecord | None = None
        self._started_s = 0.0
        self._done = False

    def stage(self, name: str, text: str) -> None:
        """Nothing."""

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Nothing."""

    def record(self, record: Record) -> None:
        """Start once enough steps are warm, stop when enough are profiled."""
        if not isinstance(record, StepRecord) or self._done:
            return
        self._seen.append(record)
        if self._first is None:
            if len(self._seen) >= WARM_UP_STEPS:
                self._start(record)
        elif record.step - self._first.step >= self._num_steps:
            self._stop()

    def close(self) -> None:
        """A run that ended early still writes what was profiled."""
        if self._first is not None and not self._done:
            if self._seen[-1] is self._first:
                self._profile.stop()
                self._say(f"no step was profiled: the run ended after {self._first.step} steps")
            else:
                self._stop()
        elif not self._done:
            self._say(f"no step was profiled: the run was shorter than the warm-up of {WARM_UP_STEPS} records")
        self._done = True

    def _start(self, record: StepRecord) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._first = record
        self._profile = profile(activities=activities)
        self._wait_for_device()
        self._profile.start()
        self._started_s = time.perf_counter()

    def _stop(self) -> None:
        self._done = True
        self._wait_for_device()
        wall_s = time.perf_counter() - self._started_s
        self._profile.stop()
        assert self._first is not None
        path = self._folder / "trace.json"
        self._profile.export_chrome_trace(str(path))
        text = path.read_text()
        path.unlink()
        Storage().write_bytes(self._folder / "trace.json.gz", gzip.compress(text.encode(), 5))
        profiled = [record for record in self._seen if record.step > self._first.step]
        breakdown = break_down(
            events_of(json.loads(text)),
            wall_s=wall_s,
            num_steps=profiled[-1].step - self._first.step,
            data_wait_s=sum(record.data_wait_s for record in profiled) / len(profiled),
        )
        Storage().write_json(self._folder / "profile.json", asdict(breakdown))
        for line in render(breakdown, self._first.step_s):
            self._say(line)
        self._say(f"written to {self._folder / 'profile.json'} and trace.json.gz (chrome://tracing, ui.perfetto.dev)")

    def _wait_for_device(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
