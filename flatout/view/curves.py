"""The curves of one run, or of several over each other: by step, by tokens and by time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from flatout.track.figures import Figure, Table, named
from flatout.track.record import EVAL, EVAL_OF_DATA, HELD_OUT, ROUND, STEP, STEP_PARTS
from flatout.track.run_log import MAX_NUMBER, RunLog
from flatout.track.summary import after_warm_up, seconds_of
from flatout.view.charts import Axes, Chart, Line, area_chart, line_chart, strip_chart

# a rank that waits this share of a step for the slowest one has the darkest color
_DARKEST_WAIT = 0.25
# a layer whose busiest expert has this many times the mean load has the darkest color
_DARKEST_LOAD = 8.0
# an expert with this many times the mean load has the darkest color; one with the mean load is half as dark
_DARKEST_EXPERT = 2.0
# what lines are drawn over, and what the title of a chart of several runs says of it
_KINDS = {"steps": "", "evals": ", evaluation", "rounds": ""}
# what a chart says behind its unit of how the ranks' values combine
_OVER_RANKS = {"max": ", highest of all ranks", "mean": ", mean of all ranks"}


@dataclass(frozen=True)
class _Run:
    """A run with the places of its steps on each axis."""

    name: str
    log: RunLog
    axes: Axes
    axes_at: Callable[[Sequence[int]], Axes]
    """Returns the places of what was recorded after these steps."""
    x_names: Mapping[str, str]
    """What each axis is called."""


def curves(logs: Mapping[str, RunLog]) -> list[Chart]:
    """Return the charts of runs by name; none if no run has a step or an evaluation."""
    longest_s = max((log.steps[-1].elapsed_s for log in logs.values() if log.steps), default=0.0)
    seconds, unit = next((u for u in ((3600, "hours"), (60, "minutes")) if longest_s > 2 * u[0]), (1, "seconds"))
    runs = [_on_axes(name, log, seconds, f"{unit} of training") for name, log in logs.items()]
    titles = list(_titles(logs.values()))
    if len(runs) > 1:
        return [chart for title, row in titles for chart in _beside(title, row, runs)]
    lines = [(title, row, [one for kind in _KINDS for one in _lines(runs[0], title, kind)]) for title, row in titles]
    charts = [_line_chart(title, row, of_title, runs[0]) for title, row, of_title in lines if of_title]
    return [*charts, *_balance(runs[0]), *_step_time(runs[0]), *_waiting(runs[0]), *_experts(runs[0])]


def _titles(logs: Iterable[RunLog]) -> Iterator[tuple[str, Figure]]:
    """Yield each chart and the row that says how it is drawn; figures that objectives name follow the judged ones."""
    kinds = [(log.steps, log.evals, log.rounds, log.held_out) for log in logs]
    metrics = (name for records in kinds for of_kind in records for one in of_kind for name in one.metrics)
    tables = (*STEP.values(), *ROUND.values(), *HELD_OUT.values())
    rows = [row for row in tables if row.chart and row not in STEP_PARTS.values()]
    judged = {row.chart for row in (HELD_OUT if any(of_kind[2] for of_kind in kinds) else EVAL).values()}
    rows.sort(key=lambda row: row.chart not in judged)
    place = sum(row.chart in judged for row in rows)
    rows[place:place] = [named(name) for name in dict.fromkeys(metrics)]
    firsts: dict[str, Figure] = {}
    for row in rows:
        firsts.setdefault(row.chart, row)
    yield from firsts.items()


def _lines(run: _Run, title: str, kind: str) -> list[Line]:
    """Return the lines of a chart over steps, evals or rounds; an evaluation's of each data set come last."""
    log, kinds = run.log, list[tuple[Table, Sequence[Any], Sequence[Any], str]]()
    if kind == "steps":
        kinds = [(STEP, log.steps, log.steps, title)]
    elif kind == "evals":
        kinds = [(EVAL, log.evals, log.evals, "evaluation")]
        for data in dict.fromkeys(data for one in log.evals for data in one.by_data):
            kinds.append((EVAL_OF_DATA, [one.by_data.get(data) for one in log.evals], log.evals, data))
    else:
        kinds = [(HELD_OUT, log.held_out, log.held_out, "held out"), (ROUND, log.rounds, log.rounds, "round")]
    lines = []
    for table, records, places, label in kinds:
        axes = run.axes_at([one.step for one in places])
        for name, row in _rows(table, title, places if table is not EVAL_OF_DATA else ()).items():
            of_row = label if row.label == title or table is EVAL_OF_DATA else row.label
            lines.append(Line(of_row, axes, _values(records, name, row), row.is_smooth, has_dots=kind != "steps"))
    return [line for line in lines if np.isfinite(line.ys).any()]


def _beside(title: str, row: Figure, runs: Sequence[_Run]) -> Iterator[Chart]:
    """Yield the charts of several runs, of steps and of evaluations; the first line of each stands for its run."""
    for kind, shown in _KINDS.items():
        firsts = [(run.name, line) for run in runs for line in _lines(run, title, kind)[:1]]
        if firsts:
            lines = [replace(line, name=name) for name, line in firsts]
            yield _line_chart(title + shown, row, lines, max(runs, key=lambda run: len(run.log.steps)))


def _rows(table: Table, title: str, records: Sequence[Any] = ()) -> dict[str, Figure]:
    """Return the rows of a chart; its title may be the name of a figure that an objective names."""
    is_named = any(title in record.metrics for record in records)
    return {title: named(title)} if is_named else {name: row for name, row in table.items() if row.chart == title}


