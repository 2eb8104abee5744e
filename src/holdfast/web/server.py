"""The viewer as an ASGI app, and a server for it.

The app has the page, the API below /api, and a guard in front of both.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, cast

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast import Store
from holdfast.errors import HoldfastError, InvalidRequest, Unavailable
from holdfast.web import search
from holdfast.web.api import ACTIONS, READS
from holdfast.web.auth import Guard
from holdfast.web.events import ENDING, Feed, events
from holdfast.web.params import error_answer, get_endpoint, post_endpoint

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HERE = Path(__file__).parent


def app(
    store: Store,
    *,
    token: str | None = None,
    hosts: Collection[str] = LOOPBACK,
    read_only: bool = False,
) -> ASGIApp:
    """Return the viewer of a store as an ASGI app, to serve or to mount.

    With a `token`, every request must contain it. Without one, anybody who reaches the app may read
    the store and make changes that can be undone, so the app around it must check access. The app
    answers only for the host names in `hosts` ("*" for all). With `read_only`, it offers no
    changes; a store that was opened read-only allows none anyway.
    """
    made = Starlette(
        routes=[
            Route("/", _page),
            Route("/api/search", search.endpoint),
            *[Route(f"/api/{name}", get_endpoint(read)) for name, read in READS.items()],
            Route("/api/events", events),
            Route("/api/openapi.json", _description),
            *[
                Route(f"/api/{name}", post_endpoint(act), methods=["POST"])
                for name, act in ACTIONS.items()
            ],
            Mount("/static", _Assets(directory=_HERE / "static")),
        ],
        exception_handlers={HTTPException: _http_error, HoldfastError: _error},
    )
    made.state.store, made.state.read_only = store, read_only
    made.state.feed = Feed(store)
    return Guard(made, token=token, hosts=hosts)


class _Assets(StaticFiles):
    """Static files. Browsers keep them, and ask each time whether they changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown address, or with a method that it does not have."""
    status, why = getattr(error, "status_code", 500), getattr(error, "detail", "failed")
    return error_answer(InvalidRequest(f"{request.method} {request.url.path}: {why}"), status)


async def _error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return error_answer(cast("HoldfastError", error))


def _page(request: Request) -> Response:  # noqa: ARG001
    return FileResponse(_HERE / "static" / "index.html")


def _description(request: Request) -> Response:  # noqa: ARG001
    return FileResponse(_HERE / "openapi.json")


@contextmanager
def served(store: Store, *, port: int = 0, read_only: bool = False) -> Iterator[str]:
    """Serve the viewer of a store in a thread until the end of `with`. Yield its address."""
    token = token_urlsafe(24)
    with listen(LOOPBACK[1], port) as sock:
        server = server_of(app(store, token=token, read_only=read_only))
        thread = threading.Thread(target=server.run, args=([sock],), name="holdfast viewer")
        thread.start()
        try:
            yield f"http://{LOOPBACK[1]}:{sock.getsockname()[1]}/?token={token}"
        finally:
            server.should_exit = True
            thread.join()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. An address can be opened from then on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol, asyncio leaves Nagle's algorithm on, which delays a request by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as e:
        sock.close()
        raise Unavailable(f"cannot listen at {host}:{port}: {e}", hint="try another port") from e
    return sock


class _Protocol(H11Protocol):
    """Closes a connection whose request does not arrive in time. uvicorn would wait forever."""

    arrival = 20.0
    """Seconds for a whole request, and for the first one to begin."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()

    def _set_timer(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.arrival, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """Ends the event streams when it shuts down. uvicorn would wait, and then abort them."""

    def __init__(self, served: ASGIApp) -> None:
        self._served, self._ending = served, asyncio.Event()
        config = uvicorn.Config(
            self._with_ending, interface="asgi3", http=_Protocol, ws="none", log_level="warning",
            access_log=False, server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        super().__init__(config)

    async def _with_ending(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ENDING] = self._ending
        await self._served(scope, receive, send)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)


def server_of(served: ASGIApp) -> uvicorn.Server:
    """Return a server for the app; its run() serves until the process is interrupted."""
    return _Server(served)
