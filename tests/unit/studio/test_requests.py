"""Studio answers every request with a sentence: each route, each parameter, with what no page would send."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.datastructures import ImmutableMultiDict
from starlette.routing import Route

from flatout.studio import trainings as trainings_module
from flatout.studio.app import make_app
from flatout.studio.jobs import Worker, WorkerJob
from tests.studio_client import PORT, SETTINGS, TOKEN, open_studio, refusal, write_run

RUN = {"folder": "runs/a"}
# a request that each route accepts: its query, or its JSON body
QUERIES: dict[str, dict[str, str]] = {
    "/": {"token": TOKEN}, "/api/run": {**RUN, "version": "0"}, "/api/build": {}, "/api/settings": RUN, "/report": RUN,
    "/api/figures": RUN,
    "/data": {"name": "chats"}, "/plan": {}, "/runs": {}, "/run": RUN, "/compare": {"run": "runs/b"}, "/chat": {},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/api/rename": {**RUN, "name": "a-2"},
    "/api/notes": {**RUN, "note": "x", "tags": "y"},
    "/api/build": {"settings": SETTINGS, "overrides": [], "source": "chats.jsonl", "format": "auto", "columns": {}},
    "/api/columns": {"source": "chats.jsonl"},
    "/api/samples": {"name": "chats", "first": 0, "count": 1},
    "/api/plan": {"settings": SETTINGS, "overrides": [], "device": "", "tokens_per_s": 1.5},
    "/api/chat": {"run": "tiny-model", "turns": [], "prompt": "Hi", "max_new_tokens": 1, "temperature": 0.5},
    "/api/out": {**RUN, "to": "merged"},
    "/api/push": {**RUN, "repo": "me/x"},
    "/api/train": {"settings": {**SETTINGS, "name": "new"}, "overrides": []},
    "/api/stop": RUN,
    "/api/resume": RUN,
    "/api/delete": {**RUN, "others": None},
}
# what the page sends as it is
RAW = {"/api/upload", "/api/cancel"}

TEXTS = [
    "", "0", "-1", "1.5", "1e999", "nan", "9" * 5000, "²", "１", "null", "true", "[]", "{}", "\0", "a\nb", "'", "%",
    "..", "../..", "/etc", "~", "x" * 5000, "a/" * 3000, "\U0001f642", "\ufeff", "‮", "runs/none", "__proto__", "*", "[",
]  # fmt: skip
# as JSON, some of which Python's encoder does not write
VALUES = [
    "null", "true", "0", "-1", "1.5", "9" * 400, "-1e999", "NaN", "Infinity", '"\\ud800"', '"\\u0000"', "[]", "[[]]",
    "[null]", '[""]', '["=", "a=", "=b"]', "{}", '{"": ""}', '{"a": null}', "[" * 400 + "]" * 400,
    *map(json.dumps, TEXTS),
]  # fmt: skip
NAMES = ["", ".", "a..b", "model", "model.name.x", "data.sources", "nosuch", "lora.rank", "optim.lr", "\0", "x" * 3000,
         "deepspeed", "eval.prompts", "run_dir", "name", "data.template_args", "seed", "gpus"]  # fmt: skip
LINES = ["=", "a=", "model=", "model={}", "model=[", "data=[", "data.sources=[{path: 3}]", "data.sources=3", "gpus=-1",
         "lora.rank=" + "9" * 5000, "optim.lr=.nan", "seed=0x" + "f" * 40, "name=!!python/name:os.system ''",
         "data.template_args=&a [*a]", "eval.prompts={a: b}", "deepspeed={x: [/etc]}", "run_dir=\0",
         "model.name=\ud800", "data.name=2026-13-45", "batch.epochs=1e999", "x" * 9000]  # fmt: skip
BODIES_OF_ALL = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{",
    b"\xff\xfe",
    b"\0",
    b"[" * 100_000,
    b'{"folder": 1' + b"0" * 9000,
]


@pytest.fixture
def workspace(tiny, tmp_path):
    shutil.copytree(tiny.model_dir, tmp_path / "own-model")
    (tmp_path / "tiny-model").symlink_to(tmp_path / "own-model")  # a link that stays inside
    shutil.copy(tiny.chats, tmp_path / "chats.jsonl")
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    return tmp_path


@pytest.fixture
def client(workspace, monkeypatch):
    """A client of a studio that starts no process: a request that gets as far has been accepted."""

    def start(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(poll=lambda: 0, pid=0)

    def submit(_: Worker, kind: str, **facts: Any) -> WorkerJob:
        json.dumps(facts)
        return WorkerJob({"kind": kind}, [{"result": None}])

    monkeypatch.setattr(trainings_module, "start_python", start)
    monkeypatch.setattr(Worker, "submit", submit)
    with open_studio(workspace) as client:
        yield client


def routes(method: str) -> set[str]:
    """All addresses of the app that take this method, but those of its own files."""
    found = make_app(Path(), TOKEN, PORT, print)._app.routes  # type: ignore[attr-defined]
    return {route.path for route in found if isinstance(route, Route) and method in (route.methods or ())}


def answered(answer: Any, sent: object) -> bool:
    """Whether a request was accepted; if it was not, it has a sentence. `sent` is named where there is no answer."""
    assert answer.status_code < 500, f"{sent!r:.300}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400:
        assert len(refusal(answer, answer.status_code)) > 10, sent
    return bool(answer.status_code == 200)


def test_every_route_is_tested_and_accepts_what_its_page_sends(client):
    assert routes("GET") == QUERIES.keys()
    assert routes("POST") == BODIES.keys() | RAW
    for address, query in QUERIES.items():
        params = [*query.items(), *([("run", "runs/a")] if address == "/compare" else [])]
        assert answered(client.get(address, params=params), address), address
    for address, body in BODIES.items():
        if address not in ("/api/rename", "/api/stop"):  # a name is free once, and no run trains
            assert answered(client.post(address, json=body), address), address
    assert answered(client.post("/api/upload", params={"name": "new.jsonl"}, content=b"{}"), "upload")


# of the values, every seventh by default
STEPS = [7, pytest.param(1, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("address", QUERIES)
def test_a_query_is_answered_in_a_sentence(client, address, step, monkeypatch):
    asked = set[str]()
    get, getlist = ImmutableMultiDict.get, ImmutableMultiDict.getlist
    monkeypatch.setattr(ImmutableMultiDict, "get", lambda own, key, *rest: (asked.add(key), get(own, key, *rest))[1])
    monkeypatch.setattr(ImmutableMultiDict, "getlist", lambda own, key: (asked.add(key), getlist(own, key))[1])
    valid = QUERIES[address]
    answered(client.get(address, params=valid), address)
    for name in asked:
        for value in TEXTS[::step]:
            sent = {**valid, name: value}
            answered(client.get(address, params=sent), (address, sent))
            answered(client.get(address, params=[*sent.items(), (name, value)]), (address, "twice", sent))
        for raw in (f"{name}=%ff%fe", f"{name}", f"{name}=%00", f"{name}=%zz"):
            answered(client.get(f"{address}?{raw}"), (address, raw))
        answered(client.get(address, params={key: one for key, one in valid.items() if key != name}), (address, name))
    for method in ("post", "put", "delete", "options", "patch"):
        answered(client.request(method, address), (address, method))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("address", BODIES)
def test_a_body_is_answered_in_a_sentence(client, address, step, monkeypatch):
    read, kinds = BaseModel.model_validate_json.__func__, list[Any]()
    noted = classmethod(lambda kind, content: (kinds.append(kind), read(kind, content))[1])
    monkeypatch.setattr(BaseModel, "model_validate_json", noted)
    valid = BODIES[address]
    answered(client.post(address, json=valid), address)
    fields = kinds[0].model_fields
    assert valid.keys() <= fields.keys()
    for name in (*fields, "nosuch"):
        rest = ", ".join(f"{json.dumps(key)}: {json.dumps(one)}" for key, one in valid.items() if key != name)
        for value in VALUES[::step]:
            sent = f"{{{rest}{', ' if rest else ''}{json.dumps(name)}: {value}}}".encode()
            is_taken = answered(client.post(address, content=sent), (address, sent))
            assert not (is_taken and name == "nosuch"), sent
        answered(client.post(address, content=f"{{{rest}}}".encode()), (address, "without", name))
    for body in BODIES_OF_ALL:
        assert not answered(client.post(address, content=body), (address, body)), body
    if address == "/api/train":  # the others read their settings as it does
        for sent in [*settings_of_others(valid)][::step]:
            answered(client.post(address, content=sent), (address, sent))


def settings_of_others(valid: dict[str, Any]) -> Iterator[bytes]:
    for name in NAMES:
        for text in ("", "-1", "1e999", "nan", "9" * 5000, "null", "[", "{}", "\0", "../..", "x" * 5000):
            yield json.dumps({**valid, "settings": {**SETTINGS, name: text}}).encode()
    for line in LINES:
        yield json.dumps({**valid, "overrides": [line]}).encode()


def test_an_upload_is_answered_in_a_sentence(client, workspace):
    for value in (*TEXTS, ".hidden.jsonl", "../x.jsonl", "a/b.jsonl", "x.exe", "a b.jsonl"):
        assert not answered(client.post("/api/upload", params={"name": value}, content=b"{}"), value)
    for size in ("²", "-1", "9" * 5000, "x", "", "1e9"):
        headers = {"content-length": size} if size.isascii() else [(b"content-length", size.encode())]
        answered(client.post("/api/upload", params={"name": "x.jsonl"}, content=b"{}", headers=headers), size)
    assert {path.name for path in workspace.iterdir()} >= {"chats.jsonl", "runs", "own-model"}
