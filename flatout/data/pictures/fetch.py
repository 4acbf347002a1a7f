"""Pictures at a URL: which may be asked for, the requests, and why one fails.

A host must be allowed by a setting. Its address must be public unless the setting has its whole name, so that rows of
strangers reach nothing in a local network (server-side request forgery).
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import string
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPSConnection, InvalidURL
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from flatout import __version__
from flatout.data.pictures.read import MAX_FILE_BYTES, URL
from flatout.errors import DataError, Fix, UsageError, reason_of

ATTEMPTS, MAX_REDIRECTS = 3, 5
# without a byte for so long, and for a whole picture
SILENT_S, WHOLE_S = 15.0, 120.0
# before the second attempt, doubled for each further one; a server may ask for up to the longest
PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# a host that failed so many pictures in a row is not asked again
_MOST_FAILURES = 16
_BLOCK_BYTES = 1 << 16
_PROXY_LOGIN = "; the proxy needs a login: set HTTPS_PROXY and HTTP_PROXY to http://USER:PASSWORD@HOST:PORT"
_BUSY = (408, 425, 429, 500, 502, 503, 504)
DIGEST_BYTES = 16
"""A downloaded picture is kept behind the xxh3-128 of its bytes."""


def downloaded(folder: Path, url: str) -> bytes:
    """Return a picture that was downloaded into this folder. Raises DataError with the reason if it was not."""
    path = download_path(folder, url)
    if path.exists():
        return path.read_bytes()[DIGEST_BYTES:]
    text, fixes = json.loads(path.with_suffix(".failed").read_text(encoding="utf-8"))
    raise DataError(text, [Fix(*fix) for fix in fixes])


def download_path(folder: Path, url: str) -> Path:
    """Return where a picture is kept; ending in .failed, the file says why there is none."""
    return folder / sha256(url.encode(errors="surrogatepass")).hexdigest()


def not_allowed(url: str, domains: Sequence[str]) -> DataError | None:
    """Return why a URL must not be downloaded where only these domains may be asked; None if it may."""
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError as error:
        return DataError(f"it is not a valid URL: {reason_of(error)}")
    if not URL.match(url) or not host or "%" in parts.netloc:
        return DataError("only http:// and https:// with a plain host are downloaded")
    if "@" in parts.netloc:
        return DataError("a URL with a password is not downloaded; remove the password")
    if any(fnmatchcase(host, domain) for domain in domains):
        return None
    allows = Fix({"data.allowed_media_domains": [*domains, host]}, "downloads from it")
    return DataError(f"{host} is not an allowed host", [allows])


class Web:
    """Reads pictures from allowed hosts, in any number of threads."""

    def __init__(self, domains: Sequence[str]) -> None:
        """Raises UsageError for a proxy in the environment that is no HTTP proxy."""
        for scheme, proxy in request.getproxies().items():
            kind, mark, _ = proxy.partition("://")
            if scheme in ("http", "https") and mark and kind.lower() != "http":
                raise UsageError(
                    f"{scheme.upper()}_PROXY names a {kind} proxy, but pictures are downloaded through HTTP proxies "
                    "only; set it to an address that begins with http://, or unset it"
                )
        self._domains, self._stops = domains, threading.Event()
        self._failures = Counter[str]()  # of each host, in a row
        handlers: list[Any] = [
            request.ProxyHandler(), _Connects(domains), _Redirects(domains), request.HTTPErrorProcessor(),
            request.HTTPDefaultErrorHandler(),
        ]  # fmt: skip
        self._opener = request.OpenerDirector()
        for handler in handlers:
            self._opener.add_handler(handler)

    def stop(self) -> None:
        """Let all threads give up."""
        self._stops.set()

    def read(self, url: str) -> bytes:
        """Return the bytes at a URL, asked for up to ATTEMPTS times. Raises DataError."""
        if refused := not_allowed(url, self._domains):
            raise refused
        host, pause_s = urlsplit(url).netloc.lower(), 0.0
        for attempt in range(ATTEMPTS):
            if self._failures[host] >= _MOST_FAILURES:
                raise DataError(f"{host} failed {_MOST_FAILURES} pictures in a row, so it is not asked again")
            if self._stops.wait(pause_s):
                raise DataError("the build was stopped")
            pause_s = PAUSE_S * 2**attempt
            try:
                content = self._bytes_of(url)
                self._failures[host] = 0
                return content
            except HTTPError as error:
                with error:
                    why, after = _said(error), error.headers.get("Retry-After", "")
                if error.code not in _BUSY:
                    raise DataError(why) from None
                pause_s = min(float(after), _LONGEST_PAUSE_S) if after.isascii() and after.isdigit() else pause_s
            except (OSError, HTTPException, ValueError) as error:
                why, is_final = _broken(error)
                if is_final:
                    raise DataError(why) from None
        self._failures[host] += 1
        raise DataError(f"{why} ({ATTEMPTS} attempts); build again, or remove the row")

    def _bytes_of(self, url: str) -> bytes:
        until_s, content = time.monotonic() + WHOLE_S, bytearray()
        asked = request.Request(_quoted(url), headers={"User-Agent": f"flatout/{__version__}", "Accept": "image/*"})
        with self._opener.open(asked, timeout=SILENT_S) as response:
            length = response.headers.get("Content-Length", "")
            expected = int(length) if length.isascii() and length.isdigit() else 0
            while max(expected, len(content)) <= MAX_FILE_BYTES and (block := response.read1(_BLOCK_BYTES)):
                content += block
                if self._stops.is_set() or time.monotonic() > until_s:
                    raise TimeoutError
        if max(expected, len(content)) > MAX_FILE_BYTES:
            raise DataError(f"its file has over {MAX_FILE_BYTES >> 20} MiB; resize it")
        if len(content) < expected:
            raise ConnectionError
        return bytes(content)


def _quoted(url: str) -> str:
    """Return a URL as it is sent: browsers also take letters and spaces that it must not hold."""
    parts = urlsplit(url.strip())
    if not parts.netloc.isascii():
        parts = parts._replace(netloc=parts.netloc.encode("idna").decode())
    return quote(parts._replace(fragment="").geturl(), safe=string.punctuation)


def _said(error: HTTPError) -> str:
    if error.code in range(300, 400):
        return f"{error.code}, a redirect that is not followed: only to http(s), and at most {MAX_REDIRECTS} times"
    hint = {404: "; check the URL", 410: "; check the URL", 401: "; it needs a login", 403: "; it needs a login"}
    hint[407] = _PROXY_LOGIN
    return f"the server answers {error.code} {error.reason}{hint.get(error.code, '')}"


def _broken(error: Exception) -> tuple[str, bool]:
    """Return why a download failed, and whether it would fail again."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(error, URLError) and (proxy := error.filename):
        why, is_final = _broken(reason if isinstance(reason, Exception) else OSError(reason))
        is_refused = why.startswith("Tunnel connection failed: 4")
        return f"proxy {proxy}: {why}{_PROXY_LOGIN * (' 407 ' in why)}", is_final or is_refused
    if isinstance(reason, TimeoutError):
        return f"no answer within {SILENT_S:g} s, or not all of it within {WHOLE_S:g} s", False
    if isinstance(reason, ssl.SSLCertVerificationError):
        own = "; if a network or a server has a CA of its own, set SSL_CERT_FILE to its PEM file"
        return f"its certificate is not valid: {reason.verify_message}{own}", True
    if isinstance(reason, ssl.SSLError):
        return f"no TLS connection could be made ({reason.reason}); check whether the server is meant for https", False
    if isinstance(reason, socket.gaierror):
        return "there is no such host", reason.errno != socket.EAI_AGAIN
    if isinstance(reason, ConnectionRefusedError):
        return "the server refuses the connection", False
    if isinstance(reason, ValueError | InvalidURL):
        return f"it is not a valid URL: {reason_of(reason)}", True
    if isinstance(reason, HTTPException | ConnectionError):
        return "the connection was cut", False
    return reason_of(reason) if isinstance(reason, BaseException) else reason, False


