"""A run's folder is known by what only flatout writes there, and says which of its entries no run wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flatout.config.folders import foreign_entries, is_run_folder, run_identity
from flatout.errors import UsageError
from flatout.trainer.run import train

# as other programs write them
OF_OTHERS = {
    "config.yaml": "# mine\nlr: 1\n",
    "start.json": '{"step": 0}',
    "metrics.jsonl": '{"loss": 1.0}\n',
    "train.log": "epoch 1\n",
    "run.json": '{"run_id": "0123456789abcdef", "created": "today", "wandb": 1}',
    ".lock": "pid 1",
    "report.html": "<!doctype html><title>mine</title>",
    "checkpoints/epoch-1.pt": "weights",
}


@pytest.fixture(scope="module")
def trained(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("folders") / "run"
    train(tiny.config(folder, batch={"max_steps": 2}))
    return folder


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_folder_with_a_file_of_another_program_is_no_run_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    file = tmp_path / "proj" / name
    file.parent.mkdir(parents=True)
    file.write_text(OF_OTHERS[name])
    before = file.stat().st_mtime_ns
    assert not is_run_folder(tmp_path / "proj")
    with pytest.raises(UsageError, match=f"holds {name.partition('/')[0]}, which a run would replace"):
        run_identity(tmp_path / "proj")
    assert [path.relative_to(file.parent).name for path in file.parent.iterdir()] == [file.name]
    assert (file.read_text(), file.stat().st_mtime_ns) == (OF_OTHERS[name], before)


@pytest.mark.parametrize("name", ["", "notes.txt", "data/rows.jsonl", "slurm-7.log", "final/"])
def test_a_folder_without_such_files_becomes_a_runs(name: str, tmp_path: Path) -> None:
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


def test_a_run_is_recognised_and_holds_nothing_foreign(trained: Path) -> None:
    assert is_run_folder(trained)
    assert foreign_entries(trained) == []
    assert not is_run_folder(trained / "final")
    assert not is_run_folder(trained.parent)


def test_what_a_person_put_into_a_run_is_listed(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    mine = ["a.yaml", "eval/mine.json", "final/notes.md", "merged", "report.html"]
    for name in mine:
        path = run / name
        path.parent.mkdir(exist_ok=True)
        (path.mkdir() or path / "weights" if name == "merged" else path).write_text("{}")
    (run / "link").symlink_to(tmp_path)
    assert [str(path.relative_to(run)) for path in foreign_entries(run)] == sorted([*mine, "link"])
