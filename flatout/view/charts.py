"""Charts drawn in Python as SVG: lines, stacked areas, bars, and a strip of colors for each rank.

The marks of a plot stretch to the width of its card. Labels are HTML beside them, so text keeps its size on a phone.
A plot carries its values for the page's script, which shows them under the pointer; without it the chart is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
from numpy.typing import NDArray

from flatout.view.page import text
from flatout.view.scales import Scale, tick_label, x_scale, y_scale

Floats = NDArray[np.float64]

# units of the viewBox; the page stretches it
WIDTH, HEIGHT = 1000, 240
# a longer series is drawn by the least and the greatest value of this many buckets
NUM_BUCKETS = 600
# areas, and cells of a heat strip, are means over this many buckets
NUM_MEANS, MAX_HEAT_CELLS, MAX_HEAT_ROWS = 300, 4000, 64
# a noisy line is smoothed over this share of its points
SMOOTHED_SHARE = 0.02
NUM_COLORS, NUM_SHADES = 8, 9


@dataclass(frozen=True)
class Series:
    """One line: `xs` and `ys` (n,), `xs` ascending; NaN in `ys` is a gap.

    `is_smoothed` draws a moving average over the faint line itself. `has_dots` marks every point.
    """

    name: str
    xs: Floats
    ys: Floats
    color: int = 0
    is_smoothed: bool = False
    has_dots: bool = False


def figure(
    title: str,
    plots: Sequence[str],
    *,
    unit: str = "",
    entries: Sequence[tuple[str, int, float | str]] = (),
    is_wide: bool = False,
) -> str:
    """Return a card with a title, a legend and plots, of which the page shows those of the chosen axis and scale.

    `entries` of the legend are (name, color, last value). Returns nothing if no plot has a mark.
    """
    if not any(plots):
        return ""
    items = []
    for name, color, value in entries:
        # four digits
        shown = (
            value
            if isinstance(value, str)
            else tick_label(value, 10.0 ** math.floor(math.log10(abs(value) or 1)) / 1e3)
        )
        items.append(f'<li class="{_color(color)}"><i></i>{text(name)} <b>{text(shown)}</b></li>')
    legend = f'<ul class="legend">{"".join(items)}</ul>' if items else ""
    return (
        f'<figure class="chart{" wide" if is_wide else ""}"><figcaption><h3>{text(title)}'
        f'<span class="unit">{text(unit)}</span></h3>{legend}</figcaption>{"".join(plots)}</figure>'
    )


def line_plot(
    lines: Sequence[Series],
    x_name: str,
    *,
    from_zero: bool = False,
    is_log: bool = False,
    show: Mapping[str, str] | None = None,
) -> str:
    """Return a plot of lines, or nothing if no line has a finite value.

    `show` has the page's switches under which the plot is visible, such as {"axis": "tokens"}.
    """
    # a log scale leaves out what is not positive
    least = 0.0 if is_log else -math.inf
    drawn = [replace(one, ys=np.where(np.isfinite(one.ys) & (one.ys > least), one.ys, math.nan)) for one in lines]
    drawn = [one for one in drawn if np.isfinite(one.ys).any()]
    if not drawn:
        return ""
    xs = np.concatenate([one.xs for one in drawn])
    ys = np.concatenate([one.ys[np.isfinite(one.ys)] for one in drawn])
    across = x_scale(float(xs.min()), float(xs.max()), WIDTH)
    low = min(0.0, float(ys.min())) if from_zero else float(ys.min())
    up = y_scale(low, float(ys.max()), HEIGHT, is_log=is_log)
    marks, tips = [], []
    for one in drawn:
        xs, ys = downsampled(one.xs, one.ys)
        tip = (xs, ys)
        style = f"line {_color(one.color)}"
        if one.is_smoothed and len(one.xs) > 20:
            marks.append(_path(f"{style} faint", across.place(xs), up.place(ys)))
            xs, ys = downsampled(one.xs, moving_average(one.ys))
            # of a shortened series the mean says more than the extremes
            tip = tip if len(tip[0]) == len(one.xs) else (xs, ys)
        marks.append(_path(style, across.place(xs), up.place(ys)))
        if one.has_dots and len(xs) <= NUM_BUCKETS:
            marks += [
                _path(f"dots {_color(one.color)}", across.place(xs[[i]]), up.place(ys[[i]])) for i in range(len(xs))
            ]
        tips.append(_tip(one.name, one.color, across.place(tip[0]), *tip))
    label = ", ".join(one.name for one in drawn)
    return _plot(label, "".join(marks), across, up, x_name, {"series": tips}, show)


def area_plot(
    names: Sequence[str], xs: Floats, parts: Floats, x_name: str, *, show: Mapping[str, str] | None = None
) -> str:
    """Return stacked areas of `parts` (names, n) over `xs` (n,), each point the mean of a bucket."""
    if not xs.size:
        return ""
    xs, parts = bucket_means(xs, parts, NUM_MEANS)
    if len(xs) == 1:  # one step: as wide as the plot
        xs, parts = np.array([xs[0] - 0.5, xs[0] + 0.5]), np.repeat(parts, 2, axis=1)
    tops = np.vstack([np.zeros(len(xs)), np.cumsum(np.nan_to_num(parts), axis=0)])
    across = x_scale(float(xs[0]), float(xs[-1]), WIDTH)
    up = y_scale(0.0, float(tops[-1].max()), HEIGHT)
    places = across.place(xs)
    marks, tips = [], []
    for index, name in enumerate(names):
        outline = np.concatenate([up.place(tops[index + 1]), up.place(tops[index])[::-1]])
        points = _points(np.concatenate([places, places[::-1]]), outline)
        marks.append(f'<path class="area {_color(index)}" d="M{points}z"/>')
        tips.append(_tip(name, index, places, xs, parts[index]))
    return _plot(", ".join(names), "".join(marks), across, up, x_name, {"series": tips[::-1]}, show)


def bar_plot(name: str, edges: Sequence[float], counts: Sequence[float], x_name: str) -> str:
    """Return a histogram: `counts` (n,) between `edges` (n + 1,)."""
    if not counts or max(counts) <= 0:
        return ""
    across, up = x_scale(edges[0], edges[-1], WIDTH), y_scale(0.0, max(counts), HEIGHT)
    places, tops = across.place(np.array(edges)), up.place(np.array(counts))
    bars = "".join(
        f'<rect class="bar c0" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{HEIGHT - top:.1f}"/>'
        for left, right, top in zip(places[:-1], places[1:], tops, strict=True)
        if top < HEIGHT
    )
    middles = (places[:-1] + places[1:]) / 2
    tip = _tip(name, 0, middles, np.array(edges[:-1]), np.array(counts))
    return _plot(name, bars, across, up, x_name, {"series": [tip]}, None)


def heat_plot(
    row_name: str, xs: Floats, values: Floats, x_name: str, *, full: float, show: Mapping[str, str] | None = None
) -> str:
    """Return one strip for each row of `values` (rows, n), from light for 0 to dark for `full` and above.

    Above MAX_HEAT_ROWS rows, neighbours share a strip, which shows their greatest value.
    """
    if not values.size:
        return ""
    num_rows: int = len(values)
    share = -(-num_rows // MAX_HEAT_ROWS)
    starts = np.arange(0, num_rows, share)
    xs, values = bucket_means(
        xs, np.fmax.reduceat(values, starts, axis=0), max(24, MAX_HEAT_CELLS // (8 + len(starts)))
    )
    across = x_scale(float(xs[0]), float(xs[-1]), WIDTH)
    columns = np.concatenate([[0.0], across.place((xs[1:] + xs[:-1]) / 2), [WIDTH]])
    rows = np.linspace(0, HEIGHT, len(values) + 1)
    shades = np.clip(np.round(np.nan_to_num(values) / full * NUM_SHADES), 0, NUM_SHADES).astype(int)
    cells: dict[int, list[str]] = {}
    for row, column in np.ndindex(shades.shape):
        width, height = columns[column + 1] - columns[column], rows[row + 1] - rows[row]
        outline = f"M{columns[column]:.1f} {rows[row]:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
        cells.setdefault(int(shades[row, column]), []).append(outline)
    marks = "".join(f'<path class="heat s{shade}" d="{"".join(found)}"/>' for shade, found in sorted(cells.items()))
    names = [
        f"{row_name} {one}" + (f" to {min(one + share, num_rows) - 1}" if share > 1 else "") for one in starts.tolist()
    ]
    tips = [_tip(name, 0, across.place(xs), xs, ys) for name, ys in zip(names, values, strict=True)]
    every = max(1, -(-len(names) // 8))
    labels = [((index + 0.5) / len(names), name) for index, name in enumerate(names) if index % every == 0]
    return _plot(row_name, marks, across, None, x_name, {"series": tips, "rows": True}, show, labels)


def downsampled(xs: Floats, ys: Floats, num_buckets: int = NUM_BUCKETS) -> tuple[Floats, Floats]:
    """Return at most two points for each bucket of equal width in x: its least and its greatest y, in their order.

    A bucket without a finite value stays as one NaN, which is a gap in the line.
    """
    if len(xs) <= 2 * num_buckets:
        return xs, ys
    kept: list[int] = []
    for start, stop in _buckets(xs, num_buckets):
        part = ys[start:stop]
        finite = np.flatnonzero(np.isfinite(part))
        if not len(finite):
            kept.append(start)
            continue
        ends = {int(finite[part[finite].argmin()]), int(finite[part[finite].argmax()])}
        kept += [start + offset for offset in sorted(ends)]
    # the last point says where a run is now
    if kept[-1] != len(xs) - 1:
        kept.append(len(xs) - 1)
    return xs[kept], ys[kept]


def bucket_means(xs: Floats, values: Floats, num_buckets: int) -> tuple[Floats, Floats]:
    """Return the means of `xs` (n,) and `values` (rows, n) over at most `num_buckets` buckets of equal width in x."""
    if len(xs) <= num_buckets:
        return xs, values
    starts = np.array([start for start, _ in _buckets(xs, num_buckets)])
    counts = np.diff(np.append(starts, len(xs)))
    return np.add.reduceat(xs, starts) / counts, np.add.reduceat(values, starts, axis=1) / counts


def moving_average(ys: Floats) -> Floats:
    """Return the mean of `ys` (n,) over a window around each value, cut at both ends; NaN stays NaN.

    The window is centered, so that the line does not lag behind what it smooths.
    """
    reach = max(2, round(SMOOTHED_SHARE * len(ys) / 2))
    is_finite = np.isfinite(ys)
    totals = np.concatenate([[0.0], np.cumsum(np.where(is_finite, ys, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    places = np.arange(len(ys))
    # a smaller window near the ends: what is on one side only would bend the line
    reaches = np.clip(np.minimum(places, len(ys) - 1 - places), reach // 3, reach)
    low, high = np.maximum(0, places - reaches), np.minimum(len(ys), places + reaches + 1)
    means = (totals[high] - totals[low]) / np.maximum(1, counts[high] - counts[low])
    return np.where(is_finite, means, np.nan)


def _buckets(xs: Floats, num_buckets: int) -> list[tuple[int, int]]:
    """Split ascending `xs` into the non-empty buckets of equal width: (start, stop) of each."""
    edges = np.linspace(xs[0], xs[-1], num_buckets + 1)[1:-1]
    starts = np.unique(np.concatenate([[0], np.searchsorted(xs, edges)]))
    stops = [*starts[1:].tolist(), len(xs)]
    return [(start, stop) for start, stop in zip(starts.tolist(), stops, strict=True) if stop > start]


def _color(index: int) -> str:
    return f"c{index % NUM_COLORS}" + (" dashed" if index >= NUM_COLORS else "")


def _points(places: Floats, tops: Floats) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places.tolist(), tops.tolist(), strict=True))


def _path(style: str, places: Floats, tops: Floats) -> str:
    """Return a path with a gap at each NaN; a point alone between gaps is a dot."""
    is_gap = ~np.isfinite(tops)
    pieces = []
    for run in np.split(np.arange(len(tops)), np.flatnonzero(np.diff(is_gap)) + 1):
        if not is_gap[run[0]]:
            pieces.append("M" + _points(places[run], tops[run]) + ("h0" if len(run) == 1 else ""))
    return f'<path class="{style}" d="{"".join(pieces)}"/>'


def _tip(name: str, color: int, places: Floats, xs: Floats, ys: Floats) -> dict[str, object]:
    """Return the values of one series for the page's script: place in the plot, x and y."""
    values = [float(f"{y:.5g}") if math.isfinite(y) else None for y in ys.tolist()]
    where = [float(f"{x:.6g}") for x in xs.tolist()]
    return {"n": name, "c": _color(color), "p": [round(place, 1) for place in places.tolist()], "x": where, "y": values}


