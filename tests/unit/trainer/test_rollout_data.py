"""Rollouts that a person brings, as policy losses read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.cli.main import main
from flatout.config.read import make_config
from flatout.objectives.load import load_objective
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.run_data import open_tokens

REWARDS = [[1.0, 0.0, 1.0], [0.5, 0.5], [0.0, 2.0]]


def answer(reward: float | None, number: int) -> dict[str, Any]:
    return {"token_ids": [20 + number, 30], "logprobs": [-1, -0.5], "reward": reward}


def settings(tiny: Any, folder: Path, rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"sources": [str(folder / "rows.jsonl")], "root": str(folder / "data"), "template": "chatml"}
    values = {"model": str(tiny.model_dir), "data": data, "objective": kind, "device": "cpu", "eval": {"prompts": []}}
    return values | {"run_dir": str(folder / "run"), "batch": {"samples_per_step": 3, "epochs": 1}, "method": "full"}


GROUPS = [
    {"prompt_ids": [5, 6, 7 + k], "answers": [answer(r, n) for n, r in enumerate(rewards)]}
    for k, rewards in enumerate(REWARDS)
]
# what each objective makes of the rewards of a group
MADE: dict[str, Any] = {
    "grpo": lambda own, every: (own - own.mean()) / (own.std(ddof=1) + 1e-4),
    "rloo": lambda own, every: (own - own.mean()) * len(own) / (len(own) - 1),
    "reinforce": lambda own, every: own - every.mean(),
}


@pytest.mark.parametrize("kind", MADE)
def test_rewards_become_the_advantages_of_the_objective(tiny, tmp_path, kind):
    config, recorder = make_config(settings(tiny, tmp_path, GROUPS, kind), (), origin="a test"), MemoryCallback()
    store = open_tokens(config.data, config, Reporter(recorder), load_objective(config.objective))
    every = np.concatenate(REWARDS)
    expected = np.concatenate([MADE[kind](np.array(own), every) for own in REWARDS])
    for index, advantage in enumerate(expected):
        sample = store.sample(index, ["advantage", "sampler_logprob"])
        assert sample.columns["advantage"][sample.loss_mask] == pytest.approx([advantage] * 2, abs=1e-6)
        assert sample.columns["sampler_logprob"][sample.loss_mask].tolist() == [-1, -0.5]


def test_rows_with_answers_are_refused_where_rollouts_train(tiny, tmp_path, capsys):
    """Also those of prompts alone, which rounds answer."""
    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    for rows, code, said in (
        (chat, 3, "no column 'advantage', which objective grpo needs; give answers that a model has sampled"),
        (chat, 3, "try rollout.rounds=100"),
        ([{"prompt": "one and one", "answer": "2"}] * 8, 3, "try rollout.rounds=100"),
        (GROUPS, 0, "3 groups, compared as objective.advantage=mean_std; 1 have no signal"),
    ):
        (tmp_path / "run.json").write_text(json.dumps(settings(tiny, tmp_path, rows, "grpo")))
        for verb in ("plan", "train") if not code else ("plan",):
            assert main([verb, str(tmp_path / "run.json")]) == code
        told = capsys.readouterr()
        assert said in " ".join((told.out + told.err).split())
    assert (tmp_path / "run" / "final" / "config.json").is_file()
