"""Trackio: a local database that `trackio show` opens, or a Space or server by TRACKIO_SPACE_ID, TRACKIO_SERVER_URL."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from flatout.track.record import AnswersRecord, RunEnd, RunStart
from flatout.track.tracker import ANSWER_COLUMNS, DEFAULT_PROJECT, Tracker, answer_rows, end_facts, parameters


class TrackioTracker(Tracker):
    """The client writes in the background and keeps what a server does not take, so only the end confirms."""

    def on_start(self, start: RunStart) -> None:
        super().on_start(start)
        facts = {**parameters(start), "model_text": start.model_text, "tags": self.config.tags}
        name = f"{start.name}-{self.run_id[:8]}"
        project = self.config.project or DEFAULT_PROJECT
        self._run = trackio.init(project, name, config=facts, resume="allow", embed=False)

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def on_answers(self, record: AnswersRecord) -> None:
        table = trackio.Table(columns=list(ANSWER_COLUMNS), data=answer_rows(record))
        self._run.log({"answers": table}, step=record.step)

    def on_end(self, end: RunEnd) -> None:
        self._run.log(end_facts(end), step=self.last_step)
        if self.config.upload_final and end.final_dir:
            self._run.log_artifact(end.final_dir, name="final", type="model")
        self._run.finish()
