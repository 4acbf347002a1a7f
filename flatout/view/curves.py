"""The curves of one run, or of several over each other: by step, by tokens and by time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from flatout.track.figures import Figure, Table, named
from flatout.track.record import EVAL, EVAL_OF_DATA, STEP, STEP_PARTS, EvalRecord, StepRecord
from flatout.track.run_log import MAX_NUMBER, RunLog
from flatout.track.summary import after_warm_up, seconds_of
from flatout.view.charts import MAX_HEAT_CELLS, Floats, Series, area_plot, figure, heat_plot, line_plot

# a rank that waits this share of a step for the slowest one has the darkest color
_DARKEST_WAIT = 0.25
# a layer whose busiest expert has this many times the mean load has the darkest color
_DARKEST_LOAD = 8.0
# an expert with this many times the mean load has the darkest color; one with the mean load is half as dark
_DARKEST_EXPERT = 2.0
# what a chart says behind its unit of how the ranks' values combine
_OVER_RANKS = {"max": ", highest of all ranks", "mean": ", mean of all ranks"}
# places of records by axis: "step", "tokens" and "time"
Axes = Mapping[str, Floats]


@dataclass(frozen=True)
class _Line:
    name: str
    row: Figure
    axes: Axes
    ys: Floats
    is_eval: bool = False


@dataclass(frozen=True)
class _Run:
    """A run with the places of its steps and evaluations on each axis."""

    name: str
    log: RunLog
    axes: Axes
    eval_axes: Axes

    def lines(self, title: str) -> list[_Line]:
        """Return the lines of the chart of this title, those of steps before those of evaluations."""
        steps, evals = self.log.steps, self.log.evals
        lines = [_line(row.label, row, self.axes, [_value(one, name, row) for one in steps])
                 for name, row in _rows(STEP, title, steps).items()]  # fmt: skip
        lines += [_line("evaluation", row, self.eval_axes, [_value(one, name, row) for one in evals], is_eval=True)
                  for name, row in _rows(EVAL, title, evals).items()]  # fmt: skip
        for name, row in _rows(EVAL_OF_DATA, title).items():
            for data in dict.fromkeys(data for one in evals for data in one.by_data):
                values = [_value(one.by_data.get(data), name, row) for one in evals]
                lines.append(_line(data, row, self.eval_axes, values, is_eval=True))
        # a record has 0 for what an earlier version did not measure
        return [line for line in lines if np.isfinite(line.ys).any() and (line.row.chart == title) and line.ys.any()]


def _rows(table: Table, title: str, records: Sequence[StepRecord | EvalRecord] = ()) -> dict[str, Figure]:
    """Return the rows of a chart; its title may be the name of a figure that an objective names."""
    is_named = any(title in record.metrics for record in records)
    return {title: named(title)} if is_named else {name: row for name, row in table.items() if row.chart == title}


def _value(record: Any, name: str, row: Figure) -> float:
    value = None if record is None else record.metrics.get(name, getattr(record, name, None))
    return math.nan if value is None else value * row.scale


def _line(name: str, row: Figure, axes: Axes, values: Sequence[float], *, is_eval: bool = False) -> _Line:
    return _Line(name, row, axes, np.array(values, dtype=np.float64), is_eval)


def _titles(logs: Iterable[RunLog]) -> list[str]:
    """Return the charts of the table and those of figures that objectives name, which follow those of evaluations."""
    own = [row.chart for row in STEP.values() if row.chart and row not in STEP_PARTS.values()]
    judged = [row.chart for row in EVAL.values() if row.chart]
    metrics = [name for log in logs for ones in (log.steps, log.evals) for one in ones for name in one.metrics]
    return list(dict.fromkeys((*judged, *metrics, *own)))


def curves(logs: Mapping[str, RunLog]) -> str:
    """Return the charts of runs by name as HTML; nothing if none has a step or an evaluation."""
    longest_s = max((log.steps[-1].elapsed_s for log in logs.values() if log.steps), default=0.0)
    seconds, unit = next((u for u in ((3600, "hours"), (60, "minutes")) if longest_s > 2 * u[0]), (1, "seconds"))
    x_names = {"step": "step", "tokens": "tokens", "time": f"{unit} of training"}
    runs = [_on_axes(name, log, seconds) for name, log in logs.items()]
    charts: list[str] = []
    for title in _titles(logs.values()):
        of_runs = [(run.name, run.lines(title)) for run in runs]
        if len(runs) == 1:
            charts.append(_chart(title, of_runs[0][1], x_names))
            continue
        for shown, is_eval in ((title, False), (f"{title}, evaluation", True)):
            # the first line stands for its run
            firsts = [(name, [one for one in lines if one.is_eval == is_eval][:1]) for name, lines in of_runs]
            charts.append(_chart(shown, [replace(one, name=name) for name, ones in firsts for one in ones], x_names))
    if len(runs) == 1:
        charts += [
            _balance(runs[0], x_names),
            _step_time(runs[0], x_names),
            _waiting(runs[0], x_names),
            *_experts(runs[0], x_names),
        ]
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _on_axes(name: str, log: RunLog, unit_s: float) -> _Run:
    steps = np.array([0.0, *(record.step for record in log.steps)])
    tokens = np.cumsum([0.0, *(record.tokens_per_s * seconds_of(record) for record in log.steps)])
    seconds = np.maximum.accumulate([0.0, *(record.elapsed_s / unit_s for record in log.steps)])
    at = np.array([float(record.step) for record in log.evals])
    eval_axes = {"step": at, "tokens": np.interp(at, steps, tokens), "time": np.interp(at, steps, seconds)}
    return _Run(name, log, {"step": steps[1:], "tokens": tokens[1:], "time": seconds[1:]}, eval_axes)


def _chart(title: str, lines: Sequence[_Line], x_names: Mapping[str, str]) -> str:
    """Return a chart of lines on every axis, also on a log scale if its first line has one; nothing without lines."""
    if not lines:
        return ""
    first, plots = lines[0].row, []
    for scale in ("linear", "log") if first.has_log else ("",):
        for axis, x_name in x_names.items():
            drawn = [
                Series(one.name, one.axes[axis], one.ys, color, not (one.row.is_smooth or one.is_eval), one.is_eval)
                for color, one in enumerate(lines)
            ]
            show = {"axis": axis} | ({"scale": scale} if scale else {})
            plots.append(line_plot(drawn, x_name, show, from_zero=first.from_zero, is_log=scale == "log"))
    entries = [(one.name, color, float(one.ys[np.isfinite(one.ys)][-1])) for color, one in enumerate(lines)]
    return figure(title, plots, unit=first.shown_unit + _OVER_RANKS.get(first.ranks, ""), entries=entries)


def _balance(run: _Run, x_names: Mapping[str, str]) -> str:
    """Return the balance of ranks, planned and measured; nothing for one rank."""
    steps, row = run.log.steps, STEP["balance"]
    values = {
        "planned": [record.balance if record.num_ranks > 1 else None for record in steps],
        "measured": [record.measured_balance for record in steps],
    }
    lines = [_line(name, row, run.axes, [math.nan if one is None else row.scale * one for one in of_name])
             for name, of_name in values.items()]  # fmt: skip
    return _chart("Balance of ranks", [line for line in lines if np.isfinite(line.ys).any()], x_names)


def _step_time(run: _Run, x_names: Mapping[str, str]) -> str:
    """Return the parts of a step as stacked areas, with their share in the legend; without warm-up steps."""
    steps = after_warm_up(run.log)
    if not steps:
        return ""
    is_measured = np.isin(run.axes["step"], [record.step for record in steps])
    parts = np.array([[getattr(record, name) for record in steps] for name in STEP_PARTS])
    parts = np.vstack([parts, np.maximum(0.0, np.array([record.step_s for record in steps]) - parts.sum(axis=0))])
    names = [*(row.label for row in STEP_PARTS.values()), "other"]
    means = np.average(parts, axis=1, weights=[record.num_recorded for record in steps])
    total = float(means.sum()) or 1.0
    plots = [area_plot(names, run.axes[axis][is_measured], parts, x, {"axis": axis}) for axis, x in x_names.items()]
    shares = [f"{mean / total:.1%}" for mean in means]
    entries = list(zip(names, range(len(names)), shares, strict=True))
    return figure("Step time", plots, unit=f"seconds; {total:.3g} in the mean", entries=entries, is_wide=True)


def _waiting(run: _Run, x_names: Mapping[str, str]) -> str:
    """Return how long each rank waits for the slowest one, as a strip for each rank."""
    with_wait = [index for index, record in enumerate(run.log.steps) if max(record.rank_busy_s, default=0.0) > 1e-9]
    if not with_wait:
        return ""
    # a resumed run may have another number of ranks
    by_rank = zip_longest(*(run.log.steps[index].rank_busy_s for index in with_wait), fillvalue=math.nan)
    busy = np.clip(np.array(list(by_rank)), 0.0, MAX_NUMBER)
    waits = 100 * (1.0 - busy / np.fmax.reduce(busy, axis=0))
    plots = [
        heat_plot("rank", run.axes[axis][with_wait], waits, x_name, 100 * _DARKEST_WAIT, {"axis": axis})
        for axis, x_name in x_names.items()
    ]
    unit = f"% of its busy time; darkest: {_DARKEST_WAIT:.0%} or more"
    return figure("Waiting for the slowest rank", plots, unit=unit, is_wide=True)


def _experts(run: _Run, x_names: Mapping[str, str]) -> Iterator[str]:
    """Yield how unevenly each layer's experts are used, as a strip for each layer: by step, and by expert at last."""
    with_experts = [index for index, record in enumerate(run.log.steps) if record.expert_peak_load]
    if not with_experts:
        return
    records = [run.log.steps[index] for index in with_experts]
    peaks = np.array(list(zip_longest(*(record.expert_peak_load for record in records), fillvalue=math.nan)))
    entropy = np.array(list(zip_longest(*(record.expert_entropy for record in records), fillvalue=math.nan)))
    for title, unit, values, full in (
        ("Load of experts", f"largest / mean of a layer; darkest: {_DARKEST_LOAD:g} or more", peaks, _DARKEST_LOAD),
        ("Unevenness of experts", "% of the entropy of equal loads lost; darkest: all", 100 * (1 - entropy), 100.0),
    ):
        shown = np.clip(values, 0.0, MAX_NUMBER)
        plots = [
            heat_plot("layer", run.axes[axis][with_experts], shown, x_name, full, {"axis": axis})
            for axis, x_name in x_names.items()
        ]
        yield figure(title, plots, unit=unit, is_wide=True)
    for record in [record for record in records if any(record.expert_loads)][-1:]:
        loads = np.clip(np.array(list(zip_longest(*record.expert_loads, fillvalue=math.nan))).T, 0.0, MAX_NUMBER)
        places = np.arange(loads.shape[1], dtype=np.float64)
        plot = heat_plot("layer", places, loads, "expert", _DARKEST_EXPERT, max_cells=2 * MAX_HEAT_CELLS)
        unit = f"load / mean in step {record.step:,}; darkest: {_DARKEST_EXPERT:g} or more"
        yield figure("Load of each expert", [plot], unit=unit, is_wide=True)
