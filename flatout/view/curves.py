"""The curves of one run, or of several over each other: by step, by tokens and by time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from flatout.track.record import EvalRecord, StepRecord
from flatout.track.run_log import RunLog
from flatout.track.summary import after_warm_up, seconds_of, short_time
from flatout.view.charts import Floats, Series, area_plot, figure, heat_plot, legend, line_plot, series
from flatout.view.scales import tick_label

_GIB = 2**30
# a rank that waits this share of a step for the slowest one has the darkest color
_DARKEST_WAIT = 0.25
# parts of a step, in their order; `other` is what they leave of it
PARTS = ("data_wait", "forward", "backward", "gradient_sum", "checkpoint_wait", "optimizer")


@dataclass(frozen=True)
class _Measure:
    """A chart: named values of a step, the first of which stands for a run beside other runs."""

    title: str
    unit: str
    values: Mapping[str, Callable[[StepRecord], float | None]]
    eval_value: Callable[[EvalRecord], float] | None = None
    from_zero: bool = False
    is_smoothed: bool = False
    has_log: bool = False


_MEASURES = (
    _Measure("Loss", "nats per label token", {"training": lambda r: r.loss}, lambda e: e.eval_loss, False, True, True),
    _Measure(
        "Token accuracy", "% of label tokens", {"training": lambda r: 100 * r.token_accuracy},
        lambda e: 100 * e.eval_token_accuracy, is_smoothed=True,
    ),
    _Measure("Throughput", "tokens/s, all ranks", {
        "tokens": lambda r: r.tokens_per_s,
        "label tokens": lambda r: r.label_tokens_per_s,
        "with filler": lambda r: r.processed_tokens_per_s or None,
    }, from_zero=True, is_smoothed=True),
    _Measure(
        "Model FLOPs utilization", "% of the nominal peak", {"MFU": lambda r: None if r.mfu is None else 100 * r.mfu},
        from_zero=True, is_smoothed=True,
    ),
    _Measure("Memory", "GiB, the rank with most", {
        "peak": lambda r: r.peak_memory_bytes / _GIB,
        "peak reserved": lambda r: r.peak_reserved_memory_bytes / _GIB or None,
        "now": lambda r: r.memory_bytes / _GIB or None,
    }, from_zero=True),
    _Measure("Learning rate", "", {"learning rate": lambda r: r.lr}, from_zero=True),
    _Measure(
        "Gradient norm", "before clipping", {"gradient norm": lambda r: r.grad_norm}, is_smoothed=True, has_log=True
    ),
    _Measure("Balance of ranks", "mean / max of their work", {
        "planned": lambda r: r.balance if r.num_ranks > 1 else None,
        "measured": lambda r: sum(r.rank_busy_s) / len(r.rank_busy_s) / max(r.rank_busy_s) if r.rank_busy_s else None,
    }, is_smoothed=True),
)  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """A run with the places of its steps and evaluations on each axis."""

    name: str
    log: RunLog
    axes: Mapping[str, Floats]
    eval_axes: Mapping[str, Floats]


def curves(logs: Mapping[str, RunLog]) -> str:
    """Return the charts of runs by name as HTML; nothing if none has a step or an evaluation."""
    longest_s = max((log.steps[-1].elapsed_s for log in logs.values() if log.steps), default=0.0)
    seconds, name = next((u for u in ((3600, "hours"), (60, "minutes")) if longest_s > 2 * u[0]), (1, "seconds"))
    x_names = {"step": "step", "tokens": "tokens", "time": f"{name} of training"}
    runs = [_on_axes(name, log, seconds) for name, log in logs.items()]
    charts = [_measured(measure, runs, x_names) for measure in _MEASURES]
    if len(runs) > 1:
        charts.insert(1, _evaluations(runs, x_names))
    else:
        charts += [_step_time(runs[0], x_names), _waiting(runs[0], x_names)]
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _on_axes(name: str, log: RunLog, unit_s: float) -> _Run:
    steps = np.array([0.0, *(record.step for record in log.steps)])
    tokens = np.cumsum([0.0, *(record.tokens_per_s * seconds_of(record) for record in log.steps)])
    seconds = np.maximum.accumulate([0.0, *(record.elapsed_s / unit_s for record in log.steps)])
    at = np.array([float(record.step) for record in log.evals])
    eval_axes = {"step": at, "tokens": np.interp(at, steps, tokens), "time": np.interp(at, steps, seconds)}
    return _Run(name, log, {"step": steps[1:], "tokens": tokens[1:], "time": seconds[1:]}, eval_axes)


def _measured(measure: _Measure, runs: Sequence[_Run], x_names: Mapping[str, str]) -> str:
    """Return one chart: every value of a run alone, or the first value of each run."""
    columns: list[tuple[_Run, str, Floats]] = []
    for run in runs:
        for label, value in list(measure.values.items())[: 1 if len(runs) > 1 else None]:
            ys = series("", (), (value(record) for record in run.log.steps)).ys
            if np.isfinite(ys).any():
                columns.append((run, run.name if len(runs) > 1 else label, ys))
    evals = _eval_lines(measure, runs[0], len(columns)) if len(runs) == 1 else {}
    plots = []
    for scale in ("linear", "log") if measure.has_log else ("",):
        for axis, x_name in x_names.items():
            lines = [
                Series(label, run.axes[axis], ys, color, measure.is_smoothed)
                for color, (run, label, ys) in enumerate(columns)
            ]
            lines += [
                series(label, runs[0].eval_axes[axis], ys, color, has_dots=True) for label, (color, ys) in evals.items()
            ]
            show = {"axis": axis} | ({"scale": scale} if scale else {})
            plots.append(line_plot(lines, x_name, from_zero=measure.from_zero, is_log=scale == "log", show=show))
    entries = [(label, color, _last(ys.tolist())) for color, (_, label, ys) in enumerate(columns)]
    entries += [(label, color, _last(ys)) for label, (color, ys) in evals.items()]
    return figure(measure.title, plots, unit=measure.unit, legend=legend(entries)) if any(plots) else ""


def _eval_lines(measure: _Measure, run: _Run, color: int) -> dict[str, tuple[int, list[float | None]]]:
    """Return color and values of each evaluated data set, or of all together if there is one."""
    if measure.eval_value is None or not run.log.evals:
        return {}
    found: dict[str, tuple[int, list[float | None]]] = {}
    found["evaluation"] = (color, [measure.eval_value(one) for one in run.log.evals])
    names = dict.fromkeys(name for one in run.log.evals for name in one.by_data)
    for place, name in enumerate(names if measure.has_log else (), start=color + 1):
        found[name] = (place, [one.by_data[name].loss if name in one.by_data else None for one in run.log.evals])
    return found


def _evaluations(runs: Sequence[_Run], x_names: Mapping[str, str]) -> str:
    """Return the evaluation losses of several runs."""
    losses = [[one.eval_loss for one in run.log.evals] for run in runs]
    plots = [
        line_plot(
            [
                series(run.name, run.eval_axes[axis], ys, color, has_dots=True)
                for color, (run, ys) in enumerate(zip(runs, losses, strict=True))
            ],
            x_name,
            is_log=scale == "log",
            show={"axis": axis, "scale": scale},
        )
        for scale in ("linear", "log")
        for axis, x_name in x_names.items()
    ]
    entries = [(run.name, color, _last(ys)) for color, (run, ys) in enumerate(zip(runs, losses, strict=True)) if ys]
    return figure("Evaluation loss", plots, unit="nats per label token", legend=legend(entries)) if any(plots) else ""


def _step_time(run: _Run, x_names: Mapping[str, str]) -> str:
    """Return the parts of a step as stacked areas, with their share in the legend; without warm-up steps."""
    steps = after_warm_up(run.log)
    if not steps:
        return ""
    kept = np.isin(run.axes["step"], [record.step for record in steps])
    parts = np.array([[getattr(record, f"{part}_s") for record in steps] for part in PARTS])
    whole = np.array([record.step_s for record in steps])
    parts = np.vstack([parts, np.maximum(0.0, whole - parts.sum(axis=0))])
    names = [part.replace("_", " ") for part in (*PARTS, "other")]
    weights = np.array([record.num_recorded for record in steps])
    means = (parts * weights).sum(axis=1) / weights.sum()
    total = float(means.sum()) or 1.0
    plots = [area_plot(names, run.axes[axis][kept], parts, x, show={"axis": axis}) for axis, x in x_names.items()]
    entries = [
        (name, color, f"{mean / total:.1%}") for color, (name, mean) in enumerate(zip(names, means, strict=True))
    ]
    unit = f"seconds, mean {short_time(total) if total > 1 else f'{total * 1000:.3g} ms'}"
    return figure("Step time", plots, unit=unit, legend=legend(entries), is_wide=True)


def _waiting(run: _Run, x_names: Mapping[str, str]) -> str:
    """Return how long each rank waits for the slowest one, as a strip for each rank."""
    kept = [index for index, record in enumerate(run.log.steps) if any(record.rank_busy_s)]
    if not kept:
        return ""
    rows = zip_longest(*(run.log.steps[index].rank_busy_s for index in kept), fillvalue=math.nan)
    busy = np.array(list(rows))
    waits = 100 * (1.0 - busy / np.fmax.reduce(busy, axis=0))
    plots = [
        heat_plot("rank", run.axes[axis][kept], waits, x_name, full=100 * _DARKEST_WAIT, show={"axis": axis})
        for axis, x_name in x_names.items()
    ]
    unit = f"% of its busy time; darkest: {_DARKEST_WAIT:.0%} or more"
    return figure("Waiting for the slowest rank", plots, unit=unit, is_wide=True)


def _last(ys: Sequence[float | None]) -> str:
    """Return the last value as a legend shows it, with four digits."""
    known = [y for y in ys if y is not None and y == y]
    if not known:
        return ""
    return tick_label(known[-1], 10.0 ** np.floor(np.log10(abs(known[-1]) or 1.0)) / 1000)
