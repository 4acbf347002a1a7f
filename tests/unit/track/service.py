"""A service of a test: an HTTP server on loopback that takes records, refuses them or stalls, and its client.

The client is a module `trackio`, which stands in for the real one: the class under test, the process and the files are
flatout's own, and no package is needed.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CLIENT = """
import json, os, urllib.request

def _post(kind, **content):
    print(f"sending {kind} with " + os.environ["SERVICE_TOKEN"])
    data = json.dumps({"kind": kind, **content}).encode()
    urllib.request.urlopen(os.environ["SERVICE"], data=data).read()

class Table:
    def __init__(self, columns, data):
        self.rows = data

class Run:
    def __init__(self, name):
        self.name = name
    def log(self, values, step):
        values = {key: getattr(value, "rows", value) for key, value in values.items()}
        _post("log", run=self.name, step=step, values=values)
    def log_artifact(self, path, name, type):
        _post("artifact", run=self.name, files=sorted(os.listdir(path)))
    def finish(self):
        _post("finish", run=self.name)

def init(project, name, config, resume, embed):
    _post("init", run=name, project=project, config=config)
    return Run(name)
"""


class Service:
    """`mode` is what the server does with a request: "take" it, answer with a status such as 500, or "stall"."""

    def __init__(self, client: Path) -> None:
        (client / "trackio.py").write_text(CLIENT)
        self.mode: str | int = "take"
        self.received: list[dict[str, Any]] = []
        self.num_stalled = 0
        self._resume = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                if service.mode == "stall":
                    service.num_stalled += 1
                    service._resume.wait()  # `take` and `close` end it
                status = 200 if isinstance(service.mode, str) else service.mode
                if status == 200:
                    service.received.append(content)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self) -> None:
        """Answer again, also to those who wait."""
        self.mode = "take"
        self._resume.set()

    def close(self) -> None:
        self._resume.set()
        self._server.shutdown()
        self._server.server_close()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [content for content in self.received if content["kind"] == kind]

    def values(self, name: str) -> list[tuple[int, Any]]:
        """(step, value) of a metric in the order of arrival."""
        return [(one["step"], one["values"][name]) for one in self.of_kind("log") if name in one["values"]]
