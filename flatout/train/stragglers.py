"""Report a rank whose steps take much longer than the others' for many steps in a row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SLOWER = 1.5
NUM_STEPS = 20


class Stragglers:
    """Compares the ranks' seconds in each step; reports a slow rank once, and again only after it has caught up."""

    def __init__(self, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._tell = tell
        self._num_slow: dict[int, int] = {}

    def look(self, completed: int, busy_s: Sequence[float]) -> None:
        """Check one step: `busy_s` has all ranks' seconds when `completed` steps are done; empty for one rank."""
        for rank, own_s in enumerate(busy_s if len(busy_s) > 1 else ()):
            others_s = statistics.median(seconds for place, seconds in enumerate(busy_s) if place != rank)
            is_slow = 0 < others_s * SLOWER < own_s
            self._num_slow[rank] = self._num_slow.get(rank, 0) + 1 if is_slow else 0
            if self._num_slow[rank] == NUM_STEPS:
                facts = {"rank": rank, "step": completed, "busy_s": round(own_s, 4), "others_s": round(others_s, 4)}
                self._tell("straggler", facts)
