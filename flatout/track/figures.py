"""The table of figures: what each number of a record is, its unit, how it combines, and how it is written.

A row is a `Figure` at a field of StepRecord, EvalFigures or EvalRecord. All that shows figures reads these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

GIB = 2**30
# what a rank measures under the name of the field
SAME = "="
# what one stored unit is as people see it: the factor and the shown unit
_SHOWN_UNITS = {"share": (100.0, "%"), "bytes": (1 / GIB, "GiB")}


def short_count(number: float) -> str:
    """Return a number in at most six characters, such as 12.3M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def short_time(seconds: float) -> str:
    """Return a duration as 0.25 s, 42 s, 1:23:45 or 3 d 4 h."""
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    hours = round(seconds / 3600)
    return str(timedelta(seconds=round(seconds))) if hours < 24 else f"{hours // 24} d {hours % 24} h"


def gib(num_bytes: float) -> str:
    """Return bytes in GiB, such as 61.20 GiB."""
    return f"{num_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table of figures."""

    meaning: str
    """One line of the docs' page."""
    unit: str = ""
    """Unit of the stored value. A "share" is from 0 to 1 and shown in percent; "bytes" are shown in GiB."""
    ranks: Literal["same", "sum", "mean", "mean of busy", "max", "each"] = "same"
    """How the ranks' values become one; "same": they all have it. Busy ranks had a pass in the step."""
    steps: Literal["last", "mean", "rate", "sum"] = "last"
    """How the steps since the last record become one: the newest, the mean, their sum per second, or their sum."""
    measured: str = ""
    """What each rank's RankMeter measures for it, or SAME; empty: Meter computes it for the whole step."""
    better: Literal["", "less", "more"] = ""
    """Which of two runs is better."""
    write: Callable[[float], str] = "{:.4g}".format
    """Its value as text."""
    line: str = ""
    """The text around it in a line of train.log, such as "loss {}"; empty: train.log leaves it out."""
    console: int = 0
    """Its place in a line on the console, which drops the last ones first; 0: not there."""
    chart: str = ""
    """Title of the chart of a report that draws it; empty: none."""
    label: str = ""
    """Its name in that chart; by default the field's words."""
    from_zero: bool = False
    """Whether the chart's axis starts at 0."""
    has_log: bool = False
    """Whether the chart has a log scale, too."""
    is_smooth: bool = False
    """Whether the chart draws it without a moving average."""

    @property
    def scale(self) -> float:
        """The factor from the stored value to the shown one."""
        return _SHOWN_UNITS.get(self.unit, (1.0, ""))[0]

    @property
    def shown_unit(self) -> str:
        return _SHOWN_UNITS.get(self.unit, (1.0, self.unit))[1]

    def text(self, value: float) -> str:
        """Return a value with the words around it."""
        return (self.line or "{}").format(self.write(value))


Table = Mapping[str, Figure]
# what a console shows of policy losses, beside the reward
_POLICY: Mapping[str, Any] = {"entropy": {"console": 1}, "mismatch/k3": {"console": 3, "write": "{:.0e}".format}}


def named(name: str) -> Figure:
    """Return the row of a figure that an objective names."""
    row = Figure("a figure of the objective", line=f"{name} {{}}", chart=name, label=name)
    return replace(row, **_POLICY.get(name, {}))


def figures_of(record_type: type[Any]) -> Table:
    """Return the rows that stand at the fields of a record, by name and in their order."""
    rows: dict[str, Figure] = {}
    for name, hint in get_type_hints(record_type, include_extras=True).items():
        for row in getattr(hint, "__metadata__", ()):
            label = row.label or name.removesuffix("_s").replace("_", " ")
            rows[name] = replace(row, label=label, measured=name if row.measured == SAME else row.measured)
    return MappingProxyType(rows)


def values_of(record: Any, table: Table) -> Iterator[tuple[str, Figure, float]]:
    """Yield the name, row and value of each figure of a record that is a number, the objective's own last."""
    rows = {**table, **{name: named(name) for name in record.metrics}}
    for name, row in rows.items():
        value = getattr(record, name) if name in table else record.metrics[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, row, value


def log_line(record: Any, table: Table) -> str:
    """Return the figures of a record for a line of train.log."""
    texts = (row.text(value) for _, row, value in values_of(record, table) if row.line)
    return "  ".join(filter(None, texts)).replace("  ±", " ±")


def console_figures(record: Any, table: Table, *, without: str = "") -> list[str]:
    """Return the figures of a record but one for a line of the console, the most important first."""
    shown = [(row.console, row.text(value)) for name, row, value in values_of(record, table)
             if name != without and (row.console or name not in table)]  # fmt: skip
    return [text for _, text in sorted(shown, key=lambda one: one[0] or math.inf)]