def _plot(
    label: str,
    marks: str,
    across: Scale,
    up: Scale | None,
    x_name: str,
    tip: Mapping[str, object],
    show: Mapping[str, str] | None,
    y_labels: Sequence[tuple[float, str]] | None = None,
) -> str:
    """Return marks with their axes: y from `up`, or `y_labels` as (share from the top, text)."""
    lines = [] if up is None else [(1.0 - share, tick) for share, tick in up.ticks(5)]
    grid = "".join(f"M0 {share * HEIGHT:.1f}H{WIDTH}" for share, _ in lines)
    labels = lines if y_labels is None else y_labels
    gutter = max((len(tick) for _, tick in labels), default=1)
    left = "".join(f'<span style="top:{share:.2%}">{tick}</span>' for share, tick in labels)
    below = "".join(
        f'<span{" class=last" if share > 0.96 else ""} style="left:{share:.2%}">{tick}</span>'
        for share, tick in across.ticks(5)
    )
    values = escape(json.dumps({"x": x_name, **tip}, separators=(",", ":")))
    switches = "".join(f' data-{name}="{value}"' for name, value in (show or {}).items())
    return (
        f'<div class="plot" style="--gutter:{gutter}ch"{switches}><div class="y">{left}</div>'
        f'<div class="canvas" tabindex="0" data-tip="{values}"><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{text(label)} by {text(x_name)}">'
        f'<path class="grid" d="{grid}"/>{marks}</svg></div><div class="x">{below}</div>'
        f'<div class="xname">{text(x_name)}</div></div>'
    )
