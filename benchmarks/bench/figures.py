"""The figures of a measured run, computed from the times and tokens of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from flatout.track.callback import MemoryCallback

# the first steps compile, fill caches and warm up the allocator
WARMUP_STEPS = 3


def figures(steps_s: Sequence[float], num_tokens: Sequence[int], num_label_tokens: Sequence[int]) -> dict[str, Any]:
    """Return rates and step times (seconds) of the steps after WARMUP_STEPS, including data, host time and optimizer.

    `steps_s` are the times from the end of one step to the end of the next; the first is from the launch of the
    process. `num_tokens` and `num_label_tokens` count each step's real tokens and label tokens, never padding.
    """
    timed_s = sorted(steps_s[WARMUP_STEPS:])
    steps = slice(WARMUP_STEPS, len(steps_s))
    return {
        "tokens_per_s": sum(num_tokens[steps]) / sum(timed_s),
        "label_tokens_per_s": sum(num_label_tokens[steps]) / sum(timed_s),
        "step_p50_s": statistics.median(timed_s),
        "step_p95_s": timed_s[min(len(timed_s) - 1, int(0.95 * len(timed_s)))],
        "launch_to_first_step_s": steps_s[0],
        "steps_s": [round(step_s, 4) for step_s in steps_s],
    }


def recorded_figures(recorder: MemoryCallback, launched_s: float) -> dict[str, Any]:
    """Return the `figures` of the recorded steps of a process launched at this wall time.

    A step is recorded only after the next one has started, so its `step_s` is used, not the time of the record.
    """
    first_step_s = recorder.step_times_s[0] - launched_s
    steps_s = [first_step_s, *(step.step_s for step in recorder.steps[1:])]
    num_tokens, num_label_tokens = [s.num_tokens for s in recorder.steps], [s.num_label_tokens for s in recorder.steps]
    return figures(steps_s, num_tokens, num_label_tokens)
