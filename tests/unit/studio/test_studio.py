"""What studio refuses, and what it hands over to the functions of the command line."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_run import write_synthetic_run

from flatout.cli.main import main
from flatout.config.read import load_config, make_config
from flatout.errors import ResourceError, SecurityError, UsageError, install
from flatout.io.file_lock import RunLock, holder_of, locked
from flatout.studio import app as app_module
from flatout.studio import jobs as jobs_module
from flatout.studio import trainings as trainings_module
from flatout.studio import workspace as workspace_module
from flatout.studio.app import make_app
from flatout.studio.jobs import Worker
from flatout.studio.trainings import Trainings
from flatout.studio.worker import chat
from flatout.studio.workspace import Workspace
from flatout.track.figures import short_time
from flatout.track.run_log import read_run, record_of
from flatout.track.summary import summarize
from tests.studio_client import ADDRESS, PORT, SETTINGS, TOKEN, marked, open_studio, refusal, testclient


@pytest.fixture(scope="module")
def workspace(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(tiny.model_dir, root / "tiny-model")
    shutil.copy(tiny.chats, root / "chats.jsonl")
    (root / "way-out").symlink_to("/etc")
    # neither the worker nor a run takes them for the modules of the same names
    for name in ("json.py", "random.py", "tokenize.py"):
        (root / name).write_text("raise SystemExit('a module of the workspace was imported')")
    return root


@pytest.fixture(scope="module")
def models(workspace, tmp_path_factory):
    """A folder outside the workspace whose models studio may read."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(workspace / "tiny-model", folder / "other")
    return folder


