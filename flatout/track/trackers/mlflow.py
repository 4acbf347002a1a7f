"""MLflow: a tracking server, or a local store, by MLFLOW_TRACKING_URI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.utils import validation

from flatout.environment import environment, set_environment
from flatout.track.record import AnswersRecord, RunEnd, RunStart
from flatout.track.tracker import DEFAULT_PROJECT, Tracker, answers_text, end_facts, parameters

# by outcome
STATES = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# flatout tries again by itself, without a limit
HTTP_DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
RUN_ID_TAG = "flatout.run_id"


class MlflowTracker(Tracker):
    """Sends in batches. A metric's time comes from its record, so the store drops what it already has."""

    def on_start(self, start: RunStart) -> None:
        super().on_start(start)
        set_environment({name: value for name, value in HTTP_DEFAULTS.items() if name not in environment()})
        self._client, self._metrics = MlflowClient(), list[Metric]()
        run = self._find_or_create(start.name)
        self._run_id = run.info.run_id
        # a parameter cannot change: what a resumed run changes gets a name of its own
        old, new = run.data.params, {}
        for name, value in parameters(start).items():
            text = str(value)[: validation.MAX_PARAM_VAL_LENGTH]
            new[name if old.get(name, text) == text else f"{name}/step-{start.resumed_step or 0}"] = text
        limit = validation.MAX_PARAMS_TAGS_PER_BATCH
        self._log("params", [Param(name, text) for name, text in new.items() if name not in old], limit)
        tags = {"model_text": start.model_text[: validation.MAX_TAG_VAL_LENGTH]}
        tags |= dict.fromkeys(self.config.tags, "true")
        self._log("tags", [RunTag(name, text) for name, text in tags.items()], limit)
        self._client.update_run(self._run_id, status="RUNNING")

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._metrics += [Metric(name, value, round(self.time * 1e3), step) for name, value in values.items()]

    def flush(self) -> bool:
        self._log("metrics", self._metrics, validation.MAX_METRICS_PER_BATCH)
        self._metrics = []
        return True

    def on_answers(self, record: AnswersRecord) -> None:
        self._client.log_text(self._run_id, answers_text(record), f"answers/step-{record.step:07}.md")

    def on_end(self, end: RunEnd) -> None:
        for name, text in end_facts(end).items():
            self._client.set_tag(self._run_id, name, text[: validation.MAX_TAG_VAL_LENGTH])
        self._client.set_terminated(self._run_id, STATES[end.outcome], end_time=round(end.ended_at * 1e3))
        if self.config.upload_final and end.final_dir:
            self._client.log_artifacts(self._run_id, end.final_dir, Path(end.final_dir).name)

    def _find_or_create(self, name: str) -> Any:
        """Return the run that MLFLOW_RUN_ID names, or the one that was made for this run folder, or a new one."""
        env = environment()
        if run_id := env.get("MLFLOW_RUN_ID"):
            return self._client.get_run(run_id)
        experiment_id = None if self.config.project else env.get("MLFLOW_EXPERIMENT_ID")
        if experiment_id is None:
            project = self.config.project or env.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        tags = {RUN_ID_TAG: self.run_id}
        runs = self._client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{self.run_id}'")
        started_ms = round(self.first_started_at * 1e3)
        return runs[0] if runs else self._client.create_run(experiment_id, started_ms, tags, name)

    def _log(self, kind: str, items: Sequence[Any], limit: int) -> None:
        """Send metrics, params or tags, at most `limit` in a request."""
        for first in range(0, len(items), limit):
            self._client.log_batch(self._run_id, **{kind: items[first : first + limit]})
