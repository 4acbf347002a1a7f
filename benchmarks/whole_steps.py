"""Steps of a random model through flatout's own plan, set-up and loop, on one GPU or several: what benchmarks share."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from bench import steps as bench_steps
from bench.ours import base_values
from bench.rows import SAMPLES_PER_STEP
from bench.samples import Samples, random_samples, write_store, write_tokenizer

from flatout.config.read import make_config
from flatout.data.token_store import TokenStore
from flatout.environment import allocator_env
from flatout.parallel.rank import Rank
from flatout.profile.profiler import Profiler
from flatout.track.callback import Callback, MemoryCallback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.run_folder import RunFolderWriter
from flatout.trainer.state import TrainingRun


def prepare(
    out: Path, shape: Mapping[str, Any], num_steps: int, *, samples: Samples | None = None, unit_size: int = 1
) -> TokenStore:
    """The shape's folder without weights, and samples (random ids of chat-like lengths), in a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "model").mkdir(parents=True)
    (out / "model" / "config.json").write_text(json.dumps(shape))
    write_tokenizer(out / "model")
    vocab_size = int(shape["vocab_size"])
    samples = samples or random_samples(num_steps, vocab_size)
    return write_store(out / "data", str(out / "model"), vocab_size, samples, unit_size)


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
    before: Callable[[TrainingRun], None] = lambda run: None,
    after: Callable[[TrainingRun, MemoryCallback], None] = lambda run, recorder: None,
    profile_steps: int = 0,
    writes_records: bool = False,
) -> tuple[TrainingRun, MemoryCallback]:
    """This process's part of a run in a prepared folder; `before` and `after` its steps all ranks are still joined.

    The recorder holds the steps on the first rank only, which also profiles `profile_steps` steps; that slows down all
    ranks.
    """
    paths = {"run_dir": str(out / "run"), "model_dir": str(out / "model"), "data_root": str(out / "data")}
    job = {**paths, "num_steps": num_steps, "samples_per_step": samples_per_step}
    config, recorder = make_config(base_values(job, overrides), list(overrides)), MemoryCallback()
    callbacks: list[Callback] = []
    if Rank.from_env().is_first:
        callbacks = [ConsoleCallback(), recorder]
        callbacks += [RunFolderWriter(config.folder)] if writes_records else []
        if profile_steps:
            config.folder.mkdir(parents=True, exist_ok=True)
            callbacks.append(Profiler(config.folder, profile_steps, print))
    reporter = Reporter(*callbacks)
    return bench_steps.take_steps(config, reporter, before=before, after=lambda run: after(run, recorder)), recorder


def on_each_rank(run: TrainingRun, value: float) -> float | list[float]:
    """Every rank's value, two places; the value itself for one rank."""
    values = torch.zeros(run.rank.world, dtype=torch.float64, device=run.device)
    values[run.rank.index] = value
    found = [round(own, 2) for own in run.strategy.sum_values(values).tolist()]
    return found if len(found) > 1 else found[0]


def gib(name: str) -> float:
    """A figure of torch.cuda in GiB; 0 without a GPU."""
    return float(getattr(torch.cuda, name)()) / 2**30 if torch.cuda.is_available() else 0.0
