"""Cases that run by default, among all that `make test-long` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def usual(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """All cases as parameters; those that are not `default` run the same code again and are marked `exhaustive`."""
    return [one if one in default else pytest.param(one, marks=pytest.mark.exhaustive) for one in cases]
