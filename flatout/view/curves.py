"""The curves of one run, or of several over each other: by step, by tokens and by time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from flatout.track.record import EvalRecord, StepRecord
from flatout.track.run_log import MAX_NUMBER, RunLog
from flatout.track.summary import after_warm_up, seconds_of
from flatout.view.charts import MAX_HEAT_CELLS, Floats, Series, area_plot, figure, heat_plot, line_plot
from flatout.view.facts import measured_balance

_GIB = 2**30
# a rank that waits this share of a step for the slowest one has the darkest color
_DARKEST_WAIT = 0.25
# a layer whose busiest expert has this many times the mean load has the darkest color
_DARKEST_LOAD = 8.0
# an expert with this many times the mean load has the darkest color; one with the mean load is half as dark
_DARKEST_EXPERT = 2.0
# parts of a step, in their order; `other` is what they leave of it
PARTS = ("data_wait", "forward", "backward", "gradient_sum", "checkpoint_wait", "optimizer")


@dataclass(frozen=True)
class _Measure:
    """A chart: named values of a step, the first of which stands for a run beside other runs."""

    title: str
    unit: str
    values: Mapping[str, Callable[[StepRecord], float | None]]
    eval_value: Callable[[EvalRecord], float | None] | None = None
    from_zero: bool = False
    is_smoothed: bool = False
    has_log: bool = False


_MEASURES = (
    _Measure(
        "Loss", "nats per label token, or the objective's unit", {"training": lambda r: r.loss}, lambda e: e.eval_loss,
        is_smoothed=True, has_log=True,
    ),
    _Measure(
        "Token accuracy", "% of label tokens", {"training": lambda r: percent(r.token_accuracy)},
        lambda e: percent(e.eval_token_accuracy), is_smoothed=True,
    ),
    _Measure("Throughput", "tokens/s, all ranks", {
        "tokens": lambda r: r.tokens_per_s,
        "label tokens": lambda r: r.label_tokens_per_s,
        "with filler": lambda r: r.processed_tokens_per_s or None,
    }, from_zero=True, is_smoothed=True),
    _Measure(
        "Model FLOPs utilization", "% of the nominal peak", {"MFU": lambda r: percent(r.mfu)},
        from_zero=True, is_smoothed=True,
    ),
    _Measure(
        "GPU use", "% of the time with a kernel running, mean of all ranks", {"use": lambda r: percent(r.gpu_use)},
        from_zero=True, is_smoothed=True,
    ),
    _Measure("GPU power", "W, all ranks", {"power": lambda r: r.gpu_watts}, from_zero=True, is_smoothed=True),
    _Measure("Memory", "GiB, highest of all ranks", {
        "peak": lambda r: r.peak_memory_bytes / _GIB,
        "peak reserved": lambda r: r.peak_reserved_memory_bytes / _GIB or None,
        "now": lambda r: r.memory_bytes / _GIB or None,
    }, from_zero=True),
    _Measure("Learning rate", "", {"learning rate": lambda r: r.lr}, from_zero=True),
    _Measure(
        "Gradient norm", "before clipping", {"gradient norm": lambda r: r.grad_norm}, is_smoothed=True, has_log=True
    ),
    _Measure("Losses of routers", "without their factors", {
        "balance": lambda r: r.balance_loss,
        "z": lambda r: r.z_loss,
    }, is_smoothed=True),
    _Measure("Balance of ranks", "mean / max of their work", {
        "planned": lambda r: r.balance if r.num_ranks > 1 else None,
        "measured": measured_balance,
    }, is_smoothed=True),
)  # fmt: skip


# places of records by axis: "step", "tokens" and "time"
Axes = Mapping[str, Floats]


@dataclass(frozen=True)
class _Line:
    name: str
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

    def lines(self, measure: _Measure) -> list[_Line]:
        steps, evals = self.log.steps, self.log.evals
        lines = [
            _Line(name, self.axes, np.array([value(record) for record in steps], dtype=np.float64))
            for name, value in measure.values.items()
        ]
        if measure.eval_value:
            lines.append(
                _Line("evaluation", self.eval_axes, np.array([measure.eval_value(one) for one in evals], float), True)
            )
        for name in dict.fromkeys(name for one in evals for name in one.by_data) if measure.has_log else ():
            if measure.eval_value:
                losses = [one.by_data[name].loss if name in one.by_data else math.nan for one in evals]
                lines.append(_Line(name, self.eval_axes, np.array(losses), True))
        return [line for line in lines if np.isfinite(line.ys).any()]


def curves(logs: Mapping[str, RunLog]) -> str:
    """Return the charts of runs by name as HTML; nothing if none has a step or an evaluation."""
    longest_s = max((log.steps[-1].elapsed_s for log in logs.values() if log.steps), default=0.0)
    seconds, unit = next((u for u in ((3600, "hours"), (60, "minutes")) if longest_s > 2 * u[0]), (1, "seconds"))
    x_names = {"step": "step", "tokens": "tokens", "time": f"{unit} of training"}
    runs = [_on_axes(name, log, seconds) for name, log in logs.items()]
    charts: list[str] = []
    metrics = (one.metrics for log in logs.values() for ones in (log.steps, log.evals) for one in ones)
    names = dict.fromkeys(name for metric in metrics for name in metric)
    for measure in (*_MEASURES[:2], *map(_named, names), *_MEASURES[2:]):
        of_runs = [(run.name, run.lines(measure)) for run in runs]
        if len(runs) == 1:
            charts.append(_chart(measure.title, measure, of_runs[0][1], x_names))
            continue
        for title, is_eval in ((measure.title, False), (f"{measure.title}, evaluation", True)):
            # the first line stands for its run
            firsts = [(name, [one for one in lines if one.is_eval == is_eval][:1]) for name, lines in of_runs]
            lines = [replace(line, name=name) for name, metric in firsts for line in metric]
            charts.append(_chart(title, measure, lines, x_names))
    if len(runs) == 1:
        charts += [_step_time(runs[0], x_names), _waiting(runs[0], x_names), *_experts(runs[0], x_names)]
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def percent(share: float | None) -> float | None:
    """Return a share in percent; None if it was not measured."""
    return None if share is None else 100 * share


def _named(name: str) -> _Measure:
    """Return the chart of a figure that an objective names."""
    return _Measure(
        name, "", {"training": lambda r: r.metrics.get(name)}, lambda e: e.metrics.get(name), is_smoothed=True
    )


def _on_axes(name: str, log: RunLog, unit_s: float) -> _Run:
    steps = np.array([0.0, *(record.step for record in log.steps)])
    tokens = np.cumsum([0.0, *(record.tokens_per_s * seconds_of(record) for record in log.steps)])
    seconds = np.maximum.accumulate([0.0, *(record.elapsed_s / unit_s for record in log.steps)])
    at = np.array([float(record.step) for record in log.evals])
    eval_axes = {"step": at, "tokens": np.interp(at, steps, tokens), "time": np.interp(at, steps, seconds)}
    return _Run(name, log, {"step": steps[1:], "tokens": tokens[1:], "time": seconds[1:]}, eval_axes)


def _chart(title: str, measure: _Measure, lines: Sequence[_Line], x_names: Mapping[str, str]) -> str:
    """Return a chart of lines on every axis, also on a log scale if the measure has one."""
    plots = []
    for scale in ("linear", "log") if measure.has_log else ("",):
        for axis, x_name in x_names.items():
            drawn = [
                Series(one.name, one.axes[axis], one.ys, color, measure.is_smoothed and not one.is_eval, one.is_eval)
                for color, one in enumerate(lines)
            ]
            show = {"axis": axis} | ({"scale": scale} if scale else {})
            plots.append(line_plot(drawn, x_name, show, from_zero=measure.from_zero, is_log=scale == "log"))
    entries = [(one.name, color, float(one.ys[np.isfinite(one.ys)][-1])) for color, one in enumerate(lines)]
    return figure(title, plots, unit=measure.unit, entries=entries)


def _step_time(run: _Run, x_names: Mapping[str, str]) -> str:
    """Return the parts of a step as stacked areas, with their share in the legend; without warm-up steps."""
    steps = after_warm_up(run.log)
    if not steps:
        return ""
    is_measured = np.isin(run.axes["step"], [record.step for record in steps])
    parts = np.array([[getattr(record, f"{part}_s") for record in steps] for part in PARTS])
    parts = np.vstack([parts, np.maximum(0.0, np.array([record.step_s for record in steps]) - parts.sum(axis=0))])
    names = [part.replace("_", " ") for part in (*PARTS, "other")]
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
