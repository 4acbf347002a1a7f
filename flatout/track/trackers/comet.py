"""Comet, online or with COMET_START_ONLINE=0 to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.environment import environment, set_environment
from flatout.track.record import AnswersRecord, RunEnd, RunStart
from flatout.track.tracker import ANSWER_COLUMNS, DEFAULT_PROJECT, Tracker, answer_rows, end_facts, parameters

FLUSH_S = 30


class CometTracker(Tracker):
    """Online, a flush waits for the service; offline, only the end writes the archive that `comet upload` takes."""

    def on_start(self, start: RunStart) -> None:
        # before the import: otherwise Comet logs what the other trackers' clients do in this process, too
        set_environment({"COMET_DISABLE_AUTO_LOGGING": "1"})
        import comet_ml

        super().on_start(start)
        env = environment()
        offline = env.get("COMET_OFFLINE_DIRECTORY", str(self.folder / "comet"))
        options = comet_ml.ExperimentConfig(
            name=start.name,
            tags=self.config.tags,
            offline_directory=offline,
            # this process's code, arguments, output and git remote are not the run's, and could hold a secret
            **dict.fromkeys(("log_code", "log_git_metadata", "log_git_patch", "log_graph", "parse_args"), False),
            auto_output_logging=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            display_summary_level=0,
        )
        self._experiment: Any = comet_ml.start(
            project_name=self.config.project or env.get("COMET_PROJECT_NAME", DEFAULT_PROJECT),
            experiment_key=env.get("COMET_EXPERIMENT_KEY", self.run_id),
            experiment_config=options,
        )
        self._is_online = isinstance(self._experiment, comet_ml.Experiment)
        self._experiment.log_parameters(parameters(start))
        self._experiment.set_model_graph(start.model_text)

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._experiment.log_metrics(dict(values), step=step)

    def on_answers(self, record: AnswersRecord) -> None:
        self._experiment.log_table(f"answers-{record.step}.csv", answer_rows(record), headers=list(ANSWER_COLUMNS))

    def on_end(self, end: RunEnd) -> None:
        for name, text in end_facts(end).items():
            self._experiment.log_other(name, text)
        if self.config.upload_final and end.final_dir:
            self._experiment.log_model("final", end.final_dir)
        self.flush()
        self._experiment.end()

    def flush(self) -> bool:
        if not self._experiment.flush(timeout=FLUSH_S):
            raise ConnectionError(f"Comet confirmed nothing for {FLUSH_S} s")
        return self._is_online
