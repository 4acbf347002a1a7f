"""TensorBoard: event files in the run folder's trackers/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from flatout.track.record import AnswersRecord, RunEnd, RunStart
from flatout.track.tracker import Tracker, answers_text, end_facts, parameters


class TensorBoardTracker(Tracker):
    """Each process writes its own file, whose first step hides what older files have from there on."""

    replaces_steps = True

    def on_start(self, start: RunStart) -> None:
        super().on_start(start)
        self._writer, self._is_new = EventFileWriter(str(self.folder / "tensorboard")), True
        self._add(0, summary=hparams_pb(parameters(start), trial_id=self.run_id))
        self._add(0, summary=text_pb("model", f"```\n{start.model_text}\n```"))
        if self.config.tags:
            self._add(0, summary=text_pb("tags", ", ".join(self.config.tags)))

    def on_answers(self, record: AnswersRecord) -> None:
        self._add(record.step, summary=text_pb("answers", answers_text(record)))

    def on_end(self, end: RunEnd) -> None:
        for name, text in end_facts(end).items():
            self._add(self.last_step, summary=text_pb(name, text))
        self._writer.close()

    def flush(self) -> bool:
        self._writer.flush()
        return True

    def send(self, values: Mapping[str, float], step: int) -> None:
        is_step = "train/loss" in values
        if step < self.last_step or (is_step and (self._is_new or step == self.last_step)):
            # a reader drops what it has from this step on
            self._add(step, session_log=SessionLog(status=SessionLog.START))
        self._is_new = self._is_new and not is_step
        self._add(step, summary=Summary(value=[Summary.Value(tag=name, simple_value=values[name]) for name in values]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=self.time, step=step, **content))
