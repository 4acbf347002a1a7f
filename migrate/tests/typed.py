"""What the flags of a door become, as they are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest


def settings_typed(door: ModuleType, type_in: Callable[[pytest.MonkeyPatch], object]) -> dict[str, Any]:
    """The settings that a command line would train with, by dotted name."""
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "run", lambda make: kept.append(make()))
        type_in(patch)
    return dict(flatten(kept[0].model_dump(mode="json")))


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
