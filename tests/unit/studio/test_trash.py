"""A run that a page deletes is moved to a trash folder, after the page has said what else is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.config.folders import is_run_folder
from flatout.io.file_lock import RunLock
from tests.studio_client import open_studio, refusal, write_run


@pytest.fixture
def client(tmp_path):
    with open_studio(tmp_path) as client:
        yield client


def delete(client: Any, folder: str, others: list[str] | None = None) -> Any:
    return client.post("/api/delete", json={"folder": folder, "others": others})


def test_a_deleted_run_is_in_the_trash_with_a_persons_files(client, tmp_path):
    for number in (1, 2, 3):
        folder = write_run(tmp_path / "runs" / "old")
        (folder / "thesis").mkdir()
        (folder / "thesis" / "chapter.txt").write_text(f"years of work {number}")
        (folder / "plot.png").write_bytes(b"mine")
        asked = delete(client, "runs/old").json()
        assert asked == {"folder": "runs/old", "others": ["plot.png", "thesis/"]}
        assert folder.is_dir()
        for seen in ([], ["plot.png"], ["plot.png", "thesis/", "more"]):
            assert "is not what was shown" in refusal(delete(client, "runs/old", seen), 409)
        moved = delete(client, "runs/old", asked["others"]).json()
        assert moved["trash"] == ".trash/runs/old" + ("" if number == 1 else f"-{number}")
        assert not folder.exists()
    # none replaced another, none is listed, and each is a run again where a person moves it back
    for number, name in ((1, "old"), (2, "old-2"), (3, "old-3")):
        trashed = tmp_path / ".trash" / "runs" / name
        assert (trashed / "thesis" / "chapter.txt").read_text() == f"years of work {number}"
        assert is_run_folder(trashed)
        assert "not the folder of a run" in refusal(delete(client, f".trash/runs/{name}", []), 400)
    assert "runs/old" not in client.get("/runs").text
    (tmp_path / ".trash" / "runs" / "old").rename(tmp_path / "runs" / "old")
    assert client.get("/run", params={"folder": "runs/old"}).status_code == 200


def test_a_run_that_flatout_alone_wrote_has_nothing_to_name(client, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "runs" / "plain")
    with RunLock(folder):
        assert "is locked by" in refusal(delete(client, "runs/plain", []), 409)
    assert delete(client, "runs/plain").json()["others"] == []
    assert delete(client, "runs/plain", []).json()["trash"] == ".trash/runs/plain"
    monkeypatch.chdir(tmp_path)
    main(["runs", "."])
    shown = capsys.readouterr()
    assert "plain" not in shown.out + shown.err


@pytest.mark.parametrize("where", [".", "proj"])
def test_a_folder_in_which_others_wrote_what_runs_write_stays(client, tmp_path, where):
    folder = tmp_path / where
    folder.mkdir(exist_ok=True)
    for name in ("start.json", "metrics.jsonl", "train.log", "config.yaml", "thesis.txt"):
        (folder / name).write_text("{}")
    for identity in (None, {}, {"run_id": 7}, {"run_id": "0123456789abcdef", "steps": 3}, ["0123456789abcdef"]):
        if identity is not None:
            (folder / "run.json").write_text(json.dumps(identity))
        assert "not the folder of a run" in refusal(delete(client, where, []), 400)
        asked = client.post("/api/rename", json={"folder": where, "name": "other"})
        assert "not the folder of a run" in refusal(asked, 400)
        assert f'value="{where}"' not in client.get("/runs").text
    (folder / "run.json").write_text(json.dumps({"run_id": "0123456789abcdef", "created": "2026-01-01T00:00:00Z"}))
    asked = delete(client, where, [])
    assert (asked.status_code == 409) == (where == "proj"), asked.text  # the workspace itself never is a run
    assert (folder / "thesis.txt").read_text() == "{}"


def test_a_trash_that_leads_outside_is_refused(client, tmp_path):
    folder, outside = write_run(tmp_path / "runs" / "a"), tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / ".trash").symlink_to(outside)
    assert "outside the workspace" in refusal(delete(client, "runs/a", []), 403)
    assert folder.is_dir()
    assert not list(outside.iterdir())


def test_a_new_run_takes_no_folder_of_others(client, tmp_path):
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "config.yaml").write_text("# mine\n")
    body = {"settings": {"model.name": "m", "data.name": "d"}, "overrides": ["run_dir=proj"]}
    assert "not the folder of a run" in refusal(client.post("/api/train", json=body), 400)
    assert [path.name for path in (tmp_path / "proj").iterdir()] == ["config.yaml"]
    for hidden in (".trash/x", "runs/.x", "."):
        answer = client.post("/api/train", json=body | {"overrides": [f"run_dir={hidden}"]})
        assert "run_dir: " in refusal(answer, 400)
    assert [path.name for path in tmp_path.iterdir()] == ["proj"]


def test_a_run_with_a_name_of_other_letters_is_shown_and_deleted(client, tmp_path):
    name = "runs/Läufe 中文"
    folder = write_run(tmp_path / name)
    (folder / "config.yaml").write_text(f"name: x\nrun_dir: {name}\nmodel: m\n")
    for page in ("/run", "/report", "/api/run", "/api/settings"):
        assert client.get(page, params={"folder": name}).status_code == 200, page
    assert delete(client, name, []).json()["trash"] == f".trash/{name}"
