"""A run's folder is known by what only flatout writes there, and says which of its entries no run wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flatout.config.folders import foreign_entries, is_run_folder, run_identity
from flatout.config.read import load_config
from flatout.errors import ProblemsError
from flatout.trainer.run import train


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("folders") / "run"
    train(tiny.config(folder, batch={"max_steps": 2}))
    return folder


@pytest.mark.parametrize("name", ["", "notes.txt", "data/rows.jsonl", "slurm-7.log", "final/"])
def test_a_folder_without_such_files_becomes_a_runs(name, tmp_path):
    folder = tmp_path / "proj"
    if name.endswith("/"):
        (folder / name).mkdir(parents=True)
    elif name:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
    assert not is_run_folder(folder)
    run_id = run_identity(folder)
    assert is_run_folder(folder)
    assert run_identity(folder) == run_id
    assert json.loads((folder / "run.json").read_text())["run_id"] == run_id


def test_a_run_is_recognised_and_holds_nothing_foreign(trained):
    assert is_run_folder(trained)
    assert foreign_entries(trained) == []
    assert not is_run_folder(trained / "final")
    assert not is_run_folder(trained.parent)


def test_what_a_person_put_into_a_run_is_listed(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    mine = ["a.yaml", "eval/mine.json", "final/notes.md", "merged", "report.html"]
    for name in mine:
        path = run / name
        path.parent.mkdir(exist_ok=True)
        (path.mkdir() or path / "weights" if name == "merged" else path).write_text("{}")
    (run / "link").symlink_to(tmp_path)
    assert [str(path.relative_to(run)) for path in foreign_entries(run)] == sorted([*mine, "link"])


def test_settings_of_an_earlier_version_that_were_off_are_dropped_in_a_run_alone(tmp_path):
    run, plain = tmp_path / "run", tmp_path / "plain.yaml"
    run_identity(run)
    off = "name: run\nmodel: {name: m}\ndata: {sources: [{path: a.jsonl}], allowed_media_domains: []}\n"
    (run / "config.yaml").write_text(off)
    assert load_config(run / "config.yaml").name == "run"
    for path, text in ((run / "config.yaml", off.replace("[]", "['*']")), (plain, off)):
        path.write_text(text)
        with pytest.raises(ProblemsError, match=r"data\.allowed_media_domains"):
            load_config(path)