def _values(records: Iterable[Any], name: str, row: Figure) -> Any:
    """Return (n,) values of a figure as they are shown; NaN where a record has none."""
    values = (None if one is None else one.metrics.get(name, getattr(one, name, None)) for one in records)
    return np.array([math.nan if value is None else value * row.scale for value in values], dtype=np.float64)


def _on_axes(name: str, log: RunLog, unit_s: float, time_name: str) -> _Run:
    steps = np.array([0.0, *(record.step for record in log.steps)])
    tokens = np.cumsum([0.0, *(record.tokens_per_s * seconds_of(record) for record in log.steps)])
    seconds = np.maximum.accumulate([0.0, *(record.elapsed_s / unit_s for record in log.steps)])

    def axes_at(at_steps: Sequence[int]) -> Axes:
        at = np.array(at_steps, np.float64)
        return {"step": at, "tokens": np.interp(at, steps, tokens), "time": np.interp(at, steps, seconds)}

    axes = {"step": steps[1:], "tokens": tokens[1:], "time": seconds[1:]}
    return _Run(name, log, axes, axes_at, {"step": "step", "tokens": "tokens", "time": time_name})


def _line_chart(title: str, row: Figure, lines: Sequence[Line], run: _Run) -> Chart:
    unit = row.shown_unit + _OVER_RANKS.get(row.ranks, "")
    return line_chart(title, unit, lines, run.x_names, from_zero=row.from_zero, has_log=row.has_log)


def _balance(run: _Run) -> Iterator[Chart]:
    """Yield the balance of ranks, planned and measured."""
    planned = [record.balance if record.num_ranks > 1 else None for record in run.log.steps]
    values = {"planned": planned, "measured": [record.measured_balance for record in run.log.steps]}
    row = STEP["balance"]
    lines = [
        Line(name, run.axes, np.array([math.nan if one is None else one * row.scale for one in shares]))
        for name, shares in values.items()
        if any(one is not None for one in shares)
    ]
    if lines:
        yield _line_chart("Balance of ranks", row, lines, run)


def _step_time(run: _Run) -> Iterator[Chart]:
    """Yield the parts of a step as stacked areas, with their share in the legend; without warm-up steps."""
    steps = after_warm_up(run.log)
    if not steps:
        return
    is_measured = np.isin(run.axes["step"], [record.step for record in steps])
    parts = {row.label: np.array([getattr(record, name) for record in steps]) for name, row in STEP_PARTS.items()}
    rest = np.array([record.step_s for record in steps]) - np.sum(list(parts.values()), axis=0)
    parts["other"] = np.maximum(0.0, rest)
    means = np.average(list(parts.values()), axis=1, weights=[record.num_recorded for record in steps])
    total = float(means.sum()) or 1.0
    axes = {axis: xs[is_measured] for axis, xs in run.axes.items()}
    shares = [f"{mean / total:.1%}" for mean in means]
    yield area_chart("Step time", f"seconds; {total:.3g} in the mean", parts, axes, run.x_names, shares)


def _waiting(run: _Run) -> Iterator[Chart]:
    """Yield how long each rank waits for the slowest one, as a strip for each rank."""
    with_wait = [index for index, record in enumerate(run.log.steps) if record.measured_balance is not None]
    if not with_wait:
        return
    # a resumed run may have another number of ranks
    by_rank = zip_longest(*(run.log.steps[index].rank_busy_s for index in with_wait), fillvalue=math.nan)
    busy = np.clip(np.array(list(by_rank)), 0.0, MAX_NUMBER)
    waits = 100 * (1.0 - busy / np.fmax.reduce(busy, axis=0))
    axes = {axis: xs[with_wait] for axis, xs in run.axes.items()}
    unit = f"% of its busy time; darkest: {_DARKEST_WAIT:.0%} or more"
    yield strip_chart("Waiting for the slowest rank", unit, "rank", waits, axes, run.x_names, 100 * _DARKEST_WAIT)


def _experts(run: _Run) -> Iterator[Chart]:
    """Yield how unevenly each layer's experts are used, as a strip for each layer: by step, and by expert at last."""
    with_experts = [index for index, record in enumerate(run.log.steps) if record.expert_peak_load]
    if not with_experts:
        return
    records = [run.log.steps[index] for index in with_experts]
    axes = {axis: xs[with_experts] for axis, xs in run.axes.items()}
    peaks = np.array(list(zip_longest(*(record.expert_peak_load for record in records), fillvalue=math.nan)))
    entropy = np.array(list(zip_longest(*(record.expert_entropy for record in records), fillvalue=math.nan)))
    for title, unit, values, full in (
        ("Load of experts", f"largest / mean of a layer; darkest: {_DARKEST_LOAD:g} or more", peaks, _DARKEST_LOAD),
        ("Unevenness of experts", "% of the entropy of equal loads lost; darkest: all", 100 * (1 - entropy), 100.0),
    ):
        yield strip_chart(title, unit, "layer", values, axes, run.x_names, full)
    for record in [record for record in records if any(record.expert_loads)][-1:]:
        loads = np.array(list(zip_longest(*record.expert_loads, fillvalue=math.nan))).T
        places = {"": np.arange(loads.shape[1], dtype=np.float64)}
        unit = f"load / mean in step {record.step:,}; darkest: {_DARKEST_EXPERT:g} or more"
        yield strip_chart("Load of each expert", unit, "layer", loads, places, {"": "expert"}, _DARKEST_EXPERT)
