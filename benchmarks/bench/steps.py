"""Runs steps of one configuration through a run's own plan, set-up and loop, without saving."""

from __future__ import annotations

import time
from collections.abc import Callable

from flatout.checkpoint.write import Checkpoints
from flatout.config.schema import Config
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device, join_group, leave_group
from flatout.parallel.rank import Rank
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