def _require_public(host: str, address: str) -> None:
    """Raise DataError for an address of this machine, of a local network, or of none."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if not ip.is_global:
        raise DataError(
            f"{host} is at {ip}, which is not a public address; to allow this host, name it in full in "
            "data.allowed_media_domains"
        )


def _require_public_name(host: str, port: int) -> None:
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        _require_public(host, str(address[0]))


class _PublicPeer:
    """A connection that is refused before a request is sent, unless it is to a public address."""

    host: str
    port: int
    sock: socket.socket

    def connect(self) -> None:
        _require_public_name(self.host, self.port)
        super().connect()  # type: ignore[misc]  # of the connection that this is mixed into
        _require_public(self.host, self.sock.getpeername()[0])  # the name may have moved since


class _PublicHttp(_PublicPeer, HTTPConnection):
    pass


class _PublicHttps(_PublicPeer, HTTPSConnection):
    pass


class _Connects(request.AbstractHTTPHandler):
    """Connects to public addresses, and to hosts that are allowed by their whole name."""

    http_request = https_request = request.AbstractHTTPHandler.do_request_

    def __init__(self, domains: Sequence[str]) -> None:
        super().__init__()
        self._domains, self._context = domains, ssl.create_default_context()

    def http_open(self, req: request.Request) -> Any:
        return self._open(_PublicHttp if self._must_be_public(req) else HTTPConnection, req)

    def https_open(self, req: request.Request) -> Any:
        kind = _PublicHttps if self._must_be_public(req) else HTTPSConnection
        return self._open(partial(kind, context=self._context), req)

    def _open(self, kind: Any, req: request.Request) -> Any:
        """Send a request. Raises URLError, with the proxy as its filename if the request goes through one."""
        try:
            return self.do_open(kind, req)
        except URLError as error:
            is_of_proxy = _is_proxied(req) and not isinstance(error.reason, ssl.SSLError)
            raise URLError(error.reason, req.host if is_of_proxy else None) from error

    def _must_be_public(self, req: request.Request) -> bool:
        parts = urlsplit(req.full_url)
        is_proxied, host = _is_proxied(req), parts.hostname or ""
        if is_proxied and host not in self._domains:
            with suppress(socket.gaierror):  # names that only the proxy knows
                _require_public_name(host, parts.port or 80)
        return not is_proxied and host not in self._domains


def _is_proxied(req: request.Request) -> bool:
    return req.host != urlsplit(req.full_url).netloc


class _Redirects(request.HTTPRedirectHandler):
    """Follows redirects to allowed hosts."""

    max_redirections = MAX_REDIRECTS

    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = domains

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if refused := not_allowed(newurl, self._domains):
            raise refused.at("it is redirected")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
