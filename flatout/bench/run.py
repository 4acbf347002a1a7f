"""Runs steps of one configuration through a run's own plan, set-up and loop, without saving."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flatout.bench.figures import WARMUP_STEPS, recorded_figures
from flatout.bench.inputs import CHAT, NAME, random_samples, write_store, write_tokenizer
from flatout.checkpoint.write import Checkpoints
from flatout.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, ScheduleConfig
from flatout.data import registry
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device, join_group, leave_group
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.record import RunEnd
from flatout.trainer.build import build_run
from flatout.trainer.decide import plan_run
from flatout.trainer.gpu import weakest_gpu
from flatout.trainer.loop import run_steps
from flatout.trainer.model_shape import read_shape
from flatout.trainer.state import Setup, TrainingRun


def measured_config(config: Config, folder: Path, num_steps: int) -> tuple[Config, str]:
    """Return the configuration for this many steps, without evaluation and saves, and a description of its data.

    If the configuration's data set has been built, it is used; otherwise one of chat-like lengths is written to
    `folder`. Raises DataError if a built one does not fit the settings.
    """
    data, what = config.data.model_copy(update={"sources": []}), f"{config.data.name}, as built"
    if data.name not in registry.load(data.root):
        what, tokenizer = "random token ids with chat-like lengths", str(folder / "tokenizer")
        vocab_size = read_shape(config.model.name, config.model.revision).vocab_size
        num_groups = -(-num_steps * config.batch.samples_per_step // CHAT.samples_per_group)
        samples = random_samples(num_groups, vocab_size, max_tokens=data.max_tokens)
        write_tokenizer(folder / "tokenizer")
        write_store(folder / "data", tokenizer, vocab_size, samples)
        data = DataConfig(name=NAME, root=folder / "data", tokenizer=tokenizer)
    changes = {
        "run_dir": folder / "run",
        "log_every_steps": 1,
        "data": data,
        "batch": config.batch.model_copy(update={"max_steps": num_steps}),
        "schedule": ScheduleConfig(kind="constant", warmup_steps=0),
        "eval": EvalConfig(),
        "checkpoint": CheckpointConfig(every_steps=None, asynchronous=False),
    }
    return config.model_copy(update=changes), what


def take_steps(
    config: Config,
    reporter: Reporter,
    *,
    before: Callable[[TrainingRun], None] = lambda run: None,
    after: Callable[[TrainingRun], None] = lambda run: None,
) -> TrainingRun:
    """Take this rank's part of a run's steps. `before` and `after` are called while the process group is up."""
    rank = Rank.from_env()

    def meet() -> ControlGroup:
        join_group(rank, choose_device(config.wanted_device, rank))
        return ControlGroup(rank)

    planned = plan_run(config, reporter, rank, lambda: weakest_gpu(config, rank, meet))
    checkpoints = Checkpoints(config.folder, keep=1, on_event=reporter.event, group=meet())
    run = build_run(Setup(config, planned, checkpoints, reporter, rank))
    before(run)
    reporter.phase("step", 1)
    try:
        run_steps(run)
        after(run)
    finally:
        run.close()
        reporter.end(RunEnd("complete", 0, time.time()))
    leave_group()
    return run


def measure(config: Config, launched_s: float) -> dict[str, Any] | None:
    """Take all steps of the configuration and return the figures; None on every rank but the first."""
    recorder = MemoryCallback()
    is_first = Rank.from_env().is_first
    with ConsoleCallback() if is_first else nullcontext() as console:
        run = take_steps(config, Reporter(*((console, recorder) if console else ())))
    if not is_first:
        return None
    timed = recorder.steps[WARMUP_STEPS:]
    timed_s = sum(step.step_s for step in timed)
    shares = [step.mfu * step.step_s for step in timed if step.mfu is not None]
    return {
        **recorded_figures(recorder, launched_s),
        "mfu": sum(shares) / timed_s if shares else None,
        "peak_memory_bytes": max(step.peak_memory_bytes for step in recorder.steps),
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU",
        "num_ranks": run.rank.world,
    }
