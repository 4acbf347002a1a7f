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
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flatout.track.run_log import MAX_NUMBER
from flatout.view.page import text
from flatout.view.scales import Scale, tick_label, x_scale, y_scale

Floats = NDArray[np.float64]
# the page's switches under which a plot is visible, such as {"axis": "tokens"}
Show = Mapping[str, str]
_ALWAYS: Show = MappingProxyType({})

WIDTH, HEIGHT = 1000, 240  # of the viewBox, which the page stretches
# a longer series is drawn by the least and the greatest value of this many buckets
NUM_BUCKETS = 600
# areas, and cells of a heat strip, are means over this many buckets
NUM_MEANS, MAX_HEAT_CELLS, MAX_HEAT_ROWS = 300, 4000, 64
# a noisy line is smoothed over this share of its points
SMOOTHED_SHARE = 0.02
NUM_COLORS, NUM_SHADES, MAX_DOTS = 8, 9, 40


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
        f'<span class="unit">{text(unit)}</span></h3>{legend}'
        f'<span class="saves"><button type="button" class="csv" data-png="{text(title)}">PNG</button>'
        f'<button type="button" class="csv" data-csv="{text(title)}">CSV</button></span></figcaption>'
        f"{''.join(plots)}</figure>"
    )


@dataclass(frozen=True)
class _Frame:
    """The axes of a plot: they place values, and stand around the marks."""

    across: Scale
    up: Scale
    x_name: str

    def points(self, xs: Floats, ys: Floats) -> str:
        """Return the places of values as SVG writes them."""
        places = zip(self.across.place(xs).tolist(), self.up.place(ys).tolist(), strict=True)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    def line(self, style: str, xs: Floats, ys: Floats, *, are_dots: bool = False) -> str:
        """Return a path with a gap at each NaN; a point alone is a dot, or each point with `are_dots`."""
        is_gap = ~np.isfinite(ys)
        cuts = np.arange(1, len(ys)) if are_dots else np.flatnonzero(np.diff(is_gap)) + 1
        runs = [run for run in np.split(np.arange(len(ys)), cuts) if not is_gap[run[0]]]
        pieces = (f"M{self.points(xs[run], ys[run])}{'h0' if len(run) == 1 else ''}" for run in runs)
        return f'<path class="{style}" d="{"".join(pieces)}"/>'

    def tip(self, name: str, color: int, xs: Floats, ys: Floats) -> dict[str, object]:
        """Return the values of a line for the page's script: place in the plot, x and y."""
        values = [float(f"{y:.5g}") if math.isfinite(y) else None for y in ys.tolist()]
        places = [round(place, 1) for place in self.across.place(xs).tolist()]
        return {"n": name, "c": _color(color), "p": places, "x": [float(f"{x:.6g}") for x in xs.tolist()], "y": values}

    def plot(
        self, label: str, marks: Sequence[str], tips: Sequence[object], show: Show, rows: Sequence[str] = ()
    ) -> str:
        """Return the marks with their axes; `rows` are names of strips, in place of the y axis."""
        ticks = [(1.0 - position, tick) for position, tick in self.up.ticks(5)]
        grid = "" if rows else "".join(f"M0 {position * HEIGHT:.1f}H{WIDTH}" for position, _ in ticks)
        if rows:
            every = -(-len(rows) // 8)
            ticks = [((index + 0.5) / len(rows), rows[index]) for index in range(0, len(rows), every)]
        left = "".join(f'<span style="top:{position:.2%}">{text(tick)}</span>' for position, tick in ticks)
        below = "".join(
            f'<span{" class=last" if position > 0.96 else ""} style="left:{position:.2%}">{tick}</span>'
            for position, tick in self.across.ticks(6)
        )
        values = {"x": self.x_name, "series": tips, "rows": bool(rows)}
        tip = escape(json.dumps(values, separators=(",", ":")))
        switches = "".join(f' data-{name}="{value}"' for name, value in show.items())
        return (
            f'<div class="plot" style="--gutter:{max(len(tick) for _, tick in ticks)}ch"{switches}>'
            f'<div class="y">{left}</div><div class="canvas" tabindex="0" data-tip="{tip}">'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{text(label)} by {text(self.x_name)}"><path class="grid" d="{grid}"/>{"".join(marks)}</svg>'
            f'</div><div class="x">{below}</div><div class="xname">{text(self.x_name)}</div></div>'
        )


def line_plot(
    lines: Sequence[Series], x_name: str, show: Show = _ALWAYS, *, from_zero: bool = False, is_log: bool = False
) -> str:
    """Return a plot of lines, the first on top, dots above all; nothing if no line has a value that can be drawn."""
    # a log scale leaves out what is not positive
    least = 0.0 if is_log else -MAX_NUMBER
    drawn = [replace(one, ys=np.where((one.ys > least) & (one.ys < MAX_NUMBER), one.ys, math.nan)) for one in lines]
    drawn = [one for one in drawn if np.isfinite(one.ys).any()]
    if not drawn:
        return ""
    xs = np.concatenate([one.xs for one in drawn])
    low, high = min(np.nanmin(one.ys) for one in drawn), max(np.nanmax(one.ys) for one in drawn)
    up = y_scale(min(0.0, low) if from_zero else float(low), float(high), HEIGHT, is_log=is_log)
    frame = _Frame(x_scale(float(xs.min()), float(xs.max()), WIDTH), up, x_name)
    below: list[str] = []
    above, tips = [], []
    for one in drawn:
        xs, ys = shown = downsampled(one.xs, one.ys)
        style = f"line {_color(one.color)}"
        marks = [frame.line(style, xs, ys)]
        if one.is_smoothed and len(one.xs) > 20:
            smooth = downsampled(one.xs, moving_average(one.ys))
            marks = [frame.line(f"{style} faint", xs, ys), frame.line(style, *smooth)]
            # of a shortened series the mean says more than the extremes
            shown = shown if len(xs) == len(one.xs) else smooth
        if one.has_dots:
            dots = frame.line(f"dots {_color(one.color)}", xs, ys, are_dots=True) if len(xs) <= MAX_DOTS else ""
            above += [*marks, dots]
        else:
            below = marks + below
        tips.append(frame.tip(one.name, one.color, *shown))
    return frame.plot(", ".join(one.name for one in drawn), below + above, tips, show)


def area_plot(names: Sequence[str], xs: Floats, parts: Floats, x_name: str, show: Show = _ALWAYS) -> str:
    """Return stacked areas of `parts` (names, n) over `xs` (n,), n > 0, each point the mean of a bucket."""
    xs, parts = bucket_means(xs, parts, NUM_MEANS)
    if len(xs) == 1:  # one step: as wide as the plot
        xs, parts = np.array([xs[0] - 0.5, xs[0] + 0.5]), np.repeat(parts, 2, axis=1)
    tops = np.vstack([np.zeros(len(xs)), np.cumsum(parts, axis=0)])
    up = y_scale(0.0, float(tops[-1].max()), HEIGHT)
    frame = _Frame(x_scale(float(xs[0]), float(xs[-1]), WIDTH), up, x_name)
    there_and_back = np.concatenate([xs, xs[::-1]])
    marks, tips = [], []
    for index, name in enumerate(names):
        outline = frame.points(there_and_back, np.concatenate([tops[index + 1], tops[index][::-1]]))
        marks.append(f'<path class="area {_color(index)}" d="M{outline}z"/>')
        tips.append(frame.tip(name, index, xs, parts[index]))
    return frame.plot(", ".join(names), marks, tips[::-1], show)


def bar_plot(name: str, edges: Sequence[float], counts: Sequence[float], x_name: str) -> str:
    """Return a histogram of `counts` (n,) between `edges` (n + 1,); nothing without a count or of other lengths."""
    if max(counts, default=0) <= 0 or len(edges) != len(counts) + 1:
        return ""
    frame = _Frame(x_scale(edges[0], edges[-1], WIDTH), y_scale(0.0, max(counts), HEIGHT), x_name)
    places, tops = frame.across.place(np.array(edges)), frame.up.place(np.array(counts))
    bars = [
        f'<rect class="bar c0" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{HEIGHT - top:.1f}"/>'
        for left, right, top in zip(places[:-1], places[1:], tops, strict=True)
        if top < HEIGHT
    ]
    middles = (np.array(edges[:-1]) + np.array(edges[1:])) / 2
    return frame.plot(name, bars, [frame.tip(name, 0, middles, np.array(counts))], _ALWAYS)


def heat_plot(
    row_name: str,
    xs: Floats,
    values: Floats,
    x_name: str,
    full: float,
    show: Show = _ALWAYS,
    *,
    max_cells: int = MAX_HEAT_CELLS,
) -> str:
    """Return one strip for each row of `values` (rows, n), from light for 0 to dark for `full` and above.

    Above MAX_HEAT_ROWS rows, neighbours share a strip, which shows their greatest value.
    """
    num_rows = values.shape[0]
    rows_per_band = -(-num_rows // MAX_HEAT_ROWS)
    starts = np.arange(0, num_rows, rows_per_band)
    xs, values = bucket_means(xs, np.fmax.reduceat(values, starts, axis=0), max(24, max_cells // (8 + len(starts))))
    frame = _Frame(x_scale(float(xs[0]), float(xs[-1]), WIDTH), y_scale(0.0, full, HEIGHT), x_name)
    columns = np.concatenate([[0.0], frame.across.place((xs[1:] + xs[:-1]) / 2), [WIDTH]])
    height = HEIGHT / len(starts)
    shades = np.clip(np.round(np.nan_to_num(values) / full * NUM_SHADES), 0, NUM_SHADES).astype(int)
    cells: dict[int, list[str]] = {}
    for row, column in np.ndindex(shades.shape):
        width = columns[column + 1] - columns[column]
        outline = f"M{columns[column]:.1f} {row * height:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
        cells.setdefault(int(shades[row, column]), []).append(outline)
    marks = [f'<path class="heat s{shade}" d="{"".join(paths)}"/>' for shade, paths in sorted(cells.items())]
    names = [
        f"{row_name} {one}" + (f" to {min(one + rows_per_band, num_rows) - 1}" if rows_per_band > 1 else "")
        for one in starts.tolist()
    ]
    tips = [frame.tip(name, 0, xs, ys) for name, ys in zip(names, values, strict=True)]
    return frame.plot(row_name, marks, tips, show, names)


def downsampled(xs: Floats, ys: Floats) -> tuple[Floats, Floats]:
    """Return at most two points for each bucket of equal width in x: its least and its greatest y, in their order.

    A bucket without a finite value stays as one NaN, which is a gap in the line.
    """
    if len(xs) <= 2 * NUM_BUCKETS:
        return xs, ys
    indices: list[int] = []
    for start, stop in _buckets(xs, NUM_BUCKETS):
        part = ys[start:stop]
        finite = np.flatnonzero(np.isfinite(part))
        if not len(finite):
            indices.append(start)
            continue
        ends = {int(finite[part[finite].argmin()]), int(finite[part[finite].argmax()])}
        indices += [start + offset for offset in sorted(ends)]
    # the last point says where a run is now
    if indices[-1] != len(xs) - 1:
        indices.append(len(xs) - 1)
    return xs[indices], ys[indices]


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
