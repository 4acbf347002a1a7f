"""Settings that lie in a run's folder are that run's, also where it was moved or copied; for every door alike."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from usual import usual

import flatout
from flatout.cli.main import main
from flatout.config.read import load_config
from flatout.errors import PreemptedError
from flatout.track.callback import Callback
from tests.conftest import read_metrics


class StopAtTwo(Callback):
    """Asks the run to save and stop, as a cluster does."""

    def on_step(self, record: Any) -> None:
        if record.step == 2:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A project with the run `ok`, which is finished, and `half`, which stopped at step 2 of 4.

    Its data is named by relative paths, its model was in memory and is in the folder of each run.
    """
    home = tmp_path_factory.mktemp("moved") / "project"
    home.mkdir()
    shutil.copy(tiny.chats, home)
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    with torch.no_grad():
        model.model.norm.weight *= 1.5
    settings = tiny.config(Path("runs/half")).model_dump(mode="json", include={"device", "lora", "optim", "eval"})
    settings |= {"batch": {"samples_per_step": 6, "micro_batch_tokens": 700, "max_steps": 4}, "seed": 7}
    settings["data"] = {"name": "chats", "sources": [{"path": "chats.jsonl"}], "max_tokens": 500}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        flatout.train(settings, model=model, name="ok")
        with pytest.raises(PreemptedError):
            flatout.train(settings, model=model, name="half", callbacks=[StopAtTwo()])
    return home


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # the registry of data sets has the time of its last reading
    files = [path for path in files if path.name != "data_config.json"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(params=usual(["moved", "copied", "in its folder", "from elsewhere"], ["copied"]))
def placed(made, tmp_path, monkeypatch, request):
    """Moves or copies a run of a copy of the project, and returns the path by which it is named then."""
    home, how = tmp_path / "project", str(request.param)
    shutil.copytree(made, home)
    at_first = contents(made)
    left: dict[str, dict[str, tuple[int, bytes]]] = {}

    def place(name: str) -> Path:
        old, new = home / "runs" / name, home / "X"
        if how == "copied":
            shutil.copytree(old, new)
            (old / "final").exists() and (old / "final" / "adapter_model.safetensors").write_bytes(b"another")
            left[name] = contents(old)
        else:
            old.rename(new)
        monkeypatch.chdir({"in its folder": new, "from elsewhere": tmp_path}.get(how, home))
        return Path(os.path.relpath(new))

    yield place
    assert {name: contents(home / "runs" / name) for name in left} == left
    assert how == "copied" or len(list((home / "runs").iterdir())) == 1
    assert contents(made) == at_first


def from_step(folder: Path) -> int | None:
    return flatout.load(folder).log.start.resumed_step  # type: ignore[union-attr]


def trains(run: Path) -> None:
    assert main(["train", str(run / "config.yaml")]) == 0


def trains_in_python(run: Path) -> None:
    assert flatout.train(run / "config.yaml").folder.resolve() == run.resolve()


def trains_in_python_by_its_config(run: Path) -> None:
    assert flatout.train(flatout.load(run).config).folder.resolve() == run.resolve()


@pytest.mark.parametrize("train", [trains, trains_in_python, trains_in_python_by_its_config])
def test_training_the_settings_of_a_run_continues_it_where_it_is(placed, train):
    run = placed("half")
    train(run)
    assert from_step(run) == 2
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4]
    assert (run / "final").is_dir()
    config = load_config(run / "config.yaml")
    assert Path(config.model.name).parent.resolve() == run.resolve()


def chats(run: Path) -> None:
    assert main(["chat", str(run), "--prompt", "Hi", "--max-new-tokens", "1", "--device", "cpu"]) == 0


def evaluates(run: Path) -> None:
    Path("questions.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    command = ["eval", str(run), "--answers", "questions.jsonl", "--max-new-tokens", "1", "--device", "cpu"]
    assert main(command) == 0
    assert (run / "eval" / "questions.json").is_file()


def merges(run: Path) -> None:
    assert main(["merge", str(run), "--out", "whole"]) == 0


def exports(run: Path) -> None:
    assert main(["export", str(run), "--to", "vllm", "--out", "whole"]) == 0


def reports(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").is_file()


def watches(run: Path) -> None:
    assert main(["watch", str(run)]) == 0


def plans(run: Path) -> None:
    assert main(["plan", str(run / "config.yaml")]) == 0


def answers_in_python(run: Path) -> None:
    assert flatout.load(run).generate(["Hi"], max_new_tokens=1)


def is_noted(run: Path) -> None:
    assert main(["runs", str(run.resolve().parent), "--note", str(run), "mine"]) == 0
    assert json.loads((run / "notes.json").read_text())["note"] == "mine"


DOORS = [chats, evaluates, merges, exports, reports, watches, plans, answers_in_python, is_noted]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_reads_a_run_where_it_is(placed, door):
    door(placed("ok"))


def test_a_chat_with_an_unfinished_run_reads_its_own_checkpoints(placed):
    from flatout.trainer.resume import load_stopped

    assert load_stopped(placed("half"), torch.device("cpu"))[2] == 2


def test_another_name_or_folder_is_another_run(made, tmp_path, monkeypatch, capsys):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = contents(Path("runs/half"))
    assert load_config(Path("runs/half/config.yaml")).run_dir is None
    assert load_config(Path("runs/half/config.yaml"), ["name=new"]).folder == Path("runs/new")
    assert load_config(Path("runs/half/config.yaml"), ["run_dir=there"]).folder == Path("there")
    assert flatout.train("runs/half/config.yaml", name="new").folder == Path("runs/new")
    assert from_step(Path("runs/new")) is None
    shutil.copy("runs/half/config.yaml", "mine.yaml")
    assert load_config(Path("mine.yaml")).folder == Path("runs/half")
    assert contents(Path("runs/half")) == before
