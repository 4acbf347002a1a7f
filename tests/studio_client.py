"""A browser of studio for tests, and runs as studio finds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

testclient = pytest.importorskip("starlette.testclient")
pytest.importorskip("uvicorn")

from synthetic_run import write_synthetic_run  # noqa: E402

from flatout.config.schema import Config, SourceConfig  # noqa: E402
from flatout.studio.app import make_app  # noqa: E402

PORT, TOKEN = 8765, "the-token-of-this-test"
ADDRESS = f"http://127.0.0.1:{PORT}"
# what a person must choose, among what is there
CHOSEN = {"model.name", "data.name"}
SETTINGS = {"model.name": "tiny-model", "data.name": "chats"}


@contextmanager
def open_studio(workspace: Path, models: tuple[Path, ...] = ()) -> Iterator[Any]:
    """Yield a client with the cookie; its requests come from a page of studio."""
    guard = make_app(workspace, TOKEN, PORT, print, models)
    with testclient.TestClient(guard, ADDRESS, headers={"origin": ADDRESS}, raise_server_exceptions=False) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


def refusal(answer: Any, status: int) -> str:
    """The sentence of a refusal."""
    assert answer.status_code == status, answer.text
    found = answer.json()["error"] if answer.headers["content-type"] == "application/json" else answer.text
    assert "Traceback" not in found
    return str(found).strip()


def marked(folder: Path) -> Path:
    """Make a folder a run's, as flatout does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "0123456789abcdef", "created": "2026-01-01T00:00:00Z"}))
    return folder


def write_run(folder: Path) -> Path:
    """Write a run that ended, with settings in the form that `flatout train` writes."""
    marked(write_synthetic_run(folder, num_steps=20))
    settings = {"name": folder.name, "model": {"name": "tiny-model"}, "data": {"name": "chats"}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder


def shows_default(name: str, text: str) -> bool:
    """Whether a control with this text shows its setting's default, as the schema has it."""
    kind: Any = SourceConfig if name == "format" else Config
    *sections, leaf = name.split(".")
    for section in sections:
        kind = kind.model_fields[section].annotation
    default = kind.model_fields[leaf].get_default(call_default_factory=True)
    if default is None:
        return text == "not set"
    if isinstance(default, bool):
        return text == str(default).lower()
    if isinstance(default, int | float):  # auto stands for a rate of the method, as the help says
        return (name, text) == ("optim.lr", "auto") or float(text) == default
    return text == str(default)
