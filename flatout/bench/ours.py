"""One measured run of flatout in this process: `python -m flatout.bench.ours JOB.json`."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from flatout.bench.inputs import NAME, digest
from flatout.bench.measure import WARMUP_STEPS, figures, gpu_header, gpu_memory, versions
from flatout.config.read import make_config
from flatout.data.registry import built_dir
from flatout.data.store import TokenStore
from flatout.parallel.rank import Rank


def base_values(job: dict[str, Any]) -> dict[str, Any]:
    """The configuration that every row starts from: what the peers are given, and flatout's own defaults else."""
    return {
        "run_dir": job["run_dir"],
        "model": {"name": job["model_dir"]},
        "data": {"name": NAME, "root": job["data_root"]},
        "lora": {"rank": 16, "alpha": 16.0},
        "batch": {"samples_per_step": job["samples_per_step"], "max_steps": job["num_steps"], "shuffle": False},
        "optim": {"lr": 1e-4},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": None},
    }


def measure(job: dict[str, Any]) -> dict[str, Any] | None:
    """Train by the job's overrides and return the figures; None on ranks that write down nothing."""
    from flatout.train.run import train

    run_dir = Path(job["run_dir"])
    train(make_config(base_values(job), job["overrides"]))
    if not Rank.from_env().is_first:
        return None
    memory, gpu = gpu_memory(), gpu_header()
    steps, ends_s = step_records(run_dir), step_ends(run_dir)
    timed = steps[WARMUP_STEPS:]
    timed_s, timed_tokens = (sum(s[key] for s in timed) for key in ("step_s", "num_tokens"))
    store = TokenStore.open(built_dir(Path(job["data_root"]), NAME), verify=False)
    stages = stage_lines(run_dir / "train.log")
    result = {
        **figures(ends_s, job["launched_s"], [s["num_tokens"] for s in steps], [s["num_label_tokens"] for s in steps]),
        **memory,
        "first_step_s": steps[0]["step_s"],
        "data_wait_share": sum(s["data_wait_s"] for s in timed) / timed_s,
        "flops_per_token": sum(s["flops_per_s"] * s["step_s"] for s in timed) / timed_tokens,
        "mfu": timed[-1]["mfu"],
        **balance_of(timed),
        "num_micro_batches": [s["num_micro_batches"] for s in steps],
        "losses": [s["loss"] for s in steps],
        "digest": digest(store.token_ids, store.trained),
        "gpu_after": gpu,
        "versions": versions(),
        "load_s": load_s(stages),
        "stages": [f"{stamp - job['launched_s']:.1f} s {text}" for stamp, text in stages],
    }
    if not memory:
        result["peak_allocated_gib"] = max(s["peak_memory_bytes"] for s in steps) / 2**30
    shutil.rmtree(run_dir, ignore_errors=True)
    return result


def balance_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of several ranks: mean / max of their planned FLOPs, and the measured least / most busy seconds of passes.

    A step's record holds the busy seconds of the newest step that the device has done, so the mean is over nearly the
    same steps; nothing for one rank.
    """
    measured = [step["busy_min_s"] / step["busy_max_s"] for step in steps if step.get("busy_max_s")]
    if not measured:
        return {}
    return {
        "planned_balance": sum(step["balance"] for step in steps) / len(steps),
        "least_by_most_busy": sum(measured) / len(measured),
        "busy_max_s": sum(step["busy_max_s"] for step in steps) / len(steps),
    }


def step_ends(run_dir: Path) -> list[float]:
    """Wall times of the ends of a run's steps, in seconds: the first from train.log, the others by their `step_s`.

    A step is logged when the next one is under way; the device's own clock says when it ended.
    """
    stamps = (line.partition(" ") for line in (run_dir / "train.log").read_text(encoding="utf-8").splitlines())
    first = next(stamp for stamp, _, text in stamps if text.startswith('{"kind": "step"'))
    durations_s = [step["step_s"] for step in step_records(run_dir)]
    return list(accumulate(durations_s[1:], initial=datetime.fromisoformat(first).timestamp()))


def step_records(run_dir: Path) -> list[dict[str, Any]]:
    """The step records of a run's metrics.jsonl."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "step"]


def stage_lines(log: Path) -> list[tuple[float, str]]:
    """The start-up lines of a train.log, what was decided, each with its wall time in seconds."""
    lines = (line.partition(" ") for line in log.read_text(encoding="utf-8").splitlines())
    return [(datetime.fromisoformat(stamp).timestamp(), text) for stamp, _, text in lines if text[:1] != "{"]


def load_s(stages: list[tuple[float, str]]) -> float:
    """Seconds from the line before the model's first to that one: what reading and placing the weights took."""
    at = next(index for index, (_, text) in enumerate(stages) if text.startswith("model "))
    return stages[at][0] - stages[at - 1][0]


def main(path: Path) -> None:
    """Read the job, measure, write its result file."""
    job = json.loads(path.read_text(encoding="utf-8"))
    if (result := measure(job)) is not None:
        Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
