"""A verb replaces the page that it wrote before, and no other file; a run's folders are its own."""

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import ProblemsError
from flatout.trainer.run import train


def test_no_file_of_a_run_is_overwritten(tiny, tmp_path, capsys):
    """By any verb that writes a file; test_foreign_files has the files of others, and what may be replaced."""
    run = tmp_path / "done"
    train(tiny.config(run, batch={"max_steps": 1}))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a", "answer": "b"}\n')
    (run / "link").symlink_to(run / "config.yaml")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    commands = [
        *(["report", str(run), "--format", form] for form in ("html", "md", "json")),
        ["data", "show", "chats", "--root", str(tiny.root / "data"), "--html", "-n", "1"],
    ]
    for command in commands:
        for place in ("metrics.jsonl", "config.yaml", "final/adapter_config.json", ".", "", "final", "link"):
            assert main([*command, "--out", "" if place == "" else str(run / place)]) == 2, (command, place)
            assert capsys.readouterr().err.count("error: ") == 1
    command = ["eval", str(run), "--answers", str(questions), "--max-new-tokens", "1", "--device", "cpu", "--out"]
    assert main([*command, str(run / "metrics.jsonl")]) == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_stands_where_a_run_writes_is_named_before_anything_slow(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(run, batch={"max_steps": 1})))
    run.mkdir()
    names = ("final", "best", "checkpoints", "logs")
    for path in (run / name for name in names):
        for make in (lambda path: path.write_text("mine"), lambda path: path.symlink_to(tmp_path / "nowhere")):
            make(path)
            assert main(["train", str(tmp_path / "run.yaml")]) == 2
            assert f"{path} is a file or a link" in capsys.readouterr().err
            assert path.is_symlink() or path.read_text() == "mine"
            path.unlink()
    for name in names:
        (run / name).mkdir()
    assert main(["train", str(tmp_path / "run.yaml")]) == 0


def test_folders_that_hold_something_else_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for settings in ("run_dir=.", "run_dir=/", "run_dir=..", f"data.root={tiny.model_dir}"):
        with pytest.raises(ProblemsError, match=settings.partition("=")[0]):
            tiny.config(tmp_path / "run", settings)
    tiny.config(tmp_path / "run", "run_dir=runs/a", "data.root=data")
    tiny.config(tmp_path / "run", "run_dir=./a")
