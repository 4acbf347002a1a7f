"""What studio shows, starts and resumes stays in the workspace, whatever a request or a run folder names."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from safetensors.torch import save_file

from flatout.config.objective import OBJECTIVES, class_of_kind
from flatout.config.schema import Config, SourceConfig
from flatout.config.section import nested_kinds, paths_of
from flatout.data.conversation import Origin, PictureSource
from flatout.data.pictures.read import read_picture
from flatout.data.rows.sources import open_source
from flatout.data.token_store import TokenStore
from flatout.errors import FlatoutError, SecurityError
from flatout.io.hub import hub_source
from flatout.studio import trainings as trainings_module
from flatout.studio import worker as worker_module
from flatout.studio.jobs import Worker, WorkerJob
from flatout.studio.workspace import Workspace
from tests.studio_client import SETTINGS, open_studio, refusal, write_run
from tests.usual import usual
from tests.watched import Watched

SECRET = "canary-5e884898da28"
ROWS = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "%s"}]}\n'

# settings that take text, and are the path of nothing: who adds one says which it is
NO_PATHS = {
    "name", "freeze", "model.revision", "lora.targets", "lora.layers", "lora.rank_pattern", "lora.alpha_pattern",
    "lora.modules_to_save", "objective.kind", "eval.data", "eval.best", "checkpoint.allow_change", "checkpoint.mirror",
    "track.project", "track.tags", "data.name", "data.new_tokens", "data.new_special_tokens",
    "data.template_args", "data.end_of_turn", "data.sources.split", "data.sources.subset", "data.sources.revision",
    "data.sources.columns", "data.sources.roles", "data.sources.keys", "data.sources.system",
    "rollout.rewards.name", "rollout.rewards.field", "rollout.rewards.pattern", "rollout.rewards.json_schema",
}  # fmt: skip
# FILE.py:NAME of a person's own code, which studio never starts
OWN_CODE = ("objective.path", "optim.path", "lora.init_path", "rollout.rewards.path")
# what a setting needs beside it
NEEDS = {
    "eval.prompts": ["eval.fraction=0.1"], "deepspeed": ["strategy=deepspeed"],
    "objective.reference.adapter": ["objective.kind=dpo"],
}  # fmt: skip


def text_settings(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting that takes text or a path, read from the schema itself."""
    for name, field in kind.model_fields.items():
        kinds = nested_kinds(field.annotation)
        inner = [one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)]
        for section in inner:
            yield from text_settings(section, f"{prefix}{name}.")
        if not inner and {str, Path} & {*kinds}:  # a choice of a few words is none
            yield f"{prefix}{name}"


PATHS = sorted({*text_settings(Config)} - NO_PATHS)


def override(name: str, path: str) -> list[str]:
    """The overrides that set a setting to a path."""
    if name.startswith("data.sources."):
        return [f"data.sources=[{json.dumps({'path': 'chats.jsonl', name.rpartition('.')[2]: path})}]"]
    if name == "rollout.rewards.path":
        return [
            "objective=grpo",
            "rollout.rounds=1",
            f"rollout.rewards=[{json.dumps({'path': f'{path}/mine.py:mine'})}]",
        ]
    if name in OWN_CODE:
        return [f"{name}={json.dumps(f'{path}/mine.py:mine')}"]
    return [*NEEDS.get(name, []), f"{name}={json.dumps(path)}"]


@pytest.fixture(scope="module")
def outside(tiny, tmp_path_factory):
    """Another person's files, of each kind that a setting can name."""
    root = tmp_path_factory.mktemp("outside")
    shutil.copytree(tiny.model_dir, root / "model")
    (root / "rows.jsonl").write_text(ROWS % SECRET)
    (root / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "tag": SECRET}))
    (root / "config.yaml").write_text(f"name: x\nmodel: tiny-model\ntrack: {{to: [wandb], project: {SECRET}}}\n")
    (root / "mine.py").write_text(f"raise SystemExit({SECRET!r})")
    (root / "template.jinja").write_text(SECRET)
    (root / "notes.json").write_text(json.dumps({"note": SECRET, "tags": []}))
    (root / "train.log").write_text(f"{SECRET}\n")
    write_run(root / "run")
    (root / "run" / "notes.json").write_text(json.dumps({"note": SECRET, "tags": []}))
    (root / "data" / "built_dataset").mkdir(parents=True)
    (root / "data" / "data_config.json").write_text(json.dumps([{"name": SECRET}]))
    from PIL import Image

    Image.new("RGB", (8, 8)).save(root / "picture.png")
    return root


