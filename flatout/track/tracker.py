"""What a tracker is: a callback that sends records to a service, and what all of them send under the same names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.config.track import TrackConfig
from flatout.track.callback import Callback
from flatout.track.figures import GIB, values_of
from flatout.track.record import FIGURES, KINDS, AnswersRecord, EvalRecord, MeasuredRecord, RunEnd, RunStart, StepRecord

DEFAULT_PROJECT = "flatout"
# figures that services have as the place of all others
_PLACES = ("step", "num_steps")
# an evaluation's figures are sent without the prefix that tells them from a step's
_EVAL_NAMES = {name: name.removeprefix("eval_") for name in FIGURES[EvalRecord]} | {"eval_s": "time_s"}


class Tracker(Callback):
    """Sends to one service; see Callback for the methods. It may block and raise: it never runs in training.

    `on_start` creates the remote run, or continues it if it exists. After an exception the object is dropped, and a new
    one gets what was not confirmed. `on_end` returns when everything has arrived; for a killed run the end is made up.
    `run_id` (32 hex digits) stays the same over restarts; `folder` is for local files.
    """

    # whether a step that is sent again replaces the older one; otherwise a step that a resumed run repeats is left out
    replaces_steps = False

    def __init__(self, run_id: str, folder: Path, config: TrackConfig) -> None:
        self.run_id, self.folder, self.config = run_id, folder, config
        self.first_started_at = self.time = 0.0
        self.last_step = 0

    def on_start(self, start: RunStart) -> None:
        self.first_started_at = self.time = start.first_started_at

    def on_step(self, record: StepRecord) -> None:
        self.time = self.first_started_at + record.elapsed_s
        self.on_eval(record)

    def on_eval(self, record: MeasuredRecord) -> None:
        self.send(metrics(record), record.step)
        self.last_step = record.step

    on_round = on_eval

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Send one record's metrics; `time` is the Unix time of its step, without pauses between restarts."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Send what is buffered; return whether the service confirmed everything so far. By default only the end does.

        What is not confirmed is sent again after a crash.
        """
        return False


def parameters(start: RunStart) -> dict[str, bool | int | float | str]:
    """Return all settings by dotted name, and what the run runs on as `environment.*`; other values become JSON."""
    names = ("device", "dtype", "strategy", "num_ranks", "num_parameters", "num_trained_parameters", "folder")
    values = {**start.settings, **{f"environment.{name}": getattr(start, name) for name in names}}
    gpus = Counter(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in start.gpus)
    values["environment.gpus"] = ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items()) or "none"
    values |= {f"environment.versions.{package}": version for package, version in start.versions.items()}
    return {name: one if isinstance(one, bool | int | float | str) else json.dumps(one) for name, one in values.items()}


def metrics(record: MeasuredRecord) -> dict[str, float]:
    """Return all figures of a record that are numbers: `train/loss`, `eval/loss` and, by data set, `eval/NAME/loss`.

    Those of rounds are `round/reward` and such, and of held-out prompts `held_out/reward`.
    """
    names, by_data = (_EVAL_NAMES, record.by_data) if isinstance(record, EvalRecord) else ({}, {})
    kind = next(kind for kind, record_type in KINDS.items() if isinstance(record, record_type))
    prefix = "train" if kind == "step" else kind
    figures = [(name, value) for name, _, value in values_of(record, FIGURES[type(record)]) if name not in _PLACES]
    sent = {f"{prefix}/{names.get(name, name)}": value for name, value in figures}
    for data, of_data in by_data.items():
        sent |= {f"eval/{data}/{name}": value for name, _, value in values_of(of_data, FIGURES[type(of_data)])}
    return sent


ANSWER_COLUMNS = ("step", "prompt", "answer", "reference")


def answer_rows(record: AnswersRecord) -> list[list[Any]]:
    """Return a row of ANSWER_COLUMNS for each answer, or one that says why there are none."""
    rows = [[record.step, one.prompt, one.answer, one.reference or ""] for one in record.answers]
    return rows or [[record.step, "", f"skipped: {record.skipped}", ""]]


def answers_text(record: AnswersRecord) -> str:
    """Return the answers as Markdown; indented, so that their own markup has no effect."""
    shown = [
        f"{name}:\n\n" + "\n".join(f"    {line}" for line in text.splitlines())
        for row in answer_rows(record)
        for name, text in zip(ANSWER_COLUMNS[1:], row[1:], strict=True)
        if text
    ]
    return "\n\n".join(shown)


def end_facts(end: RunEnd) -> dict[str, str]:
    """Return how the run ended, as text."""
    return {"outcome": end.outcome, **({"why": end.why} if end.why else {})}
