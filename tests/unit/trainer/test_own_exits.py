"""sys.exit in a person's own code never ends a run as if it were complete, wherever it is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import UsageError
from flatout.trainer.run import train
from tests.usual import usual

OWN = """
import os, sys
import torch
from pydantic import field_validator
from flatout import LabelTokens, Objective
{module}
class Own(Objective):
    beta: float = 0.1

    @field_validator("beta")
    @classmethod
    def check(cls, value):
        {setting}
        return value

    def __call__(self, tokens):
        loss = -tokens.logprobs.sum()
        {loss}
        return {{"loss": loss}}
"""
BACKWARD = """class Leave(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value): return value.clone()
            @staticmethod
            def backward(ctx, gradient): sys.exit(0)
        loss = Leave.apply(loss)"""


def written(tiny: Any, folder: Path, place: str, code: str, **sections: Any) -> Path:
    """Write a configuration whose objective has this code at this place, and return it."""
    (folder / "own.py").write_text(OWN.format(**{"module": "", "setting": "pass", "loss": "pass", place: code}))
    objective = {"path": f"{folder / 'own.py'}:Own", "beta": 0.2}
    config = tiny.config(folder / "run", **{"batch": {"max_steps": 1}, "objective": objective, **sections})
    (folder / "run.yaml").write_text(dump_config(config, only_given=True))
    return folder / "run.yaml"


def outcome(folder: Path) -> str | None:
    file = folder / "run" / "end.json"
    return str(json.loads(file.read_text())["outcome"]) if file.exists() else None


FAILING = [
    ("loss", "pass", 0, None),
    ("module", "sys.exit(0)", 2, "own.py:6: the objective's own code failed with SystemExit: 0"),
    ("loss", "sys.exit(0)", 2, "own.py:18: objective Own failed with SystemExit: 0"),
    ("loss", "raise KeyboardInterrupt", 130, "stopped"),
    ("loss", BACKWARD, 2, "own.py:22: sys.exit(0) does not end a run; raise an error there, or return"),
    ("loss", "loss = loss * float('nan')", 5, "error: step 1: loss nan"),
    ("setting", "sys.exit()", 2, "own.py:Own: SystemExit"),
    ("loss", "raise GeneratorExit", 2, "own.py:18: objective Own failed with GeneratorExit"),
    ("loss", "loss = loss * (1 + 1j)", 2, "objective Own returned loss of complex numbers; expected a mapping"),
    ("loss", "loss = float(loss)", 2, "objective Own returned loss as a float; expected a mapping"),
]


@pytest.mark.parametrize(("place", "code", "exit_code", "said"), usual(FAILING, FAILING[:6]))
def test_a_run_that_failed_ends_with_its_exit_code_and_one_sentence(
    tiny, tmp_path, capfd, place, code, exit_code, said
):
    assert main(["train", str(written(tiny, tmp_path, place, code))]) == exit_code
    shown = "".join(capfd.readouterr())
    assert "Traceback" not in shown
    if said is None:
        assert outcome(tmp_path) == "complete"
        return
    assert said in " ".join(shown.replace("\n", " ").split())
    assert outcome(tmp_path) in (None, "failed", "stopped")


@pytest.mark.parametrize("verb", usual(["plan", "verify", "train"], ["verify"]))
def test_every_verb_that_runs_the_objective_refuses_its_exit(tiny, tmp_path, capfd, verb):
    file = written(tiny, tmp_path, "module", "def __getattr__(name): sys.exit(0)")
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text().replace("class Own", "class Other"))
    assert main([verb, str(file)]) == 2
    assert "own.py:6: sys.exit(0) does not end a run" in "".join(capfd.readouterr())


class Leaves(flatout.Callback):
    """Calls sys.exit where it is told to, and keeps what it heard."""

    def __init__(self, method: str) -> None:
        self.heard: list[str] = []

        def leave(*_: Any) -> None:
            self.heard.append(method)
            sys.exit(0)

        setattr(self, method, leave)


class Hears(flatout.Callback):
    ended: Any = None

    def on_end(self, end: Any) -> None:
        self.ended = end


HEARD = ["on_start", "on_step", "on_event", "on_save", "on_end", "on_other"]


@pytest.mark.parametrize("method", usual(HEARD, HEARD[1::3] + HEARD[-1:]))
def test_an_exit_of_a_callback_is_an_error_of_the_call(tiny, tmp_path, method):
    config = tiny.config(tmp_path / "run", batch={"max_steps": 1})
    callbacks = Leaves(method), Hears()
    if method == "on_other":
        train(config, callbacks=callbacks)
        assert callbacks[1].ended.outcome == "complete"
        return
    with pytest.raises(UsageError, match=r"test_own_exits.py:\d+: sys.exit\(0\) does not end a run"):
        train(config, callbacks=callbacks)
    assert callbacks[0].heard
    assert callbacks[1].ended is not None


OF_RANKS = [
    ("os._exit(0)", 1, "code such as os._exit(0) ended it"),
    ("sys.exit(0)", 2, "objective Own failed with SystemExit: 0"),
    ("pass", 0, ""),
]


@pytest.mark.parametrize(("code", "exit_code", "said"), usual(OF_RANKS, OF_RANKS[:1]))
def test_ranks_that_exit_with_zero_before_the_end_have_failed(tiny, tmp_path, capfd, code, exit_code, said):
    file = written(tiny, tmp_path, "loss", code, gpus=[0, 1], faults={"max_restarts": 0})
    assert main(["train", str(file)]) == exit_code
    assert said in "".join(capfd.readouterr())
    assert (outcome(tmp_path) == "complete") == (exit_code == 0)
