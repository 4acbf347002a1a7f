"""A verb replaces the page that it wrote before, and no other file; a run's folders are its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.trainer.run import train


@pytest.fixture(scope="module")
def done(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.config(tmp_path_factory.mktemp("own") / "done", batch={"max_steps": 1})
    train(config)
    return config.folder


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "done")
    return tmp_path / "done"


COMMANDS: dict[str, Callable[[Any, Path], list[str]]] = {
    "html": lambda tiny, run: ["report", str(run)],
    "md": lambda tiny, run: ["report", str(run), "--format", "md"],
    "json": lambda tiny, run: ["report", str(run), "--format", "json"],
    "data": lambda tiny, run: ["data", "show", "chats", "--root", str(tiny.root / "data"), "--html", "-n", "1"],
}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    "place", ["metrics.jsonl", "config.yaml", "final/adapter_config.json", ".", "", "final", "link"]
)
def test_no_other_file_is_overwritten(
    tiny: Any, run: Path, kind: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "link").symlink_to(run / "config.yaml")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    out = "" if place == "" else str(run / place)
    assert main([*COMMANDS[kind](tiny, run), "--out", out]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert line.startswith("error: ")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_earlier_page_is_replaced(tiny: Any, run: Path, kind: str) -> None:
    command = [*COMMANDS[kind](tiny, run), "--out", str(run / "page")]
    assert main(command) == 0
    first = (run / "page").read_bytes()
    (run / "page").write_bytes(first + b"<!-- older -->")
    assert main(command) == 0
    assert (run / "page").read_bytes() == first


def test_results_of_eval_replace_only_their_like(
    tiny: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    command = ["eval", str(run), "--answers", str(questions), "--max-new-tokens", "1", "--device", "cpu", "--out"]
    before = (run / "metrics.jsonl").read_bytes()
    assert main([*command, str(run / "metrics.jsonl")]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before
    for _ in range(2):
        assert main([*command, str(tmp_path / "results.json")]) == 0


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
@pytest.mark.parametrize("name", ["final", "best", "checkpoints", "logs"])
def test_what_stands_where_a_run_writes_is_named_before_anything_slow(
    tiny: Any, tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from flatout.config.read import dump_config

    config = tiny.config(tmp_path / "run", batch={"max_steps": 1})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / name
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    code = main(["train", str(tmp_path / "run.yaml")])
    said = capsys.readouterr().err
    if kind == "folder":
        assert code == 0, said
        return
    assert code == 2
    assert f"{path} is a file or a link" in said
    assert kind == "link" or path.read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["run_dir=."], "is the current folder, or holds it"),
        (["run_dir=/"], "is the current folder, or holds it"),
        (["run_dir=.."], "is the current folder, or holds it"),
        (["data.root={model}"], "data.root: {model} is the model's folder"),
        (["run_dir=runs/a", "data.root=data"], ""),
        (["run_dir=./a"], ""),
    ],
)
def test_folders_that_hold_something_else_are_refused(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], said: str
) -> None:
    from flatout.errors import ProblemsError

    monkeypatch.chdir(tmp_path)
    given = [one.format(model=tiny.model_dir) for one in settings]
    if said:
        with pytest.raises(ProblemsError) as raised:
            tiny.config(tmp_path / "run", *given)
        assert said.format(model=tiny.model_dir) in str(raised.value)
    else:
        tiny.config(tmp_path / "run", *given)
