"""The data of charts: few points of long series. The page's script draws them (assets/charts.js)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.track.figures import short_count
from flatout.track.run_log import MAX_NUMBER
from flatout.view.page import marked, render

Floats = NDArray[np.float64]
# places of points by axis, such as "step", "tokens" and "time"
Axes = Mapping[str, Floats]

# a longer series is drawn by the least and the greatest value of this many buckets
NUM_BUCKETS = 600
# areas, and cells of strips, are means over this many buckets
NUM_MEANS, MAX_CELLS, MAX_STRIPS = 300, 8000, 64
# a noisy line is smoothed over this share of its points, if it has more than so many
SMOOTHED_SHARE, MIN_SMOOTHED = 0.02, 20
MAX_LANES = 24

Lane = Sequence[Sequence[int]]
Steps = Sequence[Sequence[Lane]]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    axes: Axes
    """(n,) places on each axis, ascending."""
    ys: Floats
    """(n,) values; NaN is a gap."""
    is_smooth: bool = False
    """Whether it is drawn without a moving average."""
    has_dots: bool = False
    """Whether every point is marked."""

    @property
    def last(self) -> str:
        """The last value that is known, in a few digits."""
        value = float(self.ys[np.isfinite(self.ys)][-1])
        return short_count(value) if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Chart:
    """A card with a title, a legend and a plot."""

    title: str
    unit: str
    data: Mapping[str, Any]
    """What assets/charts.js reads: `kind`, the names of its `axes`, and `series`."""
    legend: Sequence[tuple[str, str]] = field(default=())
    """The name and the last value of each series, in the order of their colors."""
    is_wide: bool = False
    is_flat: bool = False
    """Whether each of its lines has one value throughout, in the digits that are drawn."""


def line_chart(
    title: str, unit: str, lines: Sequence[Line], x_names: Mapping[str, str], *, from_zero: bool = False,
    has_log: bool = False,
) -> Chart:  # fmt: skip
    """Return a chart of lines, the first on top."""
    series = []
    for one in lines:
        ys = np.where(np.abs(one.ys) < MAX_NUMBER, one.ys, math.nan)
        kept = thinned(next(iter(one.axes.values())), ys)
        facts: dict[str, Any] = {"name": marked(one.name), "x": _numbers_by_axis(one.axes, kept)}
        facts["y"] = numbers(ys[kept], 5)
        if not (one.is_smooth or one.has_dots) and len(ys) > MIN_SMOOTHED:
            facts |= {"smooth": numbers(moving_average(ys)[kept], 5), "short": len(kept) < len(ys)}
        series.append(facts | ({"dots": True} if one.has_dots else {}))
    data = {"kind": "lines", "axes": x_names, "series": series, "zero": from_zero, "log": has_log}
    known = ([y for y in numbers(one.ys, 5) if y is not None] for one in lines)
    is_flat = all(len(ys) > 1 and len({*ys}) == 1 for ys in known)
    return Chart(title, unit, data, [(one.name, one.last) for one in lines], is_flat=is_flat)


def area_chart(
    title: str, unit: str, parts: Mapping[str, Floats], axes: Axes, x_names: Mapping[str, str], shares: Sequence[str]
) -> Chart:
    """Return stacked areas of `parts` (n,) by name, each point the mean of a bucket; `shares` stand in the legend."""
    axes, values = bucket_means(axes, np.array(list(parts.values())), NUM_MEANS)
    series = [{"name": name, "y": numbers(ys, 5)} for name, ys in zip(parts, values, strict=True)]
    data = {"kind": "areas", "axes": x_names, "x": _numbers_by_axis(axes), "series": series}
    return Chart(title, unit, data, list(zip(parts, shares, strict=True)), is_wide=True)


def histogram(title: str, unit: str, edges: Sequence[float], counts: Sequence[float], x_name: str) -> Chart | None:
    """Return bars of `counts` (n,) between `edges` (n + 1,); None without a count or of other lengths."""
    if max(counts, default=0) <= 0 or len(edges) != len(counts) + 1:
        return None
    series = [{"name": "samples", "y": list(counts)}]
    data = {"kind": "bars", "axes": {"": x_name}, "x": {"": list(edges)}, "series": series}
    return Chart(title, unit, data, is_wide=True)


def strip_chart(
    title: str, unit: str, row_name: str, values: Floats, axes: Axes, x_names: Mapping[str, str], full: float
) -> Chart:
    """Return one strip for each row of `values` (rows, n), from light for 0 to dark for `full` and above.

    Above MAX_STRIPS rows, neighbours share a strip, which shows their greatest value.
    """
    num_rows = values.shape[0]
    per_strip = -(-num_rows // MAX_STRIPS)
    starts = np.arange(0, num_rows, per_strip)
    shown = np.fmax.reduceat(np.clip(values, 0.0, MAX_NUMBER), starts, axis=0)
    axes, shown = bucket_means(axes, shown, max(24, MAX_CELLS // (8 + len(starts))))
    ends = [f" to {min(one + per_strip, num_rows) - 1}" if per_strip > 1 else "" for one in starts.tolist()]
    series = [
        {"name": f"{row_name} {start}{end}", "y": numbers(ys, 3)}
        for start, end, ys in zip(starts.tolist(), ends, shown, strict=True)
    ]
    data = {"kind": "strips", "axes": x_names, "x": _numbers_by_axis(axes), "series": series, "full": full}
    return Chart(title, unit, data, is_wide=True)


def packing_lanes(packing: Steps, padded: Steps) -> str:
    """Return a lane for each step and rank of `packing`, above the batches of a padding loader if there are any.

    Both are, for each step, for each rank, for each batch the lengths of its samples. The page's script draws the bars.
    """
    lanes = [
        (step, rank, len(ranks), batches, beside)
        for step, (ranks, all_beside) in enumerate(zip_longest(packing, padded, fillvalue=()), start=1)
        for rank, (batches, beside) in enumerate(zip_longest(ranks, all_beside, fillvalue=()))
    ][:MAX_LANES]
    tokens = [
        (sum(map(sum, batches)), sum(len(batch) * max(batch, default=0) for batch in beside))
        for *_, batches, beside in lanes
    ]
    widest = max(map(max, tokens), default=0) or 1
    return render("packing.html", lanes=zip(lanes, tokens, strict=True), widest=widest) if lanes else ""


def thinned(xs: Floats, ys: Floats) -> NDArray[np.int64]:
    """Return the places of at most two points for each bucket of equal width in x: its least and its greatest y.

    A bucket without a finite value keeps one NaN, which is a gap in the line. The last point stays: it says where a run
    is now.
    """
    if len(xs) <= 2 * NUM_BUCKETS:
        return np.arange(len(xs))
    kept = {len(xs) - 1}
    starts = _bucket_starts(xs, NUM_BUCKETS)
    for start, stop in zip(starts, [*starts[1:], len(xs)], strict=True):
        finite = start + np.flatnonzero(np.isfinite(ys[start:stop]))
        kept |= {int(finite[ys[finite].argmin()]), int(finite[ys[finite].argmax()])} if len(finite) else {start}
    return np.array(sorted(kept))


def bucket_means(axes: Axes, values: Floats, num_buckets: int) -> tuple[Axes, Floats]:
    """Return the means of places (n,) and `values` (rows, n) over at most `num_buckets` buckets of the first axis."""
    xs = next(iter(axes.values()))
    if len(xs) <= num_buckets:
        return axes, values
    starts = _bucket_starts(xs, num_buckets)
    counts = np.diff([*starts, len(xs)])
    means = {axis: np.add.reduceat(places, starts) / counts for axis, places in axes.items()}
    return means, np.add.reduceat(values, starts, axis=1) / counts


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


def numbers(values: Floats, digits: int) -> list[float | None]:
    """Return values for JSON, with so many digits; None for NaN."""
    return [float(f"{one:.{digits}g}") if math.isfinite(one) else None for one in values.tolist()]


def _numbers_by_axis(axes: Axes, kept: NDArray[np.int64] | None = None) -> dict[str, list[float | None]]:
    return {axis: numbers(xs if kept is None else xs[kept], 7) for axis, xs in axes.items()}


def _bucket_starts(xs: Floats, num_buckets: int) -> list[int]:
    """Return where each non-empty bucket of equal width of ascending `xs` starts."""
    edges = np.linspace(xs[0], xs[-1], num_buckets + 1)[1:-1]
    starts = np.unique(np.concatenate([[0], np.searchsorted(xs, edges)]))
    return [start for start in starts.tolist() if start < len(xs)]