@pytest.fixture(scope="module")
def template(tiny, outside, tmp_path_factory):
    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(tiny.model_dir, root / "tiny-model")
    shutil.copy(tiny.chats, root / "chats.jsonl")
    run = write_run(root / "runs" / "a")
    shutil.copytree(tiny.model_dir, run / "final")
    (run / "config.yaml").write_text("{name: a, method: full, model: {name: tiny-model}, data: {name: chats}}")
    write_run(root / "runs" / "b")
    proj = root / "proj"  # another program's
    proj.mkdir()
    for name in ("metrics.jsonl", "start.json", "train.log", "config.yaml"):
        (proj / name).write_text("{}")
    (proj / "run.json").write_text('{"run_id": "0123456789abcdef", "experiment": 7}')
    (root / "way-out").symlink_to(outside)
    (root / "runs" / "way-out").symlink_to(outside / "run")
    (root / "link-to-a").symlink_to(run)
    (root / "docs").mkdir()
    (root / "docs" / "thesis.txt").write_text("years of work")
    return root


@pytest.fixture
def workspace(template, tmp_path):
    root = tmp_path / "workspace"
    shutil.copytree(template, root, symlinks=True)
    (root / "link-to-a").unlink()
    (root / "link-to-a").symlink_to(root / "runs" / "a")
    return root


