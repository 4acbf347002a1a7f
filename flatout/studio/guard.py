"""Who may talk to studio: a browser on this machine that has the token, from a page of studio itself."""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-flatout-token"
_HEADERS = {
    # styles of single elements position the labels of charts; scripts and style sheets are files of studio
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "style-src-attr 'unsafe-inline'; img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Refuses every request that does not prove where it comes from, with 403 and one sentence.

    The Host header must name this address, or a page whose name was pointed at 127.0.0.1 could read the answers (DNS
    rebinding). A request that changes something must come from a page of studio (Origin), or carry the token in a
    header, which no other site can set.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.cookie = f"flatout-studio-{port}"  # cookies do not distinguish ports, and two studios may run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(request)
        if refusal is not None:
            await PlainTextResponse(refusal + "\n", 403)(scope, receive, send_with_headers)
            return
        scope["studio_cookie"] = (self.cookie, self._token)
        await self._app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> str | None:
        """Return why a request is refused; None if it is not."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return f"This is flatout studio at {min(self._hosts)}; the request was for another host."
        in_header = self._is_token(request.headers.get(HEADER))
        in_cookie = self._is_token(request.cookies.get(self.cookie))
        at_entry = request.url.path == "/" and self._is_token(request.query_params.get("token"))
        if not (in_header or in_cookie or at_entry):
            return "This page needs the token; open the address that `flatout studio` printed."
        if origin is not None and origin != f"http://{host}":
            return "The request comes from a page of another site; use the pages of flatout studio."
        if request.method not in ("GET", "HEAD") and origin is None and not in_header:
            return "The request does not say which page it comes from; use the pages of flatout studio."
        return None

    def _is_token(self, token: str | None) -> bool:
        return token is not None and secrets.compare_digest(token.encode(), self._token.encode())
