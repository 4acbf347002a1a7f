"""Steps of a random model through flatout's own plan, set-up and loop, on one GPU or several: what benchmarks share."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from flatout.bench.inputs import write_store, write_tokenizer
from flatout.bench.measure import WARMUP_STEPS, figures
from flatout.bench.ours import base_values, step_ends, step_records
from flatout.bench.rows import SAMPLES_PER_STEP
from flatout.config.read import make_config
from flatout.parallel.connect import choose_device
from flatout.parallel.group import join_group, leave_group
from flatout.parallel.messages import Messages
from flatout.parallel.rank import Rank, growing_segments
from flatout.track.console import ConsoleTracker
from flatout.track.jsonl import RunFolderTracker
from flatout.track.record import Trackers
from flatout.train.alike import weakest_gpu
from flatout.train.checkpoint import Checkpoints
from flatout.train.loop import run_steps
from flatout.train.planning import plan_run
from flatout.train.setup import set_up
from flatout.train.state import Run


@dataclass(frozen=True)
class Steps:
    """What was run, on every rank: its folder, and of each step the record and the wall time of its end."""

    run: Run
    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """The step records; only the first rank writes them down."""
        return step_records(self.folder)

    def rates(self, launched_s: float) -> dict[str, Any]:
        """The bench's figures of the steps after its warm-up."""
        num_tokens, num_labels = ([step[name] for step in self.records] for name in ("num_tokens", "num_label_tokens"))
        return figures(step_ends(self.folder), launched_s, num_tokens, num_labels)

    def summary(self, launched_s: float) -> dict[str, Any]:
        """What a benchmark tells of any steps; only on the first rank."""
        steps, rates = self.records, self.rates(launched_s)
        return {
            "gpus": self.run.rank.world,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "useful_tok_s": round(rates["useful_tok_s"]),
            "step_p50_s": round(rates["step_p50_s"], 4),
            "launch_to_first_step_s": round(rates["launch_to_first_step_s"], 1),
            "recompute": self.run.memory.recompute,
            "micro_batches": [step["num_micro_batches"] for step in steps[WARMUP_STEPS:]],
            "losses": [round(step["loss"], 4) for step in steps],
        }


def prepare(out: Path, shape: Mapping[str, Any], num_steps: int, samples_per_step: int = SAMPLES_PER_STEP) -> None:
    """The shape's folder without weights, and the tokens of `flatout bench`, in a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "model").mkdir(parents=True)
    (out / "model" / "config.json").write_text(json.dumps(shape))
    write_tokenizer(out / "model")
    write_store(out / "data", out / "model", num_steps * samples_per_step // SAMPLES_PER_STEP, None)


def spread_over(num_gpus: int) -> NoReturn:
    """Become this script's command once more as so many ranks, with `--part`: a signal ends them all.

    The environment is the one that `flatout train` gives itself.
    """
    spread = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}") if num_gpus > 1 else ()
    sys.stdout.flush()
    env = {**os.environ, **growing_segments(os.environ)}
    os.execve(sys.executable, [sys.executable, *spread, *sys.argv, "--part"], env)


def take_steps(
    out: Path,
    overrides: Sequence[str],
    num_steps: int,
    samples_per_step: int = SAMPLES_PER_STEP,
    *,
    before: Callable[[Run], None] = lambda run: None,
    after: Callable[[Run], None] = lambda run: None,
) -> Steps:
    """This process's part of a run in a prepared folder; `before` and `after` its steps all ranks are still joined."""
    paths = {"run_dir": str(out / "run"), "model_dir": str(out / "model"), "data_root": str(out / "data")}
    job = {**paths, "num_steps": num_steps, "samples_per_step": samples_per_step}
    config, rank = make_config(base_values(job), list(overrides)), Rank.from_env()
    tracker = Trackers(*((ConsoleTracker(), RunFolderTracker(config.folder)) if rank.is_first else ()))
    planned = plan_run(config, tracker, rank, lambda: weakest_gpu(config, rank))
    join_group(rank, choose_device(config.wanted_device, rank))
    checkpoints = Checkpoints(config.folder, keep=1, on_event=tracker.event, messages=Messages(rank))
    run = set_up(config, planned, checkpoints, None, tracker, rank)
    before(run)
    with run.stop:
        run_steps(run)
    after(run)
    tracker.close()
    run.feed.close()
    leave_group()
    return Steps(run, config.folder)


def on_each_rank(run: Run, value: float) -> list[float]:
    """Every rank's value, two places."""
    values = torch.zeros(run.rank.world, dtype=torch.float64, device=run.device)
    values[run.rank.index] = value
    return [round(found, 2) for found in run.strategy.sum_values(values).tolist()]


def gib(name: str) -> float:
    """A figure of torch.cuda in GiB; 0 without a GPU."""
    return float(getattr(torch.cuda, name)()) / 2**30 if torch.cuda.is_available() else 0.0
