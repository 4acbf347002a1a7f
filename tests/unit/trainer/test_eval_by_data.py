"""Evaluation on several data sets: figures of each, whose sum decides; one set stays as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.build import open_or_build
from flatout.errors import CheckpointError, DataError
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.track.run_log import read_run
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train


def test_figures_of_each_data_set_add_up(tiny, tmp_path):
    rows = tiny.chats.read_text().splitlines(keepends=True)
    evaluation = {"every_steps": 1, "prompts": None, "max_new_tokens": 2}
    sections = {"data": {"root": str(tmp_path), "num_procs": 1}, "batch": {"max_steps": 2}}
    config = tiny.config(tmp_path / "both", eval={**evaluation, "data": ["code", "chats-b"]}, **sections)
    for name, part in (("code", rows[:7]), ("chats-b", rows[7:30])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(part))
        held_out = {"name": name, "sources": [SourceConfig(path=str(file))]}
        open_or_build(config.data.model_copy(update=held_out), config.model.name)
    train(config)
    log = read_run(config.folder)
    for record in log.evals:
        assert list(record.by_data) == ["code", "chats-b"]
        each = record.by_data.values()
        assert record.num_label_tokens == sum(one.num_label_tokens for one in each)
        for figure in ("loss", "token_accuracy"):
            total = sum(getattr(one, figure) * one.num_label_tokens for one in each) / record.num_label_tokens
            assert getattr(record, f"eval_{figure}") == pytest.approx(total, rel=1e-12)
    best = min(log.evals, key=lambda one: one.eval_loss)
    assert [one.is_best for one in log.evals].count(True) >= 1
    assert max(one.step for one in log.evals if one.is_best) == best.step
    # prompts come from the data sets in turn
    assert len(log.answers[0].answers) == 3

    alone = tiny.config(tmp_path / "alone", eval={**evaluation, "data": ["code"]}, **sections)
    assert alone.eval.data == "code"
    train(alone)
    single = read_run(alone.folder).evals
    assert [one.eval_loss for one in single] == [one.by_data["code"].loss for one in log.evals]
    assert single[0].by_data == {}

    # fingerprints of a run with one data set are as before there were several
    facts = {
        run: json.loads(next((tmp_path / run).glob("checkpoints/*/state.json")).read_text())
        for run in ("both", "alone")
    }
    saved = {run: found["facts"]["fingerprints"]["eval_data"] for run, found in facts.items()}
    assert saved["alone"] == saved["both"][0]
    assert [one["name"] for one in saved["both"]] == ["code", "chats-b"]
    longer = tiny.config(tmp_path / "both", eval={**evaluation, "data": "code"}, **sections)
    with pytest.raises(CheckpointError, match=r"eval\.data"):
        train(longer)


def test_a_set_to_evaluate_on_has_its_own_rows_and_the_tokens_of_the_run(tiny, tmp_path):
    """What chooses the rows of the training data says nothing of the evaluation set; what makes tokens must agree."""
    data = {"root": str(tmp_path), "num_procs": 1}
    held_out = {"name": "held-out", "sources": [SourceConfig(path=str(tiny.chats))]}
    open_or_build(tiny.config(tmp_path / "run", data=data).data.model_copy(update=held_out), str(tiny.model_dir))

    def planned(**settings: Any) -> Any:
        config = tiny.config(tmp_path / "run", data=data | settings, eval={"data": "held-out", "prompts": []})
        return open_and_plan(config, Reporter(), Rank(0, 1), None)

    own = {"dedupe": "exact", "num_samples": 30, "shuffle": False, "seed": 4, "on_bad_row": "skip"}
    found = planned(**own)
    assert found.eval_sets[0].store.num_samples == 120
    assert found.store.num_samples < 31
    with pytest.raises(DataError, match="was built with loss_type=response_only, but all is configured"):
        planned(loss_type="all")
