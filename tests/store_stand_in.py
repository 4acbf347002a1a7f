"""Stores on this machine: a web server that can fail, and what readers use of S3, Google's buckets and the hub."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from local_server import local_server

COMMIT = "c0ffee00" * 5
DATE, ISO_DATE = "Wed, 01 Jan 2025 00:00:00 GMT", "2025-01-01T00:00:00.000Z"


@dataclass
class Files:
    """`objects` are contents by path (bucket/key). `fails` gives the next calls of a path their statuses, `cuts` the
    bytes after which each of the next answers ends; other fields switch features off. Sets of the hub have one branch,
    at `commit`. Objects are written into `buckets`, each call in `write_s`; `parts` are of those that are not complete.
    `calls` has every call."""

    address: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    fails: dict[str, list[int]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    has_ranges: bool = True
    has_marks: bool = True
    has_sizes: bool = True
    media_type: str = "application/octet-stream"
    commit: str = COMMIT
    buckets: tuple[str, ...] = ("bucket",)
    write_s: float = 0.0
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    calls: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    files: Files

    def log_message(self, *_: Any) -> None:
        """Nothing in the test's output."""

    def handle_call(self) -> None:
        self.files.calls.append((self.command, self.path, dict(self.headers)))
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        statuses = next((found for part, found in self.files.fails.items() if part in path and found), None)
        if statuses:
            return self.reply(b"<Error><Code>Failed</Code></Error>", statuses.pop(0))
        if self.command in ("PUT", "POST", "DELETE"):
            return self.change(path, query)
        if path.startswith(("storage/v1/b/", "download/storage/v1/b/")):
            return self.google(url.path, query)
        if path.startswith("api/datasets/"):
            return self.hub(path.split("/")[2:], recursive=query.get("recursive", [""])[0].lower() == "true")
        if path.startswith("datasets/") and "/resolve/" in path:
            path = re.sub("^datasets/|/resolve/[^/]+", "", path)
            if path not in self.files.objects:
                return self.reply(b"{}", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.files.commit})
        if "list-type" in query:
            return self.listing(path, query.get("prefix", [""])[0])
        if path not in self.files.objects:
            return self.reply(b"<Error><Code>NoSuchKey</Code></Error>", 404)
        return self.content(self.files.objects[path])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_call  # noqa: N815  (http.server finds them by these names)

    def change(self, path: str, query: dict[str, list[str]]) -> None:
        """What S3's client sends to write an object, in parts, or to remove one."""
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upload, objects, parts = query.get("uploadId", [""])[0], self.files.objects, self.files.parts
        time.sleep(self.files.write_s)
        if self.command == "DELETE":
            objects.pop(path, None)
            return self.reply(b"", 204)
        if path.partition("/")[0] not in self.files.buckets:
            return self.reply(b"<Error><Code>NoSuchBucket</Code></Error>", 404)
        if "uploads" in query:
            parts[upload := str(len(self.files.calls))] = {}
            return self.reply(f"<R><UploadId>{upload}</UploadId></R>".encode())
        if self.command == "PUT":
            if upload:
                parts[upload][int(query["partNumber"][0])] = data
            elif not self.path.endswith("/"):  # no mark of a folder
                objects[path] = data
            return self.reply(b"", 200, {"ETag": f'"{hash(data)}"'})
        objects[path] = b"".join(part for _, part in sorted(parts.pop(upload).items()))
        return self.reply(b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>')

    def google(self, path: str, query: dict[str, list[str]]) -> None:
        bucket, _, name = path.partition("/b/")[2].partition("/o")
        key, objects = f"{bucket}/{unquote(name.strip('/'))}", self.files.objects
        if not name.strip("/"):
            prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
            return self.reply_json(
                {"items": [_item(key, data) for key, data in objects.items() if key.startswith(prefix)]}
            )
        if key not in objects:
            return self.reply(b"{}", 404)
        return (
            self.content(objects[key]) if "media" in query.get("alt", []) else self.reply_json(_item(key, objects[key]))
        )

    def hub(self, parts: list[str], *, recursive: bool) -> None:
        top, what = "/".join(parts[:2]) + "/", parts[2:]
        found = {k.removeprefix(top): data for k, data in self.files.objects.items() if k.startswith(top)}
        if not found:
            return self.reply(b"{}", 404)
        if what[:1] != ["tree"]:
            return self.reply_json(
                {"id": top[:-1], "sha": self.files.commit, "private": False, "siblings": [], "tags": []}
            )
        folder = "".join(f"{part}/" for part in what[2:])
        inside = {key: data for key, data in found.items() if key.startswith(folder)}
        if not inside:
            return self.reply(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
        tree: list[dict[str, Any]] = []
        if not recursive:
            below = {folder + key.removeprefix(folder).split("/")[0] for key in inside} - inside.keys()
            tree += [
                {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()} for path in below
            ]
            inside = {key: data for key, data in inside.items() if "/" not in key.removeprefix(folder)}
        tree += [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in inside.items()
        ]
        return self.reply_json(tree)

    def reply_json(self, value: Any) -> None:
        self.reply(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def listing(self, bucket: str, prefix: str) -> None:
        found = {key.removeprefix(bucket + "/"): data for key, data in self.files.objects.items()}
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{ISO_DATE}</LastModified><Size>{len(data)}</Size></Contents>"
            for key, data in found.items()
            if key.startswith(prefix)
        )
        self.reply(f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())

    def content(self, data: bytes) -> None:
        files, wanted = self.files, self.headers.get("Range")
        marks = {"ETag": f'"{hash(data)}"', "Last-Modified": DATE} if files.has_marks else {}
        headers = {"Content-Type": files.media_type, "X-Repo-Commit": files.commit, **marks}
        if not wanted or not files.has_ranges:
            return self.reply(data, 200, headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        end = min(int(last or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {int(first)}-{end}/{len(data)}"
        return self.reply(data[int(first) : end + 1], 206, headers)

    def reply(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        if self.files.has_sizes:
            self.send_header("Content-Length", str(len(data)))
        else:
            self.send_header("Connection", "close")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.files.cuts.pop(0) if self.files.cuts and len(data) > 100 else len(data)
        self.wfile.write(data[:cut])
        if cut < len(data) or not self.files.has_sizes:
            self.close_connection = True


def _item(key: str, data: bytes) -> dict[str, Any]:
    bucket, _, name = key.partition("/")
    return {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(data)), "updated": ISO_DATE,
            "timeCreated": ISO_DATE, "generation": "1"}  # fmt: skip


@contextmanager
def store_stand_in() -> Iterator[Files]:
    """A server that lives within the block."""
    files = Files()
    with local_server(_Handler, files=files) as files.address:
        yield files
