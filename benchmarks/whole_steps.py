"""Steps of a random model through flatout's own plan, set-up and loop, on one GPU or several: what benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from bench.ours import base_values
from bench.rows import SAMPLES_PER_STEP

from flatout.bench import run as flatout_bench
from flatout.bench.figures import WARMUP_STEPS, recorded_figures
from flatout.bench.inputs import Samples, random_samples, write_store, write_tokenizer
from flatout.config.read import make_config
from flatout.environment import allocator_env
from flatout.parallel.rank import Rank
from flatout.profile.profiler import Profiler
from flatout.track.callback import Callback, MemoryCallback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.record import StepRecord
from flatout.track.run_folder import RunFolderWriter
from flatout.trainer.state import Run


@dataclass(frozen=True)
class Steps:
    """What was run, on every rank; the recorder holds the steps on the first rank only."""

    run: Run
    recorder: MemoryCallback

    @property
    def records(self) -> list[StepRecord]:
        """The step records; empty on every rank but the first."""
        return self.recorder.steps

    @property
    def facts(self) -> dict[str, Any]:
        """The machine, the recompute level and all losses; only on the first rank."""
        return {
            "gpus": self.run.rank.world,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "recompute": self.run.memory.recompute,
            "losses": [round(step.loss, 4) for step in self.records],
        }

    def summary(self, launched_s: float) -> dict[str, Any]:
        """What a benchmark tells of steps beyond the warm-up; only on the first rank."""
        rates = recorded_figures(self.recorder, launched_s)
        return {
            **self.facts,
            "tokens_per_s": round(rates["tokens_per_s"]),
            "step_p50_s": round(rates["step_p50_s"], 4),
            "launch_to_first_step_s": round(rates["launch_to_first_step_s"], 1),
            "micro_batches": [step.num_micro_batches for step in self.records[WARMUP_STEPS:]],
        }


def make_parser(description: str | None, *, gpus: int, steps: int) -> argparse.ArgumentParser:
    """The options of every script that spreads steps over ranks, with its defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=gpus)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("/tmp") / Path(sys.argv[0]).stem)
    parser.add_argument("overrides", nargs="*")
    return parser


def prepare(
    out: Path,
    shape: Mapping[str, Any],
    num_steps: int,
    samples_per_step: int = SAMPLES_PER_STEP,
    samples: Samples | None = None,
) -> None:
    """The shape's folder without weights, and samples (random ids of chat-like lengths), in a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "model").mkdir(parents=True)
    (out / "model" / "config.json").write_text(json.dumps(shape))
    write_tokenizer(out / "model")
    vocab_size = int(shape["vocab_size"])
    samples = samples or random_samples(num_steps * samples_per_step // SAMPLES_PER_STEP, vocab_size)
    write_store(out / "data", str(out / "model"), vocab_size, samples)


def spread_over(num_gpus: int) -> NoReturn:
    """Become this script's command once more as so many ranks, with `--part`: a signal ends them all.

    The environment is the one that `flatout train` gives itself.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}") if num_gpus > 1 else ()
    sys.stdout.flush()
    env = {**os.environ, **allocator_env(os.environ)}
    os.execve(sys.executable, [sys.executable, *launcher, *sys.argv, "--part"], env)


def take_steps(
    out: Path,
    overrides: Sequence[str],
    num_steps: int,
    samples_per_step: int = SAMPLES_PER_STEP,
    *,
    before: Callable[[Run], None] = lambda run: None,
    after: Callable[[Run, MemoryCallback], None] = lambda run, recorder: None,
    profile_steps: int = 0,
) -> Steps:
    """This process's part of a run in a prepared folder; `before` and `after` its steps all ranks are still joined.

    The first rank profiles `profile_steps` steps, which slows down all ranks.
    """
    paths = {"run_dir": str(out / "run"), "model_dir": str(out / "model"), "data_root": str(out / "data")}
    job = {**paths, "num_steps": num_steps, "samples_per_step": samples_per_step}
    config, recorder = make_config(base_values(job, overrides), list(overrides)), MemoryCallback()
    callbacks: list[Callback] = []
    if Rank.from_env().is_first:
        callbacks = [ConsoleCallback(), RunFolderWriter(config.folder), recorder]
        callbacks += [Profiler(config.folder, profile_steps, print)] if profile_steps else []
    reporter = Reporter(*callbacks)
    run = flatout_bench.take_steps(config, reporter, before=before, after=lambda run: after(run, recorder))
    return Steps(run, recorder)


def on_each_rank(run: Run, value: float) -> list[float]:
    """Every rank's value, two places."""
    values = torch.zeros(run.rank.world, dtype=torch.float64, device=run.device)
    values[run.rank.index] = value
    return [round(found, 2) for found in run.strategy.sum_values(values).tolist()]


def gib(name: str) -> float:
    """A figure of torch.cuda in GiB; 0 without a GPU."""
    return float(getattr(torch.cuda, name)()) / 2**30 if torch.cuda.is_available() else 0.0
