"""Pictures given by URL are downloaded once, from hosts in `data.allowed_media_domains`; a stopped build keeps them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from local_server import local_server
from picture_world import draw, make_reader

from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data import registry
from flatout.data.build import open_or_build
from flatout.data.pictures import download, fetch
from flatout.data.rows.formats.parser import RowParser
from flatout.data.token_store import TokenStore
from flatout.io.redact import redacted

CONTENT = draw(20, 30, 1)
ANSWER = {"role": "assistant", "content": "a red square"}
ASKED = {"type": "text", "text": "what is shown?"}
MARKED = "<image>what is shown?"


class Site(BaseHTTPRequestHandler):
    """Pictures at /good/ANYTHING, and one path for each thing that goes wrong; `calls` counts paths."""

    calls: Counter[str]
    released: threading.Event

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.calls[self.path] += 1
        answers: dict[str, tuple[int, bytes, dict[str, str]]] = {
            "/busy": (503, b"", {"Retry-After": "0"}) if self.calls[self.path] < 3 else (200, CONTENT, {}),
            "/page": (200, b"<!DOCTYPE html><html><body>sign in</body></html>", {}),
            "/large": (200, b"", {"Content-Length": str(65 << 20)}),
            "/cut": (200, b"\x89PNG", {"Content-Length": "1000"}),
            "/slow": (200, b"\x89PNG", {"Content-Length": "1000"}),
            "/to": (302, b"", {"Location": query}),
            "/round": (302, b"", {"Location": "/round"}),
            "/endless": (200, b"", {"Content-Length": ""}),
        }
        good = (200, CONTENT, {})
        self._send(*(good if path.startswith("/good/") else answers.get(path, (404, b"", {}))))
        with suppress(OSError):  # the client has enough
            while path == "/endless":
                self.wfile.write(bytes(1 << 20))
        if path == "/slow":
            self.released.wait(60)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    make_reader(folder, "qwen2_5_vl")
    return folder


@pytest.fixture
def calls() -> Counter[str]:
    return Counter()


@pytest.fixture
def site(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(fetch, "PAUSE_S", 0.01)
    released = threading.Event()
    with local_server(Site, calls=calls, released=released) as address:
        yield address
        released.set()


@pytest.fixture
def build(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Build rows as a person does; returns the exit code and what is said."""

    def build(rows: list[dict[str, Any]], *options: str) -> tuple[int, str]:
        paths = []
        for name, key in (("rows", "messages"), ("chats", "conversations")):
            if own := [json.dumps(row) + "\n" for row in rows if key in row]:
                paths.append(tmp_path / f"{name}.jsonl")
                paths[-1].write_text("".join(own))
        words = ["data", "build", *map(str, paths), "--tokenizer", str(model), "--name", "set"]
        code = main([*words, "--root", str(tmp_path / "d"), "--num-procs", "1", *options])
        said = capfd.readouterr()
        return code, " ".join((said.out + said.err).split())

    return build


def store(tmp_path: Path) -> TokenStore:
    root = tmp_path / "d"
    return TokenStore.open(registry.entry_dir(root, registry.find(root, "set")))


