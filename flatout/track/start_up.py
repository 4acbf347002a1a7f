"""Where the seconds of a start go, from the launch of the process to the end of its first step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from flatout.environment import environment

# the kind of event that a start ends with
EVENT = "start_up"
# a line on the console names the longest stages, and only those that took so many seconds
NUM_NAMED, SHORTEST_NAMED_S = 6, 0.05


class StartUpClock:
    """Adds up the seconds of each stage. Every moment belongs to one stage, so that the stages' sum is the total.

    The first `stage` began at `launched_at`; by default, when the clock is made. All times are Unix times.
    """

    def __init__(
        self, launched_at: float | None = None, stage: str = "starting", clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._lock = clock, Lock()
        self._since = clock() if launched_at is None else launched_at
        self._stage: str | None = stage
        self._seconds: dict[str, float] = {}

    def begin(self, stage: str | None, at: float | None = None) -> None:
        """End the current stage and begin another, or continue an earlier one, `at` a time; None: the start is over."""
        with self._lock:
            if self._stage is None or self._stage == stage:
                return
            now = self._clock() if at is None else at
            # a clock that was set back must not make a stage negative
            seconds = max(0.0, now - self._since)
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + seconds
            self._stage, self._since = stage, now

    def finish(self) -> dict[str, Any] | None:
        """End the first step: return `total_s` and the seconds of all `stages` in their order; None if called again."""
        if self._stage is None:
            return None
        self.begin(None)
        stages = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return {"total_s": round(sum(self._seconds.values()), 3), "stages": stages}


def process_launch() -> float:
    """Return the Unix time at which this process was launched; on systems other than Linux, the current time."""
    try:
        # the fields after the command's name, which may contain spaces: field 22 is the start, in ticks since boot
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.time()
    return time.time() - age_s


def bytecode_problem(packages: Iterable[str]) -> str | None:
    """Return which of these imported packages Python compiles at every start, as it keeps no bytecode; None if none.

    Some container images set PYTHONDONTWRITEBYTECODE and install without bytecode: torch and transformers then take
    several seconds longer to import.
    """
    specs = {name: sys.modules[name].__spec__ for name in packages}
    # Path.exists raises for a folder that may not be read
    cached = {name: spec.cached for name, spec in specs.items() if spec is not None and spec.cached is not None}
    uncached = [name for name, path in cached.items() if not os.access(path, os.R_OK)]
    if not uncached:
        return None
    remedy = "PYTHONPYCACHEPREFIX=FOLDER names a folder that you can write"
    if sys.dont_write_bytecode:
        change = "unset PYTHONDONTWRITEBYTECODE" if environment().get("PYTHONDONTWRITEBYTECODE") else "leave out -B"
        remedy = f"{change}; where packages are read-only, {remedy}"
    return f"Python compiles {', '.join(uncached)} at every start, as it keeps no bytecode: {remedy}"


def stages_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the stages of an event of this kind; empty for a damaged one."""
    stages = event.get("stages")
    numbers = stages.items() if isinstance(stages, Mapping) else ()
    return {str(name): float(seconds) for name, seconds in numbers if isinstance(seconds, int | float)}


def describe_start(event: Mapping[str, Any]) -> str:
    """Return one line about a start: the total, and its longest stages."""
    stages = stages_of(event)
    longest = sorted(stages, key=lambda name: -stages[name])[:NUM_NAMED]
    named = [f"{name} {stages[name]:.1f}" for name in longest if stages[name] >= SHORTEST_NAMED_S]
    return f"{sum(stages.values()):.1f} s from launch to the end of the first step: {', '.join(named)}"
