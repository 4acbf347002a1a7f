"""Losses over answers as a person names them: their settings, what they refuse; test_losses.py has every loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unit_store import write_units

from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.errors import DataError
from flatout.objectives.preference import ORPO, Answers
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.planned_run import open_and_plan


def config_of(tiny: Any, root: Path, folder: Path, **sections: Any) -> Config:
    values = {
        "run_dir": str(folder),
        "device": "cpu",
        "method": "full",
        "model": {"name": str(tiny.model_dir), "precision": "fp64"},
        "data": {"name": "pairs", "root": str(root)},
        "batch": {"samples_per_step": 5, "max_steps": 2},
        **sections,
    }
    return make_config(values)


@pytest.mark.parametrize(
    ("method", "kind", "lr"),
    [("full", "simpo", 1e-6), ("lora", "simpo", 1e-5), ("lora", "orpo", 5e-5), ("lora", "cross_entropy", 2e-4)],
)
def test_the_learning_rate_follows_the_kind(tiny, tmp_path, method, kind, lr):
    for given in (kind, {"kind": kind}):
        auto = config_of(tiny, tmp_path, tmp_path / "run", method=method, objective=given, optim={"lr": "auto"})
        assert auto.optim.lr == lr
    own = config_of(tiny, tmp_path, tmp_path / "run", method=method, objective=kind, optim={"lr": 3e-4})
    assert own.optim.lr == 3e-4


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([2] * 4, None),
        ([1] * 8, "objective simpo needs a chosen and a rejected answer in each row; 8 of 8"),
        ([2, 1, 3] * 4, "objective simpo .* 8 of 12"),
    ],
)
def test_only_pairs_are_trained_on(tiny, tmp_path, sizes, said):
    write_units(tmp_path, tiny.model_dir, sizes, name="pairs")
    config = config_of(tiny, tmp_path, tmp_path / "run", objective="simpo")
    if said is None:
        assert open_and_plan(config, Reporter(), Rank()).plan.num_units == 4
        # the model is tiny, so 200 times the usual rate is none too great
        for lr, is_told in (("auto", False), (2e-4, False), (2e-2, True)):
            recorder = MemoryCallback()
            config = config_of(tiny, tmp_path, tmp_path / "run", objective="simpo", optim={"lr": lr})
            open_and_plan(config, Reporter(recorder), Rank())
            assert ("optim.lr 0.02 is 20,000 times the usual 1e-06" in str(recorder.events)) == is_told
        return
    with pytest.raises(DataError, match=said):
        open_and_plan(config, Reporter(), Rank())


def test_an_answer_without_a_label_token_is_named(tiny, tmp_path):
    store = write_units(tmp_path, tiny.model_dir, [2] * 4, name="pairs", unlabelled=5)
    with pytest.raises(DataError, match="sample 5 has no label token, so objective simpo has nothing of"):
        open_and_plan(config_of(tiny, tmp_path, tmp_path / "run", objective="simpo"), Reporter(), Rank())
    assert store.num_label_tokens[5] == 0


def test_odds_of_certainty_are_finite():
    logprob = torch.tensor([0.0, -1e-9, -0.5, -200.0], requires_grad=True)
    answers = Answers(logprob, torch.full((4,), 2), None)
    losses = ORPO().losses(answers, Answers(logprob.flip(0), torch.full((4,), 2), None))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()
