"""A hub that is silent, gone or refuses is told in one line, with the exit code of its class."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import Repo, hub_of_this_process
from local_server import local_server

from flatout.cli.main import main
from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError, FlatoutError
from flatout.models.load.source import fingerprint_model
from tests.usual import usual


class Refusing(BaseHTTPRequestHandler):
    """Answers everything as the hub does for a model that it does not have."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815  (http.server finds it by this name)

    def log_message(self, *_: Any) -> None:
        """Nothing in the test's output."""


class Listing(Refusing):
    """Answers everything with a list, as no hub does."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"[1, 2]")

    do_GET = do_HEAD  # noqa: N815  (http.server finds it by this name)


@contextmanager
def hub(kind: str) -> Iterator[tuple[str, list[socket.socket]]]:
    """Address of a hub that is `silent` (it accepts and says nothing), `gone`, `refusing` or `listing`; connections."""
    connections: list[socket.socket] = []
    if kind in ("refusing", "listing"):
        with local_server(Refusing if kind == "refusing" else Listing) as address:
            yield address, connections
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def accept() -> None:
            try:
                while True:
                    connections.append(server.accept()[0])
            except OSError:
                return

        if kind == "gone":
            server.close()
        else:
            threading.Thread(target=accept, daemon=True).start()
        yield address, connections


def flatout(address: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_ETAG_TIMEOUT": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        env.pop(name, None)
    command = [sys.executable, "-m", "flatout", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        pytest.param("silent", 6, "does not answer within 1 s", marks=pytest.mark.exhaustive),
        pytest.param("gone", 6, "does not answer within 1 s", marks=pytest.mark.exhaustive),
        pytest.param("refusing", 2, "the hub rejects it (404): ", marks=pytest.mark.exhaustive),
        pytest.param("listing", 6, "does not answer as a hub does", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_that_no_folder_and_no_hub_has_is_one_line(tmp_path, kind, code, said):
    with hub(kind) as (address, connections):
        done = flatout(address, tmp_path, "chat", "modles/qwen", "--prompt", "a")
    assert done.returncode == code, done.stderr
    assert "there is no folder modles/qwen" in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "For more information" not in done.stderr
    # one request, which the client sends twice; by itself it would send ten and wait for minutes
    assert len(connections) <= 2


@pytest.mark.exhaustive
def test_a_tokenizer_that_a_silent_hub_does_not_give_is_one_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with hub("silent") as (address, _):
        done = flatout(
            address, tmp_path, "data", "build", str(tmp_path / "rows.jsonl"), "--name", "x", "--tokenizer", "org/none"
        )
    assert done.returncode == 6, done.stderr
    assert "does not answer within 1 s" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def here(tiny, tmp_path, monkeypatch):
    """A hub with the model org/tiny that this process uses; waits between the client's attempts take no time."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with hub_of_this_process(tmp_path, monkeypatch) as running:
        running.add("someone/tiny", tiny.model_dir)
        yield running


@pytest.mark.parametrize(("name", "code"), [("someone/tiny", 0), ("someone/none", 6)])
def test_a_silent_hub_is_waited_for_once_and_a_cached_model_loads(here, monkeypatch, capsys, name, code):
    chat = ["chat", name, "--prompt", "a", "--device", "cpu", "--max-new-tokens", "1"]
    assert code or main(chat) == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.3)
    # what was found out before counts no more
    monkeypatch.setattr("flatout.io.hub.ASK_EVERY_S", 30.0)
    here.silent = "/"
    here.calls.clear()
    assert main(chat) == code
    assert ("does not answer within 0.3 s" in capsys.readouterr().err) == bool(code)
    # by itself, the client would send ten requests and wait for minutes
    assert 1 <= len(here.calls) <= 2


STATUSES = [(status, 2, "the hub rejects it") for status in (403, 404)]
STATUSES += [(status, 6, f"answers with an error ({status})") for status in (429, 500, 503)]


@pytest.mark.parametrize(("status", "code", "said"), usual(STATUSES, [STATUSES[0], STATUSES[4]]))
def test_an_error_of_the_hub_is_not_a_file_that_does_not_exist(here, status, code, said, capsys):
    here.fails = {"config.json": status}
    assert main(["chat", "someone/tiny", "--prompt", "a", "--device", "cpu"]) == code
    assert said in capsys.readouterr().err
    here.fails = {}
    assert main(["chat", "someone/tiny", "--prompt", "a", "--device", "cpu", "--max-new-tokens", "1"]) == 0


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "model-2-of-2.safetensors"])
def test_a_fingerprint_never_leaves_weights_out(here, file):
    model, files = ModelConfig(name="someone/tiny"), here.repos["someone/tiny"].files
    if file != "model.safetensors":
        weights = files.pop("model.safetensors")
        shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
        index = {"metadata": {}, "weight_map": {str(number): name for number, name in enumerate(shards)}}
        files.update({"model.safetensors.index.json": json.dumps(index).encode(), **dict.fromkeys(shards, weights)})
    here.fails = {f"/{file}": 503}
    with pytest.raises(FlatoutError, match=r"answers with an error \(503\)"):
        fingerprint_model(model)
    here.fails = {}
    assert file.endswith(".json") or file in fingerprint_model(model)
    assert len(fingerprint_model(model)) == (2 if file == "model.safetensors" else 3)
    if file == "model-2-of-2.safetensors":
        # in the index, but not in the repository
        here.repos["someone/other"] = Repo(commits=[{}, {name: data for name, data in files.items() if name != file}])
        with pytest.raises(CheckpointError, match=r"weight file model-2-of-2.safetensors is missing"):
            fingerprint_model(ModelConfig(name="someone/other"))
