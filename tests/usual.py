"""Cases that run by default, among all that `make test-long` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def usual(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """All cases as parameters, a tuple for several; those not `default` run the same code again: `exhaustive`."""
    values = [(one, one if isinstance(one, tuple) else (one,)) for one in cases]
    return [pytest.param(*own, marks=() if one in default else pytest.mark.exhaustive) for one, own in values]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters; the first of each `step` run by default."""
    cases = list(cases)
    return usual(cases, cases[::step])