@pytest.fixture
def client(workspace, monkeypatch):
    """A studio whose jobs run here, as its workers do, and whose runs are only noted in `client.started`."""
    started = list[list[str]]()

    def start(words: list[str], *_: Any, env: Mapping[str, str], **__: Any) -> Any:
        assert json.loads(env["FLATOUT_STUDIO_FOLDERS"]) == [str(workspace)]
        started.append(words)
        return SimpleNamespace(poll=lambda: 0, pid=0)

    def submit(worker: Worker, kind: str, **facts: Any) -> WorkerJob:
        job = WorkerJob({"kind": kind})
        try:
            result = getattr(worker_module, kind)(emit=lambda **line: job.lines.append(line), **facts)
        except FlatoutError as error:
            job.lines.append({"error": str(error), "exit_code": error.exit_code})
        else:
            job.lines.append({"result": result})
        return job

    monkeypatch.setattr(trainings_module, "start_python", start)
    monkeypatch.setattr(Worker, "submit", submit)
    monkeypatch.setattr(sys, "argv", ["worker"])
    monkeypatch.setenv("FLATOUT_STUDIO_FOLDERS", json.dumps([str(workspace)]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(workspace)
    worker_module._MODELS.clear()
    with open_studio(workspace) as client:
        client.started = started
        yield client


def tree(root: Path) -> dict[str, bytes]:
    """All files below a folder with their content, links as links."""
    return {
        str(path.relative_to(root)): os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


# each way to name a run, and what it is sent with
ACTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "stop": lambda folder: {"folder": folder},
    "resume": lambda folder: {"folder": folder},
    "chat": lambda folder: {"run": folder, "turns": [], "prompt": "Hi", "max_new_tokens": 1},
    "out": lambda folder: {"folder": folder, "to": "merged"},
    "push": lambda folder: {"folder": folder, "repo": "me/x"},
    "notes": lambda folder: {"folder": folder, "note": "mine", "tags": "a"},
    "rename": lambda folder: {"folder": folder, "name": "renamed"},
    "delete": lambda folder: {"folder": folder, "others": []},
}
VIEWS = ("/api/run", "/api/settings", "/report", "/run")


def ask_all(client: Any, folder: str, only: Sequence[str] = (*VIEWS, "/compare", *ACTIONS)) -> dict[str, Any]:
    """The answers of pages and actions to a name of a run."""
    answers = {}
    for name in only:
        if name == "/compare":
            answers[name] = client.get(name, params=[("run", folder), ("run", "runs/b")])
        elif name in VIEWS:
            answers[name] = client.get(name, params={"folder": folder})
        else:
            answers[name] = client.post(f"/api/{name}", json=ACTIONS[name](folder))
    return answers


FOLDERS = [
    ".", "", "/", "..", "../..", "~", "~root", "runs", "runs/", "runs/..", "./runs/a", "runs/a/", "runs//a",
    "runs/../runs/a", "runs/a/final/..", "runs/a/../../proj", "WORKSPACE", "WORKSPACE/runs/a", "WORKSPACE/..",
    "OUTSIDE", "OUTSIDE/run", "way-out", "way-out/run", "runs/way-out", "link-to-a", "link-to-a/../a", "proj", "docs",
    "docs/thesis.txt", "runs/a/config.yaml", ".trash", ".git", "nothing", "runs/a\0", "x" * 300,
]  # fmt: skip


def test_only_a_run_in_the_workspace_is_shown_or_changed(client, workspace, outside):
    before, watched, num_sent = tree(workspace), Watched(outside), 0
    for name in FOLDERS:
        folder = name.replace("WORKSPACE", str(workspace)).replace("OUTSIDE", str(outside))
        for action, answer in ask_all(client, folder).items():
            num_sent += 1
            assert 400 <= answer.status_code < 500, (folder, action, answer.text)
            assert SECRET not in answer.text, (folder, action)
            assert len(refusal(answer, answer.status_code)) > 20, (folder, action)
    assert num_sent >= 400
    assert watched.events() == set()
    assert tree(workspace) == before
    assert client.started == []
    # the run itself is shown, and answers
    shown = ask_all(client, "runs/a")
    assert {name for name, answer in shown.items() if answer.status_code != 200} == {"stop", "delete"}
    assert client.started == [["-P", "-m", "flatout", "train", "runs/a/config.yaml"]]


def test_every_setting_that_takes_text_is_known_to_be_a_path_or_none(workspace, outside):
    assert {*text_settings(Config)} >= NO_PATHS
    assert len(PATHS) >= 12
    for kind in OBJECTIVES:  # their fields are settings, too
        assert [*text_settings(class_of_kind(kind))] == [], kind
    for name in PATHS:
        with pytest.raises(SecurityError):
            Workspace(workspace).config(SETTINGS, override(name, str(outside / "x")))
        if name not in {*OWN_CODE, "deepspeed"}:
            assert "docs/x" in paths_of(Workspace(workspace).config(SETTINGS, override(name, "docs/x"))), name
    for content in ({"nvme_path": str(outside)}, {"any": [{"list": [str(outside)]}]}):
        given = json.dumps({"zero_optimization": {"stage": 2, **content}})
        with pytest.raises(SecurityError):
            Workspace(workspace).config(SETTINGS, ["strategy=deepspeed", f"deepspeed={given}"])


def test_a_page_starts_no_run_that_sends_its_files_elsewhere(workspace, outside):
    for address in (f"file://{outside}/x", "s3://bucket/run"):
        with pytest.raises(SecurityError, match=r"checkpoint\.mirror: .* it would be sent files"):
            Workspace(workspace).config(SETTINGS, [f"checkpoint.mirror={address}"])
    assert Workspace(workspace).config(SETTINGS, ["checkpoint.mirror=null"]).checkpoint.mirror is None


@pytest.mark.parametrize(
    "name", usual(PATHS, ["data.sources.path", "deepspeed", "model.name", "objective.path", "run_dir"])
)
def test_a_setting_that_leads_outside_starts_nothing(client, workspace, outside, name):
    (workspace / "docs" / "out").symlink_to(outside)
    before, watched = tree(workspace), Watched(outside)
    up = os.path.relpath(outside, workspace)
    ends = {"deepspeed": "/ds.json", "data.sources.path": "/rows.jsonl", "data.template": "/template.jinja"}
    for place in (str(outside), up, "way-out", f"docs/../{up}", "docs/out", f"{workspace}/docs/out", "~", "~root/x"):
        path = f"{place}{ends.get(name, '/model')}"
        for action in ("train", "plan", "build"):
            body: dict[str, Any] = {"settings": SETTINGS, "overrides": override(name, path)}
            if action == "build":
                body |= {"source": "chats.jsonl", "settings": {**SETTINGS, "data.name": "x", "data.num_procs": "1"}}
                if name.startswith("data.sources."):
                    body = {**body, "overrides": [], "source": path}
            answer = client.post(f"/api/{action}", json=body)
            assert SECRET not in answer.text
            said = refusal(answer, 403)
            assert "workspace" in said or "run as code" in said
    assert watched.events() == set()
    assert tree(workspace) == before
    assert client.started == []


def settings_of(run: str, name: str, path: str) -> str:
    """The settings of a run in which one names a path; JSON is YAML too."""
    values: dict[str, Any] = {"name": run, "method": "full", "model": {"name": "tiny-model"}, "data": {"name": "chats"}}
    for text in override(name, path):
        *sections, leaf = text.partition("=")[0].split(".")
        holder = values
        for section in sections:
            holder = holder.setdefault(section, {})
        value = text.partition("=")[2]
        holder[leaf] = json.loads(value) if value[:1] in '["0' else value
    if name.startswith(("objective.reference", "lora")):
        values["method"] = "lora"
    return json.dumps(values)


def links_of(outside: Path) -> dict[str, Path]:
    """Files and folders of a run's folder, each with what a link of this name would show, run or overwrite."""
    files = dict.fromkeys(("config.yaml", "studio.yaml"), outside / "config.yaml")
    files |= dict.fromkeys(("notes.json", "start.json", "end.json"), outside / "notes.json")
    files |= dict.fromkeys(("train.log", "metrics.jsonl", "logs/studio.log", ".lock"), outside / "train.log")
    files |= {"run.json": outside / "run" / "run.json", "events.jsonl": outside / "rows.jsonl"}
    folders = {"final": outside / "model", "checkpoints": outside, "logs": outside, "eval": outside, "merged": outside}
    files |= {"final/model.safetensors": outside / "model" / "model.safetensors", "final/config.json": outside / "x"}
    return files | folders | {"gguf": outside / "nothing-yet", "trackers": outside / "data"}


def forged_runs(workspace: Path, outside: Path) -> Iterator[str]:
    """Write runs as another person could hand them over; yield the name of each."""

    def run(name: str) -> Path:
        folder = workspace / "runs" / name
        shutil.copytree(workspace / "runs" / "a", folder)
        (folder / "config.yaml").write_text(settings_of(name, "data.tokenizer", "tiny-model"))
        return folder

    ends = {"deepspeed": "/ds.json", "data.sources.path": "/rows.jsonl", "data.template": "/template.jinja"}
    for number, name in enumerate(PATHS):
        path = ends.get(name, "/model")
        for kind, place in {"whole": str(outside), "up": os.path.relpath(outside, workspace)}.items():
            file = ("config.yaml", "studio.yaml")[number % 2]
            folder = run(f"{kind}-{name}")
            (folder / file).write_text(settings_of(folder.name, name, f"{place}{path}"))
            yield folder.name
    for name, target in links_of(outside).items():
        folder = run(f"link-{name.replace('/', '-')}")
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        place.symlink_to(target)
        yield folder.name
    for name in ("train.log", "metrics.jsonl", "config.yaml", "final/x"):
        folder = run(f"pipe-{name.replace('/', '-')}")
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        yield folder.name


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_forged_runs_show_and_change_nothing_outside(client, workspace, outside, step):
    names = [*forged_runs(workspace, outside)]
    assert len(names) >= 40
    names = names[::step]
    watched = Watched(outside)
    for page in ("/runs", "/chat", "/plan", "/data"):
        answer = client.get(page)
        assert answer.status_code == 200
        assert SECRET not in answer.text
    for name in names:
        folder = f"runs/{name}"
        has_model = name.endswith(("model.name", "data.tokenizer", "data.root", "deepspeed"))
        of_settings = ("/api/settings", "resume", *(("chat", "out") if has_model else ()))
        answers = ask_all(client, folder, *([] if name.startswith(("link", "pipe")) else [of_settings]))
        for action, answer in answers.items():
            assert answer.status_code < 500, (name, action, answer.text)
            assert SECRET not in answer.text, (name, action)
        if name.endswith("run_dir") and answers["resume"].status_code == 200:
            # settings in the folder of a run mean that run, whatever folder they name
            assert watched.events() == set(), name
            client.started.clear()
            if (workspace / "runs" / "renamed").exists():
                (workspace / "runs" / "renamed").rename(workspace / "runs" / f"done-{name}")
            continue
        assert refusal(answers["resume"], answers["resume"].status_code)
        assert answers["resume"].status_code == (400 if name == "link-run.json" else 403), answers["resume"].text
        assert watched.events() == set(), name
        if (workspace / "runs" / "renamed").exists():
            (workspace / "runs" / "renamed").rename(workspace / "runs" / f"done-{name}")
    assert client.started == []
    assert not (workspace / ".trash").exists()
    # the same runs, with paths inside
    for name in {*PATHS} - {*OWN_CODE, "deepspeed"}:
        folder = workspace / "runs" / f"whole-{name}"
        (folder / "studio.yaml").unlink(missing_ok=True)
        inside = f"runs/{folder.name}" if name == "run_dir" else "docs/x"
        (folder / "config.yaml").write_text(settings_of(folder.name, name, inside))
        answer = client.post("/api/resume", json={"folder": f"runs/{folder.name}"})
        assert answer.status_code == 200, (name, answer.text)
    assert len(client.started) == len(PATHS) - len(OWN_CODE) - 1


def test_an_adapter_and_rows_lead_nowhere_outside(client, workspace, outside):
    """What only files name is refused while they are read: the base of an adapter, pictures, links in a folder."""
    adapter, rows = workspace / "adapter", workspace / "rows"
    adapter.mkdir()
    save_file({}, adapter / "adapter_model.safetensors")
    rows.mkdir()
    shutil.copy(workspace / "chats.jsonl", rows)
    picture = workspace / "inside.png"
    shutil.copy(outside / "picture.png", picture)
    watched = Watched(outside)
    for base in (outside / "model", workspace / "way-out" / "model", os.path.relpath(outside / "model", workspace)):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 1}))
        asked = client.post("/api/chat", json=ACTIONS["chat"]("adapter"))
        assert "outside the workspace" in asked.text
        assert json.loads(asked.text.splitlines()[-1])["exit_code"] == SecurityError.exit_code
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "tiny-model", "r": 1}))
    assert "outside" not in client.post("/api/chat", json=ACTIONS["chat"]("adapter")).text
    body = {"settings": {**SETTINGS, "data.name": "x", "data.num_procs": "1"}, "source": "rows"}
    assert json.loads(client.post("/api/build", json=body).text.splitlines()[-1]) == {"result": "x"}
    origin = Origin(str(workspace / "chats.jsonl"), 1)
    assert read_picture(PictureSource("inside.png", "image"), origin, None).height == 8
    for value in (outside / "picture.png", "way-out/picture.png", f"file://{outside}/picture.png", "~/picture.png"):
        with pytest.raises(SecurityError, match=r"chats.jsonl:1: image"):
            read_picture(PictureSource(str(value), "image"), origin, None)
    with pytest.raises(SecurityError):
        TokenStore.open(outside / "data")
    (rows / "more.jsonl").symlink_to(outside / "rows.jsonl")
    for path in ("rows", "rows/*.jsonl"):
        with pytest.raises(SecurityError):
            open_source(SourceConfig(path=path))
    for path in ("rows", "rows/*.jsonl", "*/more.jsonl", "**/*.jsonl", "way-*/rows.jsonl", "rows/**"):
        for action in ("train", "plan"):
            overrides = [f"data.sources=[{{path: '{path}'}}]"]
            answer = client.post(f"/api/{action}", json={"settings": SETTINGS, "overrides": overrides})
            assert "outside the workspace" in refusal(answer, 403)
    accepted = {"settings": SETTINGS, "overrides": ["data.sources=[{path: '*.jsonl'}]"]}
    assert client.post("/api/train", json=accepted).status_code == 200  # links beside the files do not matter
    assert watched.events() == set()


def test_models_of_the_person_who_started_studio_are_read_with_their_links(workspace, outside, monkeypatch):
    snapshot = outside / "hub" / "snapshot"
    snapshot.mkdir(parents=True)
    for file in (outside / "model").iterdir():  # as in the hub's cache
        (snapshot / file.name).symlink_to(file)
    monkeypatch.chdir(workspace)
    for folders, is_allowed in (([str(workspace), str(outside / "hub")], True), ([str(workspace)], False)):
        monkeypatch.setenv("FLATOUT_STUDIO_FOLDERS", json.dumps(folders))
        found = Workspace(workspace, [Path(folder) for folder in folders[1:]])
        for act in (found.config, lambda settings: hub_source(settings["model.name"], None)):
            settings = {**SETTINGS, "model.name": str(snapshot)}
            if is_allowed:
                act(settings)
            else:
                with pytest.raises(SecurityError):
                    act(settings)
    monkeypatch.delenv("FLATOUT_STUDIO_FOLDERS")
    assert hub_source(str(snapshot), None) == (str(snapshot), None)  # the command line reads what a person names
