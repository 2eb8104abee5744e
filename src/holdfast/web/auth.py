"""Access: every request is checked here, before any other code handles it.

- The Host must be one of ours. Otherwise a web page could let its own name point to this machine.
- With a token, every request must contain it: in a cookie, or as `Authorization: Bearer`. The
  address that `serve` prints exchanges the token for the cookie.
- A request that changes something must come from our own page (Origin), or contain the token as a
  bearer, which no other page can make a browser send.

The headers of every answer allow only our own scripts, and no frames.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "holdfast"
SAFE = ("GET", "HEAD")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


_LOCKED_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>holdfast</title></head>
<body>
<h1>holdfast</h1>
<p>This viewer needs its token. Open the address that <code>holdfast serve</code> has printed: it
ends with <code>?token=…</code>.</p>
<p>A viewer that was started again has another token, unless it was given one by
<code>--auth-token</code>.</p>
</body>
</html>
"""
"""The page for a browser without the token. It reveals nothing about the store."""


class Guard:
    """An ASGI app that checks each request, and passes the allowed ones to another app."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str]) -> None:
        self._app, self._token, self._hosts = app, token, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope)
        if answer is not None and answer.status_code == 401 and _wants_page(scope):
            answer = Response(_LOCKED_PAGE, 401, media_type="text/html")
        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that is not allowed, or None if it is allowed."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_ours(host):
            return _refuse(400, "WrongHost", f"this server does not answer for {host!r}")
        bearer = self._bearer(headers)
        if (exchange := self._exchange(scope, headers)) is not None:
            return exchange
        if self._token is not None and not bearer and not self._cookie(headers):
            return _refuse(401, "NoToken", "open the address that `holdfast serve` has printed")
        if scope["method"] not in SAFE and not bearer:
            try:
                origin = urlsplit(headers.get("origin", ""))
            except ValueError:  # such as http://[::1
                return _refuse(400, "WrongOrigin", "the Origin is no address")
            if origin.scheme not in ("http", "https") or origin.netloc.lower() != host.lower():
                return _refuse(403, "WrongOrigin", "a change must come from the viewer's own page")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        return name is not None and ("*" in self._hosts or name.lower() in self._hosts)

    def _bearer(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self._is_token(given.strip())

    def _cookie(self, headers: Headers) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(headers))
        except CookieError:
            return False
        return found is not None and self._is_token(unquote(found.value))

    def _is_token(self, given: str) -> bool:
        wanted = self._token
        return wanted is not None and hmac.compare_digest(given.encode(), wanted.encode())

    def _exchange(self, scope: Scope, headers: Headers) -> Response | None:
        """Return a redirect from an address with the token, which sets the cookie, or None."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), "")
        if scope["method"] != "GET" or not self._is_token(given):
            return None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        path = scope.get("root_path", "").rstrip("/") + "/"
        target = path + (f"?{rest}" if rest else "")
        answer: Response = RedirectResponse(target, 303)
        if headers.get("sec-fetch-site") == "cross-site":
            # The user followed a link on another site. The redirect would count as a request of
            # that site, and be sent without the cookie. A refresh counts as a request of our page.
            answer = Response("Opening the viewer…", headers={"refresh": f"0; url={target}"})
        name, secure = _cookie_name(headers), scope.get("scheme") == "https"
        answer.set_cookie(
            name, quote(given, safe=""), path=path, httponly=True, samesite="strict", secure=secure
        )
        return answer


def _cookie_name(headers: Headers) -> str:
    """Return the name of the cookie. It contains the port, because all ports share cookies."""
    return f"{COOKIE}-{urlsplit('//' + headers.get('host', '')).port or 80}"


def _wants_page(scope: Scope) -> bool:
    """Return whether a browser asks for a page, to show it to a person."""
    below = scope["path"].removeprefix(scope.get("root_path", ""))
    accept = Headers(scope=scope).get("accept", "")
    return scope["method"] in SAFE and not below.startswith("/api/") and "text/html" in accept


def _refuse(status: int, error: str, message: str) -> Response:
    shape = {"error": error, "message": message, "hint": None, "exit_code": 1}
    return JSONResponse(shape, status)
