"""Weights & Biases, online or with WANDB_MODE=offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from flatout.environment import environment
from flatout.track.record import AnswersRecord, RunEnd, RunStart
from flatout.track.tracker import ANSWER_COLUMNS, DEFAULT_PROJECT, Tracker, answer_rows, end_facts, parameters

# flatout tries again by itself
INIT_TIMEOUT_S = 30.0


class WandbTracker(Tracker):
    """The client uploads by itself, so only the end confirms; the service drops a step that it already has."""

    def on_start(self, start: RunStart) -> None:
        super().on_start(start)
        env = environment()
        self._run: Any = wandb.init(
            project=self.config.project or env.get("WANDB_PROJECT", DEFAULT_PROJECT),
            id=env.get("WANDB_RUN_ID", self.run_id),
            name=env.get("WANDB_NAME", start.name),
            dir=env.get("WANDB_DIR", str(self.folder)),
            tags=self.config.tags or None,
            resume="allow",
            settings=wandb.Settings(
                init_timeout=float(env.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S)),
                silent=True,
                # this process's output, code and git remote are not the run's, and could hold a secret
                console="off",
                disable_code=True,
                disable_git=True,
            ),
        )
        self._run.config.update({**parameters(start), "model_text": start.model_text}, allow_val_change=True)

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def on_answers(self, record: AnswersRecord) -> None:
        table = wandb.Table(columns=list(ANSWER_COLUMNS), data=answer_rows(record))
        # steps must not descend, and the metrics of later ones may already be there
        self._run.log({"answers": table}, step=max(record.step, self._run.step))

    def on_end(self, end: RunEnd) -> None:
        self._run.summary.update(end_facts(end))
        if self.config.upload_final and end.final_dir:
            artifact = wandb.Artifact(f"final-{self._run.id}", type="model")
            artifact.add_dir(end.final_dir)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=end.exit_code)
