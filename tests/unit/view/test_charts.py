"""Charts: what a long series keeps, where the page's script puts the marks, and which values an axis names."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flatout.view
from flatout.view.charts import (
    NUM_BUCKETS,
    Axes,
    Chart,
    Line,
    area_chart,
    histogram,
    line_chart,
    moving_average,
    strip_chart,
    thinned,
)

WIDTH, HEIGHT = 1000, 240
SCRIPT = Path(flatout.view.__file__).with_name("assets") / "charts.js"
STEP = {"step": "step"}
Point = tuple[float, float]


def node(expression: str, argument: object) -> Any:
    """Evaluate an expression over `charts` and `given` in the page's script, without a browser."""
    if (program := shutil.which("node")) is None:
        pytest.skip("needs node")
    code = f"const charts = require({json.dumps(str(SCRIPT))}), given = {json.dumps(argument)};"
    code += f"console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run([program, "-e", code], capture_output=True, text=True, check=True).stdout)


def draw(chart: Chart, *, is_log: bool = False) -> Any:
    axis = next(iter(chart.data["axes"]))
    return node(f"charts.kinds[given.kind](given, {json.dumps(axis)}, {json.dumps(is_log)})", chart.data)


def points(drawn: Any, style: str) -> list[list[Point]]:
    """The points of each piece of the marks of a class."""
    paths = [path for name, path in drawn["marks"] if name.startswith(style)]
    pieces = [piece for path in paths for piece in path.split("M") if piece]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", piece)] for piece in pieces]


def steps(*xs: float) -> Axes:
    return {"step": np.array(xs, dtype=np.float64)}


def test_a_long_series_keeps_every_spike_in_few_points():
    rng = np.random.default_rng(0)
    xs, ys = np.arange(100_000.0), rng.normal(size=100_000)
    ys[[12_345, 77_777]] = 40.0, -40.0
    kept = thinned(xs, ys)
    assert len(kept) <= 2 * NUM_BUCKETS + 1
    assert (ys[kept].max(), ys[kept].min()) == (40.0, -40.0)
    assert (np.diff(kept) > 0).all()
    assert kept[-1] == 99_999, "the last point says where the run is"
    for start in range(0, 100_000, 5000):
        part = kept[(kept >= start) & (kept < start + 5000)]
        assert ys[part].max() == pytest.approx(ys[start : start + 5000].max(), abs=1.5)


def test_gaps_stay_gaps_when_a_series_is_shortened():
    xs = np.arange(50_000.0)
    ys = np.where((xs > 10_000) & (xs < 20_000), np.nan, 1.0)
    first, second = points(draw(line_chart("loss", "", [Line("loss", {"step": xs}, ys, True)], STEP)), "line")
    assert first[-1][0] == pytest.approx(WIDTH * 0.2, abs=2)
    assert second[0][0] == pytest.approx(WIDTH * 0.4, abs=2)


def test_marks_stand_where_their_values_are():
    lines = [Line("loss", steps(0, 5, 10), np.array([0.0, 1.0, 2.0]))]
    drawn = draw(line_chart("loss", "", lines, STEP, from_zero=True))
    (found,) = points(drawn, "line")
    ticks = {text: at for at, text in node("charts.yScale(0, 2).ticks(5)", None)}
    assert [x for x, _ in found] == [0, WIDTH / 2, WIDTH]
    assert [1 - y / HEIGHT for _, y in found] == pytest.approx([ticks["0"], ticks["1.0"], ticks["2.0"]], abs=1e-3)
    assert drawn["tips"][0]["y"] == [0, 1, 2]


def test_a_log_scale_leaves_out_what_is_not_positive_and_says_nothing_of_no_values():
    lines = [Line("norm", steps(0, 1, 2, 3), np.array([0.0, 1.0, 10.0, 100.0]))]
    (found,) = points(draw(line_chart("norm", "", lines, STEP, has_log=True), is_log=True), "line")
    heights = [y for _, y in found]
    assert len(found) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    zeros = line_chart("norm", "", [Line("norm", steps(0, 1), np.zeros(2))], STEP, has_log=True)
    assert draw(zeros, is_log=True) is None


def test_one_point_is_a_visible_mark_and_a_great_value_is_none():
    drawn = draw(line_chart("loss", "", [Line("loss", steps(1, 2), np.array([2.5, 1e308]))], STEP))
    assert [path.endswith("h0") for _, path in drawn["marks"]] == [True]


def test_areas_stack_to_the_sum_of_their_parts():
    parts = {"a": np.array([1.0, 1.0]), "b": np.array([2.0, 3.0])}
    lower, upper = points(draw(area_chart("time", "s", parts, steps(0, 1), STEP, ["", ""])), "area")
    shares = node("[3, 4, 1].map(charts.yScale(0, 4).share)", None)
    tops = [(1 - share) * HEIGHT for share in shares]
    assert [y for _, y in upper[:2]] == pytest.approx(tops[:2], abs=0.1)
    assert [y for _, y in lower[:2]] == pytest.approx([tops[2]] * 2, abs=0.1)
    assert upper[2:] == lower[1::-1], "an area stands on the one below"


