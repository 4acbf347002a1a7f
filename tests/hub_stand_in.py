"""A hub on this machine: what huggingface_hub calls to create, fill, describe and read repositories of models.

Uploads of large files follow the LFS protocol, which the client uses where hf_xet is switched off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from local_server import local_server

USER, TOKEN, READ_TOKEN = "someone", "hf_stand_in_write_token", "hf_stand_in_read_token"


@dataclass
class Repo:
    private: bool = False
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{id(self)}-{len(self.commits)}".encode()).hexdigest()


@dataclass
class Hub:
    """`fails` maps a part of a path to the status that answers it, `odd` to other content; `silent` is a part of a path
    that gets no answer. `calls` has method, path and token of each call."""

    address: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)
    odd: dict[str, bytes] = field(default_factory=dict)
    silent: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def env(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """The environment of a process that uses this hub and no other."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
        env |= {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return env | ({"HF_TOKEN": token} if token else {})

    def add(self, name: str, folder: Path) -> None:
        """Put a folder's files into a new public repository."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos[name] = Repo(commits=[{}, files])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing in the test's output."""

    def handle_call(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path, token = unquote(url.path), self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        hub.calls.append((self.command, self.path, token))
        if status := next((status for text, status in hub.fails.items() if text in path), None):
            return self.refuse(status, "told to fail")
        if hub.silent and hub.silent in path:
            hub.released.wait()
            return None
        if content := next((content for text, content in hub.odd.items() if text in path), None):
            return self.reply(content)
        if token not in ("", TOKEN, READ_TOKEN):
            return self.refuse(401, "Invalid credentials in Authorization header")
        if self.command in ("POST", "PUT") and token != TOKEN and not path.startswith("/lfs/"):
            return self.refuse(403, "this token cannot write")
        return self.route(path, path.strip("/").split("/"), token)

    def route(self, path: str, parts: list[str], token: str) -> None:
        if path == "/":
            return self.reply({})
        if path == "/api/whoami-v2":
            return self.reply({"name": USER, "type": "user"}) if token else self.refuse(401, "no token")
        if path == "/api/repos/create":
            return self.create(json.loads(self.body))
        if path == "/api/validate-yaml":
            return self.validate(json.loads(self.body)["content"])
        if parts[0] == "lfs":
            return self.store(parts[1])
        if parts[:2] == ["api", "models"]:
            return self.api(f"{parts[2]}/{parts[3]}", parts[4:], token)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(self.body))
        if parts[2:3] == ["resolve"]:
            return self.file(f"{parts[0]}/{parts[1]}", "/".join(parts[4:]), token)
        return self.refuse(404, f"the stand-in does not know {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_call  # noqa: N815  (http.server finds them by these names)

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, why: str, code: str = "") -> None:
        self.reply({"error": why}, status, X_Error_Message=why, **({"X_Error_Code": code} if code else {}))

    def find(self, name: str, token: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not token):
            self.refuse(404 if token else 401, "Repository not found", "RepoNotFound")
            return None
        return repo

    def create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or USER
        name = f"{owner}/{asked['name']}"
        if owner != USER:
            return self.refuse(403, "you are no member of this organization")
        if name in self.hub.repos:
            return self.refuse(409, "you already created this repo")
        self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        return self.reply({"url": f"{self.hub.address}/{name}", "name": name, "id": name})

    def validate(self, card: str) -> None:
        facts = yaml.safe_load(card.split("---")[1])
        return (
            self.reply({"errors": [], "warnings": []}) if isinstance(facts, dict) else self.refuse(400, "no metadata")
        )

    def api(self, name: str, rest: list[str], token: str) -> None:
        if (repo := self.find(name, token)) is None:
            return None
        if rest[:1] == ["preupload"]:
            files = json.loads(self.body)["files"]
            modes = {one["path"]: "lfs" if one["path"].endswith(".safetensors") else "regular" for one in files}
            return self.reply(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            )
        if rest[:1] == ["commit"]:
            return self.commit(repo, name, [json.loads(line) for line in self.body.splitlines()])
        if rest[:1] == ["tree"]:
            if rest[2:]:
                return self.refuse(404, "Entry not found", "EntryNotFound")
            return self.reply([
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in repo.files.items()
            ])  # fmt: skip
        siblings = [{"rfilename": path} for path in [".gitattributes", *repo.files]]
        return self.reply({"id": name, "sha": repo.sha, "private": repo.private, "siblings": siblings, "tags": []})

    def commit(self, repo: Repo, name: str, lines: list[dict[str, Any]]) -> None:
        header, *changes = lines
        if header["value"].get("parentCommit", repo.sha) != repo.sha:
            return self.refuse(412, "a commit has happened since")
        files = dict(repo.files)
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif change["key"] == "deletedFile":
                del files[value["path"]]
            else:
                return self.refuse(400, f"the stand-in does not know {change['key']}")
        repo.commits.append(files)
        return self.reply({"commitUrl": f"{self.hub.address}/{name}/commit/{repo.sha}", "commitOid": repo.sha})

    def batch(self, asked: dict[str, Any]) -> None:
        known = self.hub.objects
        objects = [
            one
            if one["oid"] in known
            else {**one, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{one['oid']}"}}}
            for one in asked["objects"]
        ]
        self.reply({"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.refuse(400, "the content has another hash")
        self.hub.objects[oid] = self.body
        return self.reply({})

    def file(self, name: str, path: str, token: str) -> None:
        if (repo := self.find(name, token)) is None:
            return None
        if path not in repo.files:
            return self.reply({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=repo.sha)
        data = repo.files[path]
        return self.reply(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=repo.sha)


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """A hub that lives within the block."""
    hub = Hub()
    with local_server(_Handler, hub=hub) as hub.address:
        try:
            yield hub
        finally:
            hub.released.set()


@contextmanager
def hub_of_this_process(folder: Path, patch: Any) -> Iterator[Hub]:
    """A hub that this process uses, with a valid token; `patch` is pytest's monkeypatch."""
    from huggingface_hub import constants

    with hub_stand_in() as running:
        template = f"{running.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        changed = {"ENDPOINT": running.address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_DISABLE_XET": True}
        for name, value in {**changed, "HF_TOKEN_PATH": str(folder / "no-token")}.items():
            patch.setattr(constants, name, value)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        # what the module's own functions use
        patch.setattr("huggingface_hub.hf_api.api.endpoint", running.address)
        patch.setenv("HF_TOKEN", TOKEN)
        yield running