@pytest.fixture(scope="module")
def client(workspace, models):
    """A browser with the cookie; its requests come from a page of studio, whose workers serve all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with open_studio(workspace, (models,)) as client:
            yield client


def lines_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("path", ["/", "/data", "/plan", "/static/studio.js", "/api/run?folder=runs"])
@pytest.mark.parametrize("token", [None, "wrong", "ÿ"])
def test_nothing_is_shown_without_the_token(workspace, path, token):
    with testclient.TestClient(make_app(workspace, TOKEN, PORT, print), ADDRESS) as client:
        client.cookies.set(f"flatout-studio-{PORT}", "wrong too")
        answer = client.get(path, params={} if token is None else {"token": token})
        assert "needs the token" in refusal(answer, 403)
        assert "set-cookie" not in answer.headers
        # a token in the address opens the first page only
        if path != "/":
            assert client.get(path, params={"token": TOKEN}).status_code == 403


def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites(client):
    answer = client.get("/", params={"token": TOKEN})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    # two studios of one host must not replace each other's cookie
    assert cookie.startswith(f"flatout-studio-{PORT}=")
    assert TOKEN not in answer.text


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:80", ""])
def test_a_name_that_was_pointed_at_this_machine_is_refused(client, host):
    assert "another host" in refusal(client.get("/data", headers={"host": host}), 403)


@pytest.mark.parametrize("origin", ["http://evil.example", f"https://127.0.0.1:{PORT}", "http://127.0.0.1:80", "null"])
def test_a_page_of_another_site_changes_nothing(client, workspace, origin):
    answer = client.post("/api/upload", params={"name": "evil.jsonl"}, content=b"{}", headers={"origin": origin})
    assert "another site" in refusal(answer, 403)
    own = client.headers.pop("origin")
    answer = client.post("/api/upload", params={"name": "evil.jsonl"}, content=b"{}")
    assert "which page" in refusal(answer, 403)
    assert not list(workspace.rglob("*evil*"))
    # a program with the token in a header needs no page
    assert client.post("/api/cancel", headers={"x-flatout-token": TOKEN}).status_code == 200
    client.headers["origin"] = own


def test_every_page_forbids_what_is_not_its_own(client):
    pages = [
        "/data",
        "/plan",
        "/runs",
        "/chat",
        "/run?folder=tiny-model",
        "/run?folder=nothing",
        "/static/page.css",
        "/x",
    ]
    for path in pages:
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert "script-src 'self';" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert TOKEN not in answer.text
        assert "onclick" not in answer.text
        assert "<script>" not in answer.text


def test_a_page_starts_no_code_of_a_file_but_takes_losses_by_name(client, workspace, monkeypatch):
    started = list[list[str]]()

    def start(words: list[str], *_: Any, **__: Any) -> Any:
        started.append(words)
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(trainings_module, "start_python", start)
    (workspace / "mine.py").write_text("raise SystemExit('this file ran')")
    for action in ("train", "plan"):
        body = {"settings": SETTINGS, "overrides": ["objective.path=mine.py:Mine"]}
        assert "run as code" in refusal(client.post(f"/api/{action}", json=body), 403)
    given = marked(workspace / "runs" / "of-another-person")
    settings = "run_dir: runs/of-another-person\nmodel: {name: nowhere/tiny-model}\n"
    (given / "config.yaml").write_text(f"{settings}objective: {{path: mine.py:Mine}}\n")
    answer = client.post("/api/resume", json={"folder": "runs/of-another-person"})
    assert "run as code" in refusal(answer, 403)
    (given / "config.yaml").write_text(f"{settings}objective: {{kind: weighted_tokens}}\n")
    assert client.post("/api/resume", json={"folder": "runs/of-another-person"}).status_code == 200
    assert [words[-1] for words in started] == ["runs/of-another-person/config.yaml"]
    shutil.rmtree(given)
    assert Workspace(workspace).config(SETTINGS, ["objective.kind=weighted_tokens"]).objective.kind == "weighted_tokens"


def test_only_settings_that_are_paths_must_be_in_the_workspace(workspace):
    texts = [
        "eval.fraction=0.1",
        "eval.prompts=[/help, ~hello]",
        "data.template_args={greeting: /hi}",
        "freeze=[/x]",
        "method=full",
    ]
    config = Workspace(workspace).config(SETTINGS, texts)
    assert config.eval.prompts == ["/help", "~hello"]
    assert config.freeze == ["/x"]


def test_wrong_settings_are_named(client):
    body = {"settings": {**SETTINGS, "lora.rank": "many"}, "overrides": ["lora.rnak=8", "no-equals"]}
    assert "no-equals" in refusal(client.post("/api/train", json=body), 400)
    body["overrides"] = ["lora.rnak=8"]
    text = refusal(client.post("/api/train", json=body), 400)
    assert "did you mean lora.rank" in text
    assert "got 'many'" in text
    assert "input should be an object" in refusal(client.post("/api/train", content=b"[]"), 400)
    assert "larger than" in refusal(client.post("/api/train", content=b" " * (app_module.MAX_BODY_BYTES + 1)), 400)


def test_an_upload_is_streamed_bounded_and_never_overwrites(client, workspace, monkeypatch):
    monkeypatch.setattr(workspace_module, "MAX_UPLOAD_BYTES", 100_000)
    before = list((workspace / "uploads").glob("*"))
    answer = client.post("/api/upload", params={"name": "big.jsonl"}, content=(b"x" * 1000 for _ in range(200)))
    assert "larger than" in refusal(answer, 400)
    assert list((workspace / "uploads").glob("*")) == before
    answer = client.post("/api/upload", params={"name": "own.jsonl"}, content=(b"{}\n" for _ in range(3)))
    assert answer.json() == {"path": "uploads/own.jsonl"}
    assert (workspace / "uploads" / "own.jsonl").read_bytes() == b"{}\n" * 3
    assert "already exists" in refusal(client.post("/api/upload", params={"name": "own.jsonl"}, content=b""), 400)


def test_two_uploads_of_one_name_do_not_mix(tmp_path):
    workspace = Workspace(tmp_path)

    async def content(text: bytes, first_done: asyncio.Event | None = None) -> AsyncIterator[bytes]:
        yield text
        if first_done is not None:
            await first_done.wait()

    async def upload_both() -> None:
        first_done = asyncio.Event()
        late = asyncio.create_task(workspace.receive("a.jsonl", content(b"late", first_done)))
        await asyncio.sleep(0)
        assert await workspace.receive("a.jsonl", content(b"first")) == "uploads/a.jsonl"
        first_done.set()
        with pytest.raises(UsageError, match="already exists"):
            await late

    asyncio.run(upload_both())
    (file,) = (tmp_path / "uploads").iterdir()
    assert file.read_bytes() == b"first"


def test_an_upload_removes_what_killed_ones_left_and_syncs_beside_the_event_loop(tmp_path, monkeypatch):
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / f".{'0a' * 8}.part").write_text("x")
    (tmp_path / "uploads" / ".mine.part").write_text("a person's")
    event_loop = threading.get_ident()
    monkeypatch.setattr(os, "fsync", lambda fd: synced_in.append(threading.get_ident()))
    synced_in: list[int] = []

    async def content() -> AsyncIterator[bytes]:
        yield b"{}"

    assert asyncio.run(Workspace(tmp_path).receive("a.jsonl", content())) == "uploads/a.jsonl"
    assert {file.name for file in (tmp_path / "uploads").iterdir()} == {"a.jsonl", ".mine.part"}
    assert synced_in
    assert event_loop not in synced_in


def test_a_cut_off_request_and_an_unreadable_file_are_refused_in_a_sentence(client, workspace, monkeypatch):
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    sent: list[dict[str, Any]] = []
    headers = {"host": f"127.0.0.1:{PORT}", "x-flatout-token": TOKEN}
    scope = {"type": "http", "method": "POST", "path": "/api/upload", "query_string": b"name=cut.jsonl"}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(make_app(workspace, TOKEN, PORT, print)(scope, receive, send))
    assert sent[0]["status"] == 400
    assert b"cut off" in sent[1]["body"]
    assert not list(workspace.rglob("*.part"))

    def survey(self: Workspace) -> None:
        raise PermissionError(13, "Permission denied", "secret-folder")

    monkeypatch.setattr(Workspace, "survey", survey)
    answer = client.get("/runs")
    assert answer.status_code == 409
    assert "cannot use secret-folder: Permission denied" in answer.text


def test_a_second_run_on_one_folder_is_refused(client, workspace):
    folder = marked(workspace / "runs" / "taken")
    with RunLock(folder):
        holder = holder_of(folder)
        assert holder is not None
        assert (holder.pid, holder.is_local) == (os.getpid(), True)
        for action, body in {
            "train": {"settings": {**SETTINGS, "name": "taken"}},
            "resume": {"folder": "runs/taken"},
        }.items():
            (folder / "config.yaml").write_text("{name: taken, model: {name: tiny-model}}")
            assert f"is locked by pid {os.getpid()}" in refusal(client.post(f"/api/{action}", json=body), 409)
        assert client.get("/api/run", params={"folder": "runs/taken"}).json()["state"] == "running"
        # a lock that names studio, its process group or init is no reason to signal them
        for pid in (os.getpid(), 0, 1, -1):
            (folder / ".lock").write_text(json.dumps({**asdict(holder), "pid": pid}))
            assert "not known" in refusal(client.post("/api/stop", json={"folder": "runs/taken"}), 409)
    assert holder_of(folder) is None
    assert not (folder / "studio.yaml").exists()
    assert '<input id="name" value="run"' in client.get("/plan").text
    (workspace / "runs" / "run").mkdir()
    assert '<input id="name" value="run-2"' in client.get("/plan").text
    (folder / "metrics.jsonl").write_text("")
    answer = client.post("/api/train", json={"settings": {**SETTINGS, "name": "taken"}})
    assert "already holds a run" in refusal(answer, 400)
    assert "not running" in refusal(client.post("/api/stop", json={"folder": "runs/taken"}), 400)
    shutil.rmtree(workspace / "runs")


def test_what_files_and_settings_hold_is_escaped(client, workspace):
    evil = "<img src=x onerror=alert(1)>"
    file = workspace / f"{evil}.jsonl"
    file.write_text("{}")
    for address in ("/data", f"/data?name={evil}", f"/chat?run={evil}", f"/run?folder={evil}"):
        assert "<img" not in client.get(address).text, address
    file.unlink()


def test_a_run_that_fails_says_why_and_lives_in_its_own_session(client, workspace, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    body = {"settings": {**SETTINGS, "name": "lost"}, "overrides": ["gpus=[3]"]}
    assert client.post("/api/train", json=body).json() == {"folder": "runs/lost"}
    text = refusal(client.post("/api/train", json=body), 409)
    assert "is being started as pid" in text
    pid = int(text.partition("pid ")[2].partition(";")[0])
    assert os.getsid(pid) == pid != os.getsid(0)
    while (found := client.get("/api/run", params={"folder": "runs/lost"}).json())["state"] == "running":
        pass
    assert found["state"] == "failed"
    (workspace / "runs" / "lost" / "train.log").touch()
    (workspace / "runs" / "lost" / "end.json").write_text("{}")
    assert "damaged" in client.get("/runs").text
    assert "CUDA_VISIBLE_DEVICES" in found["output"]
    assert load_config(workspace / "runs" / "lost" / "studio.yaml").gpus == [3]
    shutil.rmtree(workspace / "runs")


def test_data_is_built_and_shown_by_a_worker_that_may_die(client, workspace):
    body = {"source": "chats.jsonl", "settings": {**SETTINGS, "data.num_procs": "2"}}
    found = lines_of(client.post("/api/build", json=body))
    assert found[-1] == {"result": "chats"}
    assert any("progress" in line for line in found)
    *_, last = lines_of(client.post("/api/samples", json={"name": "chats"}))
    assert last["result"]["num_samples"] == 120
    assert 'class="t"' in last["result"]["samples"]
    *_, last = lines_of(client.post("/api/samples", json={"name": "none"}))
    assert "no data set 'none'" in last["error"]
    body["settings"]["data.max_tokens"] = "64"
    *_, last = lines_of(client.post("/api/build", json=body))
    assert "already exists and differs" in last["error"]
    client.post("/api/cancel", headers={"x-flatout-token": TOKEN})
    # the next request starts another process
    *_, last = lines_of(client.post("/api/build", json={**body, "source": "tiny-model/config.json"}))
    assert "error" in last


def test_a_worker_that_broke_the_protocol_is_replaced(tmp_path, monkeypatch):
    async def last_line(worker: Worker) -> str:
        job = worker.submit("samples", name="none", first=0, count=1)
        return str([line async for line in job.follow()][-1]["error"])

    async def ask_twice() -> list[str]:
        worker = Worker(Workspace(tmp_path))
        monkeypatch.setattr(jobs_module, "MAX_LINE_BYTES", 8)
        found = [await last_line(worker)]
        monkeypatch.setattr(jobs_module, "MAX_LINE_BYTES", 1 << 20)
        found.append(await last_line(worker))
        await worker.close()
        return found

    first, second = asyncio.run(ask_twice())
    assert "cannot be used" in first
    assert "no data set 'none'" in second


def test_a_plan_does_not_wait_for_a_build(client, workspace):
    def build() -> None:
        body = {"source": "chats.jsonl", "settings": {**SETTINGS, "data.name": "slow", "data.num_procs": "1"}}
        built.extend(lines_of(client.post("/api/build", json=body)))

    built: list[dict[str, Any]] = []
    with locked(workspace / "data" / "built_dataset" / ".slow.lock", "the build"):
        building = threading.Thread(target=build)
        building.start()
        *_, last = lines_of(client.post("/api/samples", json={"name": "none"}))
        assert "no data set 'none'" in last["error"]
        assert building.is_alive()
    building.join()
    assert built[-1] == {"result": "slow"}


def test_speed_is_of_the_run_that_started_last_and_not_all_of_it_is_read(tmp_path, monkeypatch):
    old, new = (marked(write_synthetic_run(tmp_path / "runs" / name, num_steps=400)) for name in ("old", "new"))
    for folder, day in ((old, 1), (new, 2)):
        start = json.loads((folder / "start.json").read_text())
        (folder / "start.json").write_text(json.dumps({**start, "first_started_at": day * 86400.0}))
    steps = read_run(new).steps
    (old / "touched").touch()  # the time of a folder is not that of its run
    monkeypatch.setattr(trainings_module, "SPEED_BYTES", 20_000)
    monkeypatch.setattr(trainings_module.runs, "record_of", lambda line: num_read.append(1) or record_of(line))
    num_read: list[int] = []
    config = make_config({"model": {"name": start["model"]}, "method": start["method"]})
    trainings = Trainings(Workspace(tmp_path))
    assert [row["folder"] for row in trainings.rows(["runs/old", "runs/new"])] == ["runs/new", "runs/old"]
    found = trainings.measured_speed(config)
    assert found is not None
    assert found[1] == "runs/new"
    assert min(one.tokens_per_s for one in steps) <= found[0] <= max(one.tokens_per_s for one in steps)
    assert 0 < len(num_read) < 100


def test_a_chat_beside_a_training_says_so_or_is_refused(client, workspace, monkeypatch):
    folder = marked(workspace / "runs" / "busy")
    with RunLock(folder):
        (folder / "metrics.jsonl").touch()
        (folder / "config.yaml").write_text("{name: busy, model: {name: tiny-model}, gpus: [1, 0]}")
        body = {"run": "tiny-model", "turns": [], "prompt": "Hi", "max_new_tokens": 1}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        found = lines_of(client.post("/api/chat", json=body))
        assert any("runs/busy trains on this machine" in line.get("note", "") for line in found)
        in_use = Trainings(Workspace(workspace)).gpus_in_use()
    assert in_use == {"runs/busy": [1, 0]}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.chdir(workspace)
    with pytest.raises(ResourceError, match="runs/busy trains on GPU 0"):
        chat(**body, temperature=None, gpus_in_use=in_use, emit=print)
    shutil.rmtree(workspace / "runs")


def test_models_outside_are_read_where_the_person_who_started_studio_allows_it(client, workspace, models):
    name = str(models / "other")
    assert name in client.get("/plan").text
    body = {"run": name, "turns": [], "prompt": "Hi", "system": "Be brief.", "max_new_tokens": 1, "temperature": 0}
    *_, last = lines_of(client.post("/api/chat", json=body))
    assert last["result"].keys() == {"run"}
    # read as a model, and as nothing else
    for override in (f"run_dir={name}/run", f"data.root={name}", f"eval.prompts={name}/config.json"):
        answer = client.post("/api/plan", json={"settings": SETTINGS, "overrides": ["eval.fraction=0.1", override]})
        assert "outside the workspace" in refusal(answer, 403)
    assert "outside" in refusal(client.post("/api/delete", json={"folder": name}), 403)
    config = Workspace(workspace, [models]).config({**SETTINGS, "model.name": name})
    assert config.model.name == name
    with pytest.raises(SecurityError, match="outside the workspace"):
        Workspace(workspace).config({**SETTINGS, "model.name": name})
    assert main(["studio", "--models", str(models / "nowhere")]) == 2


def test_a_runs_settings_start_another(client, workspace):
    folder = marked(write_synthetic_run(workspace / "runs" / "old", num_steps=20))
    text = (
        "{name: old, model: {name: tiny-model}, lora: {rank: 4}, eval: {prompts: [a, b], fraction: 0.1}, gpus: [0, 1]}"
    )
    (folder / "config.yaml").write_text(text)
    found = client.get("/api/settings", params={"folder": "runs/old"}).json()
    assert found == {
        "model.name": "tiny-model", "lora.rank": "4", "eval.prompts": "[a, b]", "eval.fraction": "0.1",
        "gpus": "[0, 1]",
    }  # fmt: skip
    again = Workspace(workspace).config({**found, "data.name": "chats"})
    assert (again.lora.rank, again.gpus, again.eval.prompts) == (4, [0, 1], ["a", "b"])
    answer = client.get("/report", params={"folder": "runs/old"})
    assert answer.headers["content-disposition"] == 'attachment; filename="old.html"'
    assert "<title>old · flatout</title>" in answer.text
    with RunLock(folder):
        assert "is locked by" in refusal(client.post("/api/delete", json={"folder": "runs/old"}), 409)
    shutil.rmtree(folder)


def test_a_run_has_a_note_and_tags(client, workspace):
    folder = marked(write_synthetic_run(workspace / "runs" / "noted", num_steps=20))
    body = {"folder": "runs/noted", "note": " <b>lr</b> too high ", "tags": "baseline, v2 v2"}
    with RunLock(folder):  # as while it trains
        assert client.post("/api/notes", json=body).json() == {"note": "<b>lr</b> too high", "tags": ["baseline", "v2"]}
    listed, shown = client.get("/runs").text, client.get("/run", params={"folder": "runs/noted"}).text
    assert all(f'<span class="badge">{tag}</span>' in listed for tag in ("baseline", "v2"))
    assert "&lt;b&gt;lr&lt;/b&gt; too high" in shown
    assert "&lt;b&gt;lr&lt;/b&gt; too high" in client.get("/api/run", params={"folder": "runs/noted"}).json()["html"]
    assert client.post("/api/notes", json=body | {"tags": "", "note": ""}).json() == {"note": "", "tags": []}
    assert "tag 'a/b'" in refusal(client.post("/api/notes", json=body | {"tags": "a/b"}), 400)
    assert "not the folder of a run" in refusal(client.post("/api/notes", json=body | {"folder": "tiny-model"}), 400)
    for name in ("notes.json", "end.json", "start.json"):
        (folder / name).write_text("[1]")
        assert f"runs/noted/{name}: " in client.get("/runs").text
        assert client.get("/run", params={"folder": "runs/noted"}).status_code == 200
        drawn = client.get("/api/run", params={"folder": "runs/noted"}).json()
        assert f"runs/noted/{name}: " in drawn["html"]
        assert drawn["state"] == ("complete" if name == "notes.json" else "damaged")
        # a note may be a person's: it is not written over
        answer = client.post("/api/notes", json=body)
        assert "notes.json" in refusal(answer, 400) if name == "notes.json" else answer.status_code == 200
        (folder / "notes.json").unlink()
    assert client.post("/api/rename", json={"folder": "runs/noted", "name": "moved"}).json() == {"folder": "runs/moved"}
    shutil.rmtree(workspace / "runs" / "moved")


def test_the_list_of_runs_has_the_figures_of_each(client, workspace):
    folder = marked(write_synthetic_run(workspace / "runs" / "figured", num_steps=100))
    summary = summarize(read_run(folder))
    shown = client.get("/api/figures", params={"folder": "runs/figured"}).json()
    assert (shown["name"], shown["last"]) == ("evaluation loss", f"{summary.evaluation.last:.4f}")
    assert (shown["steps"], shown["time"]) == ("100", short_time(summary.train_s))
    assert len(shown["curve"]) == 60
    assert shown["curve"][0] > shown["curve"][-1]
    assert "not the folder of a run" in refusal(client.get("/api/figures", params={"folder": "tiny-model"}), 400)
    shutil.rmtree(folder)


def test_a_run_is_renamed_and_resumes_under_its_new_name(client, workspace):
    folder = marked(write_synthetic_run(workspace / "runs" / "before", num_steps=20))
    (folder / "config.yaml").write_text("{name: before, model: {name: tiny-model}, data: {name: chats}}")
    own = "# flatout train runs/before/studio.yaml\n\nmodel: tiny-model  # {}\n{}\nlora:\n  rank: 4  # few\n"
    (folder / "studio.yaml").write_text(own.format("name: before", "data: chats\nrun_dir: runs/before # here"))
    marked(write_synthetic_run(workspace / "runs" / "taken", num_steps=20))
    rename = {"folder": "runs/before", "name": "after"}
    with RunLock(folder):
        assert "is locked by" in refusal(client.post("/api/rename", json=rename), 409)
    assert "exists already" in refusal(client.post("/api/rename", json=rename | {"name": "taken"}), 400)
    for name in ("../up", "", "a b"):
        assert "use up to 64 letters" in refusal(client.post("/api/rename", json=rename | {"name": name}), 400)
    assert "not the folder of a run" in refusal(client.post("/api/rename", json=rename | {"folder": "tiny-model"}), 400)
    assert (folder / "config.yaml").is_file()
    assert client.post("/api/rename", json=rename).json() == {"folder": "runs/after"}
    assert not folder.exists()
    moved = load_config(workspace / "runs" / "after" / "config.yaml")
    assert (moved.name, moved.folder, moved.model.name) == ("after", workspace / "runs" / "after", "tiny-model")
    # nothing else of the files is changed
    text = (workspace / "runs" / "after" / "studio.yaml").read_text()
    same = own.format("name: before", "data: chats\nrun_dir: null # here").replace("runs/before", "runs/after")
    assert text == same.replace("model: tiny", "name: after\nmodel: tiny")
    assert "epochs" not in (workspace / "runs" / "after" / "config.yaml").read_text()
    assert client.post("/api/rename", json={"folder": "runs/after", "name": "on"}).json() == {"folder": "runs/on"}
    moved = load_config(workspace / "runs" / "on" / "studio.yaml")
    assert (moved.name, moved.folder, moved.lora.rank) == ("on", workspace / "runs" / "on", 4)
    assert "<h1>on<" in client.get("/api/run", params={"folder": "runs/on"}).json()["html"]
    for name in ("on", "taken"):
        shutil.rmtree(workspace / "runs" / name)


def test_columns_that_no_format_has_are_offered_and_read(client, workspace):
    (workspace / "pairs.csv").write_text("frage,antwort\n" + "Wie heisst du?,Ich bin ein Test.\n" * 4)
    (workspace / "known.csv").write_text("question,answer\n" + "Who?,A test.\n" * 4)
    seen = lines_of(client.post("/api/columns", json={"source": "pairs.csv"}))[-1]["result"]
    assert seen["found"] == {"frage": "Wie heisst du?", "antwort": "Ich bin ein Test."}
    assert "no known format" in seen["problem"]
    near = lines_of(client.post("/api/columns", json={"source": "known.csv"}))[-1]["result"]
    assert near["columns"] == {"instruction": "question", "output": "answer"}
    assert lines_of(client.post("/api/columns", json={"source": "chats.jsonl"}))[-1]["result"]["problem"] == ""
    settings = {"model.name": "tiny-model", "data.name": "pairs"}
    body = {"source": "pairs.csv", "settings": settings, "columns": {"instruction": "frage", "output": "antwort"}}
    assert lines_of(client.post("/api/build", json=body))[-1] == {"result": "pairs"}
    shown = lines_of(client.post("/api/samples", json={"name": "pairs"}))[-1]["result"]["samples"]
    assert "antwort" not in shown
    assert "Test" in shown
    wrong = body | {"settings": settings | {"data.name": "no"}, "columns": {"instruction": "x", "output": "y"}}
    assert "'x'" in lines_of(client.post("/api/build", json=wrong))[-1]["error"]


def test_a_port_in_use_and_a_missing_extra_are_said(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["studio", "--port", str(port), "--no-browser"]) == 6
    assert f"port {port} is in use; choose another\n  try --port" in capsys.readouterr().err
    assert main(["studio", "--port", "70000"]) == 2
    for name in ("uvicorn", "flatout.studio.server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["studio"]) == 2
    assert install("studio") in capsys.readouterr().err


def test_the_browser_gets_a_private_file_instead_of_the_token(workspace, monkeypatch, capsys):
    opened: queue.Queue[tuple[str, str, int]] = queue.Queue()

    def open_browser(url: str) -> None:
        path = Path(url.removeprefix("file://"))
        opened.put((url, path.read_text(), path.stat().st_mode & 0o777))

    def serve(root: Path, port: int, log: Any, on_ready: Any, models: Any = ()) -> None:
        on_ready(f"{ADDRESS}/?token={TOKEN}")
        found.append(opened.get())

    found: list[tuple[str, str, int]] = []
    monkeypatch.setattr("webbrowser.open", open_browser)
    monkeypatch.setattr("flatout.studio.server.serve", serve)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert main(["studio"]) == 0
    ((url, html, mode),) = found
    assert TOKEN not in url
    assert f"url={ADDRESS}/?token={TOKEN}" in html
    assert mode == 0o600
    assert not Path(url.removeprefix("file://")).parent.exists()
    assert TOKEN in capsys.readouterr().out
