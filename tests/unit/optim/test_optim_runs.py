"""Runs of every optimizer by the command line: they learn, and resume to the bit; unknown names are answered."""

from __future__ import annotations

import pytest
from run_folders import as_after, require_equal, state_of

from flatout.cli.main import main
from flatout.config.optim import OPTIMIZERS
from flatout.config.read import dump_config
from tests.usual import usual

RUNS = [(name, method) for name in OPTIMIZERS for method in ("lora", "full")]


@pytest.mark.parametrize(("name", "method"), usual(RUNS, [("muon", "full"), ("adafactor", "full"), ("lion", "lora")]))
def test_a_run_learns_and_resumes_to_the_bit(tiny, tmp_path, metrics_of, name, method):
    values = {"method": method, "checkpoint": {"every_steps": 1, "keep": 20}, "eval": {"fraction": 0.1}}
    whole, again = tmp_path / "whole", tmp_path / "again"
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(tiny.config(whole, f"optim.name={name}", **values)))
    assert main(["train", str(path)]) == 0
    losses = [line["loss"] for line in metrics_of(whole)]
    assert losses[-1] < losses[0]
    assert metrics_of(whole, "eval")
    as_after(whole, 3, again)
    assert main(["train", str(path), f"run_dir={again}"]) == 0
    require_equal(state_of(whole, 8), state_of(again, 8))
    assert [line["loss"] for line in metrics_of(again)] == losses


@pytest.mark.parametrize(("given", "meant"), [("muonn", "muon"), ("ada_factor", "adafactor"), ("lions", "lion")])
def test_a_name_that_is_nearly_one_is_answered_by_it(capsys, given, meant):
    assert main(["plan", "model=m", "data=d", f"optim.name={given}"]) == 2
    assert f"optim.name={meant}" in " ".join(capsys.readouterr().err.split())
