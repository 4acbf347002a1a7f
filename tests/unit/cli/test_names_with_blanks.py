"""A command that is printed works when it is typed, also where the name of a folder or file has a blank."""

from __future__ import annotations

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from flatout.cli.main import main
from flatout.demo import settings, write

# what may follow a command on its line
AFTER = re.compile(r"`|; |, then | {2,}#?|\n")


def commands(text: str) -> list[list[str]]:
    """The words of each flatout command in a text, as a shell reads them."""
    return [shlex.split(AFTER.split(part)[0]) for part in re.split(r"\bflatout (?=[a-z]+ )", text)[1:]]


@pytest.fixture
def here(tiny, tmp_path, monkeypatch):
    """A folder of work with a model, rows and a file of settings whose names have blanks."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.model_dir, tmp_path / "my model")
    shutil.copy(tiny.chats, tmp_path / "my rows.jsonl")
    values = {"model": {"name": "my model"}, "data": "my rows.jsonl", "device": "cpu", "run_dir": "my runs/a run"}
    (tmp_path / "my run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_the_demo_names_its_run(tmp_path, monkeypatch, capsys):
    whole = settings.demo_config

    def short(folder: Path, seed: int) -> settings.Config:
        config = whole(folder, seed)
        return config.model_copy(update={"batch": config.batch.model_copy(update={"max_steps": 1})})

    monkeypatch.setattr(settings, "demo_config", short)
    monkeypatch.setattr(write, "write_demo", partial(write.write_demo, num_train=60, num_held_out=10))
    out = str(tmp_path / "my demo")
    assert main(["demo", "--out", out]) == 1
    talk = commands(capsys.readouterr().out)[-1]
    assert talk == ["chat", f"{out}/run"]
    assert main([*talk, "--prompt", "Hello", "--max-new-tokens", "1"]) == 0


@pytest.mark.usefixtures("here")
def test_files_that_are_written_are_named(capsys):
    assert main(["init", "new run.yaml", "--data", "my rows.jsonl", "--model", "my model"]) == 0
    printed = commands(capsys.readouterr().out)
    assert printed == [["plan", "new run.yaml"], ["train", "new run.yaml"]]
    for words in (*printed, *commands(Path("new run.yaml").read_text())):
        if words[0] in ("plan", "train"):
            assert words[1] == "new run.yaml"
    assert main([*printed[0], "device=cpu"]) == 0
    Path("theirs.yml").write_text("base_model: my model\ndatasets: [{path: my rows.jsonl, type: chat_template}]\n")
    capsys.readouterr()
    assert main(["convert", "theirs.yml", "--to", "our run.yaml"]) == 0
    assert ["plan", "our run.yaml"] in commands(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_a_run_that_has_not_ended_is_named(capsys):
    """And what it is for a model of another run; then the command resumes it."""
    assert main(["train", "my run.yaml", "batch.max_steps=2", "checkpoint.every_steps=1"]) == 0
    shutil.rmtree("my runs/a run/final")
    resume, merge = ["train", "my runs/a run/config.yaml"], ["merge", "my runs/a run", "--out", "a run-merged"]
    capsys.readouterr()
    assert main(["merge", "my runs/a run", "--out", "out"]) == 2
    assert resume in commands(capsys.readouterr().err)
    assert main(["train", "my run.yaml", "model=my runs/a run", "run_dir=other"]) == 2
    assert merge in commands(capsys.readouterr().err)
    assert main(["train", "no such.yaml"]) == 2
    assert ["init", "no such.yaml"] in commands(capsys.readouterr().err)
    assert main(resume) == 0
    assert main(merge) == 0
