"""Logging, evaluating and saving every so many steps, or every share of the run."""

import pytest
from pydantic import ValidationError

from flatout.config.schema import CheckpointConfig
from flatout.trainer.metrics import is_due
from flatout.trainer.run import train


def test_shares_of_the_run_are_rounded_up():
    due = [step for step in range(1, 11) if is_due(step, 0.25, 10)]  # every 3 steps, as in transformers
    assert due == [3, 6, 9]
    assert [step for step in range(1, 11) if is_due(step, 1 / 3, 9)] == [3, 6, 9]
    assert [step for step in range(1, 5) if is_due(step, 2, 4)] == [2, 4]
    assert not is_due(4, None, 4)


@pytest.mark.parametrize("value", [0, -1, 1.5, 0.0, True])
def test_other_numbers_are_refused(value):
    with pytest.raises(ValidationError):
        CheckpointConfig(every_steps=value)


def test_a_run_logs_evaluates_and_saves_by_shares(tiny, metrics_of, tmp_path):
    config = tiny.config(
        tmp_path / "run",
        "batch.max_steps=6",
        "log_every_steps=0.5",
        eval={"fraction": 0.1, "every_steps": 0.5},
        checkpoint={"every_steps": 0.34, "keep": 9},
    )
    train(config)
    assert [record["step"] for record in metrics_of(config.folder)] == [3, 6]
    assert [record["step"] for record in metrics_of(config.folder, "eval")] == [0, 3, 6]
    saved = {int(path.name.rpartition("-")[2]) for path in (config.folder / "checkpoints").glob("step-*")}
    assert {3, 6} <= saved