def test_bars_have_the_heights_of_their_counts():
    chart = histogram("lengths", "samples", [0, 10, 20, 40], [5, 0, 10], "tokens")
    assert chart is not None
    small, large = points(draw(chart), "bar")
    assert ([x for x, _ in small[1:3]], [x for x, _ in large[1:3]]) == ([0, 250], [500, 1000])
    assert HEIGHT - large[1][1] == pytest.approx(2 * (HEIGHT - small[1][1]), abs=0.3)
    assert histogram("lengths", "samples", [0, 1], [0], "tokens") is None


def test_a_strip_for_each_rank_is_darker_where_the_value_is_greater_and_many_ranks_share_strips():
    drawn = draw(strip_chart("wait", "%", "rank", np.array([[0.0] * 4, [10.0] * 4]), steps(1, 2, 3, 4), STEP, 10))
    assert [style for style, _ in drawn["marks"]] == ["heat s0", "heat s9"]
    assert drawn["rows"] == ["rank 0", "rank 1"]
    many = strip_chart("wait", "%", "rank", np.ones((512, 5000)), {"step": np.arange(5000.0)}, STEP, 10)
    assert len(many.data["series"]) == 64
    assert many.data["series"][1]["name"] == "rank 8 to 15"
    assert len(json.dumps(many.data)) < 100_000


def test_the_moving_average_does_not_lag():
    smooth = moving_average(np.concatenate([np.zeros(500), np.ones(500)]))
    assert smooth[500] == pytest.approx(0.5, abs=0.05)
    assert np.isnan(moving_average(np.array([1.0, np.nan, 1.0]))[1])


def test_padding_follows_its_sample_and_batches_stay_apart():
    marks = node("charts.bars(given, 16, true)", [[4, 2], [8]])
    assert [style for style, _ in marks] == ["block c0", "block c0 alt", "block filler", "block c2"]
    widths = [float(width) for _, path in marks for width in re.findall(r"h([\d.]+)v", path)]
    assert widths == pytest.approx([4 * widths[3] / 8, 2 * widths[3] / 8, 2 * widths[3] / 8, widths[3]], abs=0.02)


def test_axes_mark_round_values_with_labels_of_their_own():
    rng = np.random.default_rng(0)
    lows = rng.uniform(-1, 1, 300) * 10 ** rng.uniform(-6, 9, 300)
    spans = 10 ** rng.uniform(-6, 9, 300)
    cases = [
        (low, low + span) for low, span in zip(lows.tolist(), spans.tolist(), strict=True) if span > abs(low) / 1e6
    ]
    for (low, high), ticks in zip(cases, node("given.map(([a, b]) => charts.niceTicks(a, b, 5))", cases), strict=True):
        room = (high - low) * 1e-6
        assert 1 <= len(ticks) <= 6
        assert all(low - room <= tick <= high + room for tick in ticks)
        if len(ticks) > 1:
            step = ticks[1] - ticks[0]
            assert round(step / 10.0 ** math.floor(math.log10(step * 1.0001)), 3) in (1, 2, 5, 10)
    ranges = [(0, 1), (0.99, 1.0), (1e-6, 2e-4), (0, 7e4), (8e5, 1.2e6), (3, 30_000)]
    logs = [(low, high, is_log) for low, high in ranges for is_log in (False, low > 0)]
    for ticks in node("given.map((one) => charts.yScale(...one).ticks(5))", logs):
        labels = [text for _, text in ticks]
        assert len(labels) == len(set(labels)) >= 2
        assert max(map(len, labels)) <= 8


@pytest.mark.parametrize("last", [1, 2, 4, 6, 20])
def test_what_is_counted_has_whole_ticks_and_time_has_fractions(last):
    counted, time = node(f"['step', 'time'].map((axis) => charts.xScale(1, {last}, axis).ticks(6))", None)
    assert all(re.fullmatch(r"\d+", text) for _, text in counted)
    assert len({text for _, text in counted}) == len(counted) >= 1
    assert any("." in text for _, text in time) == (last <= 4)


def test_values_that_differ_by_rounding_have_an_axis():
    lows = [0.001, 1.0, 879609302221.1]
    cases = [(low, math.nextafter(low, math.inf)) for low in lows]
    for scale in ("xScale", "yScale"):
        for ticks in node(f"given.map((one) => charts.{scale}(...one).ticks(6))", cases):
            assert ticks
            assert all(-1e-6 < share < 1 + 1e-6 for share, _ in ticks)
