"""A person's own objective that reads scores: its rows, its restart, and the commands that follow it."""

from __future__ import annotations

import json
import shlex
from contextlib import chdir

import pytest

import flatout
from flatout.cli.main import main
from flatout.config.read import dump_config

OWN = """
from flatout.objectives.reward import Classify
from flatout.objectives.cross_entropy import CrossEntropy

class Own(Classify):
    pass

class Writes(CrossEntropy):
    pass

class Guessed(Classify):
    row_format = None

class Typo(Classify):
    row_format = "clasify"
"""
# two columns that are plain text unless a format says otherwise
ROWS = "text,label\n" + "".join(f"it was {word},{label}\n" for word, label in [("great", "good"), ("poor", "bad")] * 6)


@pytest.fixture(scope="module")
def here(tiny, tmp_path_factory):
    """A folder with run.yaml, and two runs of one step: own, which scores, and writes."""
    root = tmp_path_factory.mktemp("own")
    (root / "own.py").write_text(OWN)
    (root / "rows.csv").write_text(ROWS)
    config = tiny.config(root, batch={"max_steps": 1, "samples_per_step": 4})
    changes = {"run_dir": None, "data": config.data.model_copy(update={"sources": [], "root": root / "data"})}
    (root / "run.yaml").write_text(dump_config(config.model_copy(update=changes)))
    with chdir(root):
        assert main([*own("Own"), "name=own"]) == 0
        data = ["data.name=chats", f"data.sources=[{{path: {tiny.chats}}}]"]
        assert main(["train", "run.yaml", "name=writes", "objective=own.py:Writes", *data]) == 0
    return root


def own(name: str) -> list[str]:
    words = [f"objective=own.py:{name}", "lora.modules_to_save=[score]", "data.name=rows"]
    return ["train", "run.yaml", *words, "data.sources=[{path: rows.csv}]"]


def test_its_rows_have_the_format_that_it_names(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    report = json.loads((here / "data/built_dataset/rows/report.json").read_text())
    assert report["counts"]["rows"] == 12
    assert main([*own("Own"), "name=named", "data.sources=[{path: rows.csv, format: classify}]"]) == 0
    # without blanks, as a long path is wrapped
    assert f"Reusing{here}/data/built_dataset/rows" in "".join(capsys.readouterr().out.split())
    for name, code, said in (("Guessed", 3, "'class'"), ("Typo", 2, "row_format is 'clasify'; expected None, or one")):
        assert main([*own(name), "name=refused", f"data.name={name}"]) == code
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "verb"), [("own", "eval"), ("writes", "chat")])
def test_the_next_command_works(here, monkeypatch, capsys, name, verb):
    monkeypatch.chdir(here)
    assert main(["watch", f"runs/{name}"]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next"))
    words = shlex.split(said.replace("FILE", "rows.csv"))[2:]
    assert words[0] == verb
    assert main([*words, *{"eval": ["--device", "cpu"], "chat": ["--prompt", "hi", "--device", "cpu"]}[verb]]) == 0


def test_it_starts_over(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    assert main([*own("Own"), "name=own", "seed=5", "lora.modules_to_save=[scroe]", "--restart"]) == 2
    assert not (here / "runs/own.old-1").exists()
    assert main([*own("Own"), "name=own", "seed=5", "--restart"]) == 0
    assert "the earlier run is now runs/own.old-1" in capsys.readouterr().out
    assert flatout.load("runs/own").config.seed == 5
    # one that writes has no score to save
    wrong = [
        "train",
        "run.yaml",
        "name=writes",
        "objective=own.py:Writes",
        "lora.modules_to_save=[score]",
        "data.name=chats",
    ]
    assert main([*wrong, "--restart"]) == 2
    assert "'score' matches no module" in capsys.readouterr().err
