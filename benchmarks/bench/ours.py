"""One measured run of flatout in this process, as a module with JOB.json; it exits as `flatout train` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.config.read import make_config
from flatout.data.registry import built_dir
from flatout.data.token_store import TokenStore
from flatout.environment import named_capability
from flatout.errors import FlatoutError
from flatout.kernels.capability import choose_kernels_of
from flatout.parallel.rank import Rank
from flatout.track.callback import Callback, MemoryCallback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.record import StepRecord

from . import cap
from .figures import WARMUP_STEPS, recorded_figures
from .machine import gpu_header, gpu_memory, versions
from .samples import NAME, digest
from .steps import planned_memory, take_steps


def base_values(job: dict[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration that every row starts from: what the peers are given, and flatout's own defaults else.

    `overrides` only say whether there is an adapter.
    """
    values = {
        "run_dir": job["run_dir"],
        "model": {"name": job["model_dir"]},
        "data": {"name": NAME, "root": job["data_root"]},
        "batch": {"samples_per_step": job["samples_per_step"], "max_steps": job["num_steps"], "shuffle": False},
        "optim": {"lr": 1e-4},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": None},
    }
    if "method=full" not in overrides:
        values["lora"] = {"rank": 16, "alpha": 16.0}
    return values


def measure(job: dict[str, Any]) -> dict[str, Any] | None:
    """Take the job's steps and return the figures; None on ranks that write down nothing."""
    recorder, is_first = MemoryCallback(), Rank.from_env().is_first
    config = make_config(base_values(job, job["overrides"]), job["overrides"])
    callbacks: list[Callback] = [ConsoleCallback(), recorder]
    run = take_steps(config, Reporter(*(callbacks if is_first else ())))
    if not is_first:
        return None
    memory, gpu, steps = gpu_memory(), gpu_header(), recorder.steps
    timed = steps[WARMUP_STEPS:]
    timed_s = sum(step.step_s for step in timed)
    store = TokenStore.open(built_dir(Path(job["data_root"]), NAME), verify=False)
    memory = memory or {"peak_allocated_gib": max(step.peak_memory_bytes for step in steps) / 2**30}
    if planned := planned_memory(run):
        planned["planned_error_percent"] = 100 * (planned["planned_gib"] / memory["peak_allocated_gib"] - 1)
    return {
        **recorded_figures(recorder, job["launched_s"]),
        **memory,
        **planned,
        "recompute": run.memory.recompute,
        "micro_batch_tokens": run.memory.micro_batch_tokens,
        "out_of_memory_steps": [facts["step"] for kind, facts in recorder.events if kind == "out_of_memory"],
        "first_step_s": steps[0].step_s,
        "data_wait_share": sum(step.data_wait_s for step in timed) / timed_s,
        "flops_per_token": sum(s.flops_per_s * s.step_s for s in timed) / sum(s.num_tokens for s in timed),
        "mfu": timed[-1].mfu,
        **balance_of(timed),
        "shared_share": sum(step.shared_share for step in timed) / len(timed),
        "num_micro_batches": [step.num_micro_batches for step in steps],
        "losses": [step.loss for step in steps],
        "digest": digest(store.token_ids, store.loss_mask),
        "gpu_after": gpu,
        "versions": versions(),
        "load_s": load_s(recorder),
        "stages": [f"{at_s - job['launched_s']:.1f} s {name} {text}" for at_s, name, text in recorder.stages],
    }


def balance_of(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Of several ranks: mean / max of their planned FLOPs, and the measured least / most busy seconds of passes.

    A step's record holds the busy seconds of the newest step that the device has done, so the mean is over nearly the
    same steps; nothing for one rank.
    """
    busy = [(s.busy_min_s, s.busy_max_s) for s in steps if s.busy_min_s is not None and s.busy_max_s]
    if not busy:
        return {}
    return {
        "planned_balance": sum(step.balance for step in steps) / len(steps),
        "least_by_most_busy": sum(least / most for least, most in busy) / len(busy),
        "busy_max_s": sum(most for _, most in busy) / len(busy),
    }


def load_s(recorder: MemoryCallback) -> float:
    """Seconds from the line before the model's first to that one: what reading and placing the weights took."""
    at = next(index for index, (_, name, _) in enumerate(recorder.stages) if name == "model")
    return recorder.stages[at][0] - recorder.stages[at - 1][0]


def main(path: Path) -> None:
    """Read the job, measure, write its result file."""
    job = json.loads(path.read_text(encoding="utf-8"))
    try:
        cap.apply(job["cap_bytes"])
        # before the plan, which asks for the GPU's arithmetic
        choose_kernels_of(named_capability())
        result = measure(job)
    except FlatoutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if result is not None:
        Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
