"""How long a call takes: by the GPU's events where there is a GPU, by the clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def call_ms(run: Callable[[], object], num_calls: int) -> float:
    """Milliseconds of a call, the mean of so many without a pause; the host waits for the last."""
    if not torch.cuda.is_available():
        started_s = time.perf_counter()
        for _ in range(num_calls):
            run()
        return (time.perf_counter() - started_s) * 1e3 / num_calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_calls


def median_ms(run: Callable[[], object], num_blocks: int = 5, calls_per_block: int = 10) -> float:
    """The median of blocks of calls, after three that warm up."""
    for _ in range(3):
        run()
    return statistics.median(call_ms(run, calls_per_block) for _ in range(num_blocks))
