"""A run with its model, optimizer and loader, as training takes its steps, but without the loop."""

from __future__ import annotations

from flatout.checkpoint.write import Checkpoints
from flatout.config.schema import Config
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.build import build_run
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.state import Setup, TrainingRun


def built_run(config: Config, planned: PlannedRun | None = None) -> TrainingRun:
    """The run of one rank; `run.planned` is its plan."""
    checkpoints = Checkpoints(config.folder, keep=1, on_event=lambda kind, facts: None)
    return build_run(
        Setup(config, planned or open_and_plan(config, Reporter(), Rank()), checkpoints, Reporter(), Rank())
    )
