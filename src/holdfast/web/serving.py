"""A viewer at an address of this machine."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from secrets import token_urlsafe
from typing import TYPE_CHECKING

import uvicorn

from holdfast.errors import Unavailable
from holdfast.web.application import LOOPBACK, app
from holdfast.web.live import ENDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from holdfast import Store


@contextmanager
def served(store: Store, *, port: int = 0, read_only: bool = False) -> Iterator[str]:
    """Serve a viewer of the store in a thread, until the end of `with`; the address to open."""
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
    """Before an address is told to anybody, so that it can be opened at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as e:
        sock.close()
        raise Unavailable(f"cannot listen at {host}:{port}: {e}", hint="try another port") from e
    return sock


class _Server(uvicorn.Server):
    """Tells pages that listen when it ends: they would be waited for, and then torn down."""

    def __init__(self, served: ASGIApp) -> None:
        self._served, self._ending = served, threading.Event()
        config = uvicorn.Config(
            self._told, interface="asgi3", log_level="warning", access_log=False,
            server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        super().__init__(config)

    async def _told(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ENDING] = self._ending
        await self._served(scope, receive, send)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)


def server_of(served: ASGIApp) -> uvicorn.Server:
    return _Server(served)
