"""Figures of one run from the wall times of its steps, the same for every system; and the machine's header."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

WARMUP_STEPS = 3
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "unsloth", "unsloth_zoo", "liger-kernel", "bitsandbytes")
_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu", "memory.total")


def figures(
    step_ends_s: Sequence[float], launched_s: float, num_tokens: Sequence[int], num_labels: Sequence[int]
) -> dict[str, Any]:
    """Rates over the intervals between ends of steps (data, host time and optimizer included), WARMUP_STEPS left out.

    `step_ends_s` are wall times of the ends of steps 1..n, `launched_s` that of the process's launch, `num_tokens` and
    `num_labels` the real tokens and label tokens of each step.
    """
    steps_s = [end - before for before, end in zip([launched_s, *step_ends_s[:-1]], step_ends_s, strict=True)]
    timed = steps_s[WARMUP_STEPS:]
    total_s = sum(timed)
    return {
        "useful_tok_s": sum(num_tokens[WARMUP_STEPS : len(steps_s)]) / total_s,
        "label_tok_s": sum(num_labels[WARMUP_STEPS : len(steps_s)]) / total_s,
        "step_p50_s": statistics.median(timed),
        "step_p95_s": sorted(timed)[min(len(timed) - 1, int(0.95 * len(timed)))],
        "launch_to_first_step_s": steps_s[0],
        "steps_s": [round(step_s, 4) for step_s in steps_s],
    }


def gpu_memory() -> dict[str, float]:
    """Peak GiB that this process allocated and reserved on its GPU; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def gpu_header() -> dict[str, str]:
    """The first GPU as nvidia-smi tells it (clocks in MHz, watts, degrees C); the processor where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {"name": platform.processor() or platform.machine()}
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return dict(zip(_GPU_FIELDS, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a measurement."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