def row(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def asked(url: str) -> dict[str, Any]:
    return row({"type": "image", "url": url}, ASKED)


def forms(url: Callable[[str], str]) -> list[dict[str, Any]]:
    """A row of each form that gives a picture by URL."""
    turns = [{"role": "user", "content": MARKED}, ANSWER]
    chat = [{"from": "human", "value": MARKED}, {"from": "gpt", "value": "a red square"}]
    return [
        asked(url("transformers")),
        row({"type": "image", "image": url("qwen")}, ASKED),
        row({"type": "image_url", "image_url": {"url": url("openai"), "detail": "low"}}, ASKED),
        row({"type": "image_url", "image_url": url("text")}, ASKED),
        row({"type": "input_image", "image_url": url("responses")}, ASKED),
        row({"type": "image", "source": {"type": "url", "url": url("anthropic")}}, ASKED),
        {**row({"type": "image"}, ASKED), "images": [url("trl")]},
        {"messages": turns, "images": [url("llama-factory")]},
        {"messages": turns, "images": [{"bytes": None, "path": url("datasets")}]},
        {"messages": [{"role": "user", "content": "what is shown?"}, ANSWER], "image": url("one")},
        {"conversations": chat, "images": [url("sharegpt")]},
        {"conversations": chat, "image": url("llava")},
    ]


def test_every_form_is_the_same_sample_and_each_url_is_asked_for_once(
    build: Any, site: str, calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, parse = Counter[str](), RowParser.parse
    monkeypatch.setattr(RowParser, "parse", lambda self, raw: parsed.update([str(raw.origin)]) or parse(self, raw))
    rows = forms(lambda name: f"{site}/good/{name}.png") * 2 + [asked(f"{site}/good/a b\u00e9.png?x=1#part")]
    # what leads elsewhere and back is followed; a busy server is asked again
    rows += [asked(f"{site}/to?/good/there.png"), asked(f"{site}/busy")]
    code, said = build(rows, "--allowed-media-domain", "127.0.0.1")
    assert (code, "downloaded 15 pictures, 0." in said) == (0, True), said
    built = store(tmp_path)
    assert (built.num_samples, len(parsed), set(parsed.values())) == (len(rows), len(rows), {1})
    assert {content for index in range(len(rows)) for content in built.pictures(index)} == {CONTENT}
    assert calls.pop("/busy") == 3
    assert calls.pop("/good/a%20b%C3%A9.png?x=1") == 1
    assert set(calls.values()) == {1}
    assert not list((tmp_path / "d").rglob("*.pictures"))  # the set has them
    code, said = build(rows, "--allowed-media-domain", "127.0.0.1")
    assert (code, "Reusing" in said, set(calls.values())) == (0, True, {1})
    code, said = build(rows[:1], "--allowed-media-domain", "127.0.0.1", "--replace")
    # what is behind a name may have changed, so that it is asked for if a person asks for a build
    assert build(rows[:1], "--allowed-media-domain", "127.0.0.1", "--replace")[0] == code == 0
    assert calls["/good/transformers.png"] == 3


BAD = {
    "missing.png": "the server answers 404 Not Found; check the URL",
    "page": "its file is a web page; expected a picture",
    "large": "its file has over 64 MiB; resize it",
    "endless": "its file has over 64 MiB; resize it",
    "slow": "no answer within 1 s, or not all of it within 120 s (3 attempts)",
    "cut": "the connection was cut (3 attempts)",
    "round": "302, a redirect that is not followed: only to http(s), and at most 5 times",
    "to?file:///etc/passwd": "302, a redirect that is not followed: only to http(s), and at most 5 times",
    "to?http://169.254.169.254/latest": "it is redirected: 169.254.169.254 is not an allowed host",
    "to?http://a@127.0.0.1/good/a.png": "it is redirected: a URL with a password is not downloaded",
}
NO_HOSTS = {
    "http://127.0.0.1:1/a.png": "the server refuses the connection (3 attempts)",
    "http://user:secret@127.0.0.1/a.png": "a URL with a password is not downloaded",
    "http://127.0.0.1:port/a.png": "it is not a valid URL",
    "http:///a.png": "only http:// and https:// with a plain host are downloaded",
    "https://other.example/a.png": "other.example is not an allowed host",
}


def test_what_fails_is_a_bad_row_with_its_reason_and_is_counted(
    build: Any, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SILENT_S", 1.0)
    cases = {f"{site}/{path}": says for path, says in BAD.items()} | NO_HOSTS
    rows = [asked(f"{site}/good/a.png"), *map(asked, cases), asked(next(iter(cases)))]
    code, said = build(rows, "--allowed-media-domain", "127.0.0.1", "--on-bad-row", "skip")
    # a page is not seen to be none before it is read
    assert (code, f"downloaded 2 pictures, 0.0 MB; {len(cases) - 1} URLs failed" in said) == (0, True), said
    built = store(tmp_path)
    assert (built.num_samples, built.meta.counts["bad"]) == (1, len(cases) + 1)
    problems = json.loads((built.folder / "report.json").read_text())["bad_rows"]
    for number, (url, says) in enumerate(cases.items(), start=2):
        name = f"rows.jsonl:{number}: messages[0].content[0].url ({redacted(url)!r}): "
        assert name in problems[number - 2]
        assert says in problems[number - 2], url


def test_nothing_is_asked_for_without_the_setting_or_at_an_address_that_is_not_public(
    build: Any, site: str, calls: Counter[str], tmp_path: Path
) -> None:
    rows = [asked(f"{site}/good/a.png"), asked(f"{site.replace('127.0.0.1', 'localhost')}/good/a.png")]
    code, said = build(rows)
    assert (code, "127.0.0.1 is not an allowed host" in said) == (3, True), said
    assert "try --allowed-media-domain 127.0.0.1" in said
    for number, domain in enumerate(("*", "*ocalhost", "127.0.0.*")):
        code, said = build([rows[number % 2]], "--allowed-media-domain", domain)
        assert (code, "is at 127.0.0.1, which is not a public address" in said) == (3, True), said
    assert not calls
    code, said = build(rows, "--allowed-media-domain", "127.0.0.1", "--allowed-media-domain", "localhost")
    assert (code, sum(calls.values())) == (0, 2)
    code, said = build(rows, "--allowed-media-domain", "http://a.example")
    assert (code, "is no host; give one such as images.example.org" in said) == (2, True), said


def test_a_stopped_build_keeps_what_is_whole(build: Any, site: str, calls: Counter[str], tmp_path: Path) -> None:
    rows = [asked(f"{site}/good/{number}.png") for number in range(6)]
    code, said = build([*rows, asked(f"{site}/missing.png")], "--allowed-media-domain", "127.0.0.1")
    assert (code, "404" in said) == (3, True)
    (kept,) = (tmp_path / "d").rglob("*.pictures")
    one = next(path for path in kept.iterdir() if path.suffix != ".failed")
    one.write_bytes(one.read_bytes()[:-3])  # as a power cut leaves it
    calls.clear()
    code, said = build(rows, "--allowed-media-domain", "127.0.0.1")
    assert (code, "downloaded 1 pictures, 0.0 MB; 5 were there from an earlier build" in said) == (0, True), said
    assert (sum(calls.values()), store(tmp_path).num_pictures, kept.exists()) == (1, 6, False)


def test_progress_is_told_before_the_first_pictures_are_there(
    site: str, calls: Counter[str], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(asked(f"{site}/good/1.png")) + "\n")
    config = DataConfig(
        name="set", root=tmp_path, sources=[{"path": str(tmp_path / "rows.jsonl")}], num_procs=1,
        allowed_media_domains=["127.0.0.1"],
    )  # fmt: skip
    seen = []
    open_or_build(config, str(model), progress=lambda done, total: seen.append((done, sum(calls.values()))))
    assert (seen[0], seen[-1]) == ((0, 0), (1, 1))


def test_a_host_that_fails_again_and_again_is_given_up(
    build: Any, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "AT_ONCE", 2)
    rows = [asked(f"http://127.0.0.1:1/{number}.png") for number in range(200)] + [asked(f"{site}/good/a.png")]
    code, said = build(rows, "--allowed-media-domain", "127.0.0.1", "--on-bad-row", "skip")
    assert (code, "downloaded 1 pictures, 0.0 MB; 200 URLs failed" in said) == (0, True), said
    problems = json.loads((store(tmp_path).folder / "report.json").read_text())["bad_rows"]
    # two are on their way while the last of 16 fails
    given_up = [problem for problem in problems if "127.0.0.1:1 failed 16 pictures in a row" in problem]
    assert 182 <= len(given_up) <= 184


class Proxy(BaseHTTPRequestHandler):
    """An HTTP proxy with a login; `calls` counts what it is asked for."""

    calls: Counter[str]

    def do_CONNECT(self) -> None:
        if not self._may(self.path):
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as server:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=self._copy, args=(server, self.connection))
            back.start()
            self._copy(self.connection, server)
            back.join()

    def do_GET(self) -> None:
        if self._may(self.path):
            with build_opener(ProxyHandler({})).open(self.path) as answer:
                content = answer.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def _may(self, asked: str) -> bool:
        self.calls[asked] += 1
        is_known = self.headers.get("Proxy-Authorization") == f"Basic {b64encode(b'me:word').decode()}"
        if not is_known:
            self.send_response(407)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return is_known

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def log_message(self, *_: Any) -> None:
        pass


def certificates(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A CA of its own, and what a server at localhost needs of it."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    for words in (
        ["req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=our CA"],
        ["req", *curve, "-keyout", "key", "-out", "request", "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", "own.pem",
         "-extfile", "names"],
    ):  # fmt: skip
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.pem", folder / "key")
    return folder / "ca.pem", context


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_https_and_proxies(
    build: Any, site: str, calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, context = certificates(tmp_path)
    plain, to = site.replace("127.0.0.1", "localhost") + "/good/a.png", Counter[str]()
    local = ("--replace", "--allowed-media-domain", "localhost")
    with (
        local_server(Site, context, calls=calls, released=threading.Event()) as tls,
        local_server(Proxy, calls=to) as proxy,
    ):
        secret = tls.replace("http://127.0.0.1", "https://localhost") + "/good/b.png"
        rows, place = [asked(plain), asked(secret)], proxy.removeprefix("http://")
        code, said = build(rows, *local)
        assert (code, "certificate is not valid: unable to get local issuer" in said, calls["/good/b.png"]) == (
            3,
            True,
            0,
        )
        assert "set SSL_CERT_FILE to its PEM file" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        assert build(rows, *local)[0] == 0
        assert (calls, to) == (Counter({"/good/a.png": 1, "/good/b.png": 1}), Counter())
        calls.clear()

        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy)
        code, said = build(rows, *local)
        wants = said.count("the proxy needs a login: set HTTPS_PROXY and HTTP_PROXY to")
        assert (code, wants, calls) == (3, 2, Counter())
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://me:word@{place}")
        to.clear()
        code, said = build(rows, *local)
        assert (code, to) == (0, {plain: 1, secret.removeprefix("https://").partition("/")[0]: 1}), said
        assert "me:word" not in said
        # an address that is not public is not even asked for through a proxy
        code, said = build(rows, "--replace", "--allowed-media-domain", "*")
        assert (code, said.count("is at 127.0.0.1, which is not a public address"), to.total()) == (3, 2, 2)
        monkeypatch.setenv("NO_PROXY", "localhost")
        assert (build(rows, *local)[0], to.total()) == (0, 2)
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        code, said = build(rows, *local)
        assert (code, "proxy 127.0.0.1:1: the server refuses the connection" in said) == (3, True), said
        monkeypatch.setenv("HTTPS_PROXY", f"socks5://{place}")
        code, said = build(rows, *local)
        assert (code, "HTTPS_PROXY names a socks5 proxy, but" in said) == (2, True), said
