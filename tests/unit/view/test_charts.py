"""Charts: where the marks are, what a long series keeps, which values an axis marks."""

from __future__ import annotations

import html
import json
import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout.view.charts import (
    HEIGHT,
    NUM_BUCKETS,
    WIDTH,
    Series,
    area_plot,
    bar_plot,
    downsampled,
    heat_plot,
    line_plot,
    moving_average,
)
from flatout.view.scales import nice_ticks, x_scale, y_scale


def paths(plot: str, style: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a path's class."""
    found = re.findall(rf'<path class="{style}[^"]*" d="([^"]*)"', plot)
    lines = [line for d in found for line in d.split("M") if line]
    return [[tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", line)] for line in lines]  # type: ignore[misc]


def tip(plot: str) -> dict[str, list[dict[str, list[float]]]]:
    return json.loads(html.unescape(re.search(r'data-tip="([^"]*)"', plot)[1]))  # type: ignore[index, no-any-return]


def test_a_long_series_keeps_every_spike_in_few_points() -> None:
    rng = np.random.default_rng(0)
    xs, ys = np.arange(100_000.0), rng.normal(size=100_000)
    ys[[12_345, 77_777]] = 40.0, -40.0
    few_xs, few_ys = downsampled(xs, ys)
    assert len(few_xs) <= 2 * NUM_BUCKETS + 1
    assert set(few_ys) <= set(ys), "points are values of the series, not averages"
    assert (few_ys.max(), few_ys.min()) == (40.0, -40.0)
    assert (np.diff(few_xs) > 0).all()
    assert few_xs[-1] == xs[-1], "the last point says where the run is"
    for start in range(0, 100_000, 5000):
        part = (few_xs >= start) & (few_xs < start + 5000)
        exact = ys[start : start + 5000]
        assert few_ys[part].max() == pytest.approx(exact.max(), abs=1.5)


def test_gaps_stay_gaps_when_a_series_is_shortened() -> None:
    xs = np.arange(50_000.0)
    ys = np.where((xs > 10_000) & (xs < 20_000), np.nan, 1.0)
    plot = line_plot([Series("loss", xs, ys)], "step")
    first, second = paths(plot, "line")
    assert first[-1][0] == pytest.approx(WIDTH * 0.2, abs=2)
    assert second[0][0] == pytest.approx(WIDTH * 0.4, abs=2)


def test_marks_stand_where_their_values_are() -> None:
    plot = line_plot([Series("loss", np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 2.0]))], "step", from_zero=True)
    (points,) = paths(plot, "line")
    ticks = {text: float(top) for top, text in re.findall(r'top:([\d.]+)%">([\d.]+)<', plot)}
    assert [x for x, _ in points] == [0, WIDTH / 2, WIDTH]
    for (_, y), label in zip(points, ("0", "1.0", "2.0"), strict=True):
        assert y / HEIGHT * 100 == pytest.approx(ticks[label], abs=0.1)
    assert tip(plot)["series"][0]["y"] == [0, 1, 2]


def test_a_log_scale_leaves_out_what_is_not_positive_and_says_nothing_of_no_values() -> None:
    xs = np.arange(4.0)
    plot = line_plot([Series("norm", xs, np.array([0.0, 1.0, 10.0, 100.0]))], "step", is_log=True)
    (points,) = paths(plot, "line")
    heights = [y for _, y in points]
    assert len(points) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert line_plot([Series("norm", xs, np.full(4, np.nan))], "step") == ""
    assert line_plot([], "step") == ""


def test_one_point_is_a_visible_mark() -> None:
    plot = line_plot([Series("loss", np.array([1.0]), np.array([2.5]))], "step")
    assert re.search(r'class="line c0" d="M500.0,[\d.]+h0"', plot)


def test_areas_stack_to_the_sum_of_their_parts() -> None:
    parts = np.array([[1.0, 1.0], [2.0, 3.0]])
    plot = area_plot(["a", "b"], np.array([0.0, 1.0]), parts, "step")
    lower, upper = paths(plot, "area")
    tops = y_scale(0.0, 4.0, HEIGHT).place(np.array([3.0, 4.0, 1.0]))
    assert [y for _, y in upper[:2]] == pytest.approx(tops[:2], abs=0.1)
    assert [y for _, y in lower[:2]] == pytest.approx([tops[2]] * 2, abs=0.1)
    assert upper[2:] == lower[1::-1], "an area stands on the one below"


def test_bars_have_the_heights_of_their_counts() -> None:
    plot = bar_plot("samples", [0, 10, 20, 40], [5, 0, 10], "tokens")
    bars = [
        tuple(map(float, bar))
        for bar in re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="([\d.]+)"', plot)
    ]
    assert [bar[:2] for bar in bars] == [(0, 250), (500, 500)]
    assert bars[1][2] == pytest.approx(2 * bars[0][2], abs=0.2)


def test_a_strip_for_each_rank_is_darker_where_the_value_is_greater_and_many_ranks_share_strips() -> None:
    xs = np.arange(1.0, 5.0)
    plot = heat_plot("rank", xs, np.array([[0.0] * 4, [10.0] * 4]), "step", 10)
    assert {"s0", "s9"} == set(re.findall(r'class="heat (s\d)"', plot))
    assert [row["n"] for row in tip(plot)["series"]] == ["rank 0", "rank 1"]
    plot = heat_plot("rank", np.arange(5000.0), np.ones((512, 5000)), "step", 10)
    assert len(tip(plot)["series"]) == 64
    assert tip(plot)["series"][1]["n"] == "rank 8 to 15"  # type: ignore[comparison-overlap]
    assert len(plot) < 400_000


def test_the_moving_average_does_not_lag() -> None:
    ys = np.concatenate([np.zeros(500), np.ones(500)])
    smooth = moving_average(ys)
    assert smooth[500] == pytest.approx(0.5, abs=0.05)
    assert np.isnan(moving_average(np.array([1.0, np.nan, 1.0]))[1])


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_axes_mark_round_values_with_labels_of_their_own(low: float, span: float) -> None:
    high = low + span
    if high - low < abs(low) * 1e-6:
        return
    ticks = nice_ticks(low, high, 5)
    assert 1 <= len(ticks) <= 6
    assert all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        assert round(step / 10.0 ** np.floor(np.log10(step * 1.0001)), 3) in (1, 2, 5, 10)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.99, 1.0), (1e-6, 2e-4), (0, 7e4), (8e5, 1.2e6), (3, 30_000)])
def test_labels_of_an_axis_differ(low: float, high: float) -> None:
    for is_log in (False, low > 0):
        labels = [text for _, text in y_scale(low, high, HEIGHT, is_log=is_log).ticks(5)]
        assert len(labels) == len(set(labels)) >= 2
        assert max(map(len, labels)) <= 8


@given(st.floats(1e-3, 1e12), st.integers(1, 40))
@example(low=879609302221.1, num_ulps=1)
def test_values_that_differ_by_rounding_have_an_axis(low: float, num_ulps: int) -> None:
    high = low
    for _ in range(num_ulps):
        high = math.nextafter(high, math.inf)
    for scale in (x_scale(low, high, WIDTH), y_scale(low, high, HEIGHT)):
        labels = [text for _, text in scale.ticks(6)]
        assert labels
        assert all(-1e-6 < share < 1 + 1e-6 for share, _ in scale.ticks(6))
