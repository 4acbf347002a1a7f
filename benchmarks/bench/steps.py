"""Runs steps of one configuration through a run's own plan, set-up and loop, without saving."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flatout.checkpoint.write import Checkpoints
from flatout.config.schema import Config
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device, join_group, leave_group
from flatout.parallel.rank import Rank
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.track.callback import Reporter
from flatout.track.record import RunEnd
from flatout.trainer.build import build_run
from flatout.trainer.loop import run_steps
from flatout.trainer.planned_run import plan_run
from flatout.trainer.run_data import open_data
from flatout.trainer.state import Setup, TrainingRun
from flatout.trainer.steps_and_memory import weakest_gpu


def take_steps(
    config: Config,
    reporter: Reporter,
    *,
    before: Callable[[TrainingRun], None] = lambda run: None,
    after: Callable[[TrainingRun], None] = lambda run: None,
) -> TrainingRun:
    """Take this rank's part of a run's steps. `before` and `after` are called while the process group is up."""
    rank = Rank.from_env()

    data = open_data(config, reporter, rank, starts=True)
    join_group(rank, choose_device(config.wanted_device, rank))
    group = ControlGroup(rank)
    planned = plan_run(config, data, reporter, rank, weakest_gpu(config, group))
    checkpoints = Checkpoints(config.folder, keep=1, on_event=reporter.event, group=group)
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


def planned_memory(run: TrainingRun) -> dict[str, Any]:
    """What the plan counts for the largest micro-batch of these steps, and its parts; nothing without a GPU."""
    if run.memory.model is None:
        return {}
    batches = [batch for step in run.plan.steps() for batch in step.by_rank[run.rank.index]]
    largest = max(batches, key=lambda batch: batch.num_tokens)
    size = MicroBatchSize(largest.num_tokens, largest.num_label_tokens, len(largest.sample_ids))
    planned = run.memory.model.estimate(size, run.memory.recompute, accumulates=run.memory.accumulates)
    parts = ("weights", "adapter", "gradients", "optimizer", "activations", "working")
    return {
        "planned_gib": round(planned.total_bytes / 2**30, 2),
        "planned_parts_gib": {part: round(getattr(planned, f"{part}_bytes") / 2**30, 2) for part in parts},
        "largest_micro_batch": largest.num_tokens,
    }
