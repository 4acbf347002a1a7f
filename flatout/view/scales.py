"""Axes: where a value stands in a plot, and which round values are marked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, mapped to 0 .. `size`, or to `size` .. 0 where `is_down`, as SVG's y axis is."""

    low: float
    high: float
    size: float
    is_down: bool
    is_log: bool = False

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the places of `values` in the plot; NaN stays NaN."""
        position = self._share(values)
        return (1.0 - position if self.is_down else position) * self.size

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Return about `count` round values as (share of the axis, label)."""
        powers = self._log_ticks(count) if self.is_log else []
        values = powers or nice_ticks(self.low, self.high, count)
        step = min((b - a for a, b in pairwise(values)), default=abs(self.high - self.low) or 1.0)
        # a tick at an end of the axis may round to a value beyond it
        positions = self._share(np.array(values)).clip(0.0, 1.0).tolist()
        # values of many sizes are labelled each by its own
        return [(position, tick_label(v, v if powers else step)) for position, v in zip(positions, values, strict=True)]

    def _share(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = self.low, self.high
        if self.is_log:
            values, low, high = np.log(values), math.log(low), math.log(high)
        return (values - low) / (high - low)

    def _log_ticks(self, count: int) -> list[float]:
        """Return powers of ten, with their multiples by 2 and 5 where there is room; none within a decade."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        inside: list[float] = []
        for parts in ((1, 2, 5), (1, 3), (1,)):
            values = [part * 10.0**power for power in range(first, last + 1) for part in parts]
            inside = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(inside) <= count + 2:
                break
        return inside[:: -(-len(inside) // (count + 2)) or 1] if len(inside) > 2 else []


def x_scale(low: float, high: float, size: float) -> Scale:
    """Return the scale of an x axis, exactly from `low` to `high`."""
    if _span(low, high) == 0:
        low, high = low - 0.5, low + 0.5
    return Scale(low, high, size, is_down=False)


def y_scale(low: float, high: float, size: float, *, is_log: bool = False) -> Scale:
    """Return the scale of a y axis, with some room above `high`, and below `low` unless that is 0."""
    if is_log:
        return Scale(low / 1.1, high * 1.1, size, is_down=True, is_log=True)
    span = _span(low, high) or abs(high) or 1.0
    return Scale(low - 0.05 * span if low else 0.0, high + 0.06 * span, size, is_down=True)


def _span(low: float, high: float) -> float:
    """Return high - low; 0 if they differ by rounding only, since no two ticks would then differ."""
    return high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most `count` + 1."""
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= least * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_label(value: float, step: float) -> str:
    """Return a value as an axis shows it, as exact as `step` needs: 0.25, 1.5k, 2e-4."""
    if value == 0 or abs(value) < step * 1e-6:
        return "0"
    size, suffix = next((unit for unit in _SUFFIXES if abs(value) >= unit[0]), (1.0, ""))
    if suffix == "k" and abs(value) < 10_000 and step < 1000 and step >= 1:
        size, suffix = 1.0, ""
    if abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        return f"{round(value / 10.0**power, 2):g}e{power}"
    decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
    return f"{value / size:,.{min(decimals, 6)}f}{suffix}"
