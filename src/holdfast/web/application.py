"""The ASGI app: pages, the API below /api, and the guard before both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.web import searching
from holdfast.web.acting import ACTIONS
from holdfast.web.asking import Answer, Asked, answering, refused
from holdfast.web.guard import Guard
from holdfast.web.live import events
from holdfast.web.reading import READS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from holdfast import Store

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LONGEST = 1 << 20
_HERE = Path(__file__).parent


def app(
    store: Store,
    *,
    token: str | None = None,
    hosts: Collection[str] = LOOPBACK,
    read_only: bool = False,
) -> ASGIApp:
    """The viewer of a store, to be served or mounted.

    With a `token` every request must bring it; without one, whoever reaches the app may look, and
    change what can be undone, so that the app around it has to tell who may. It answers only for
    the names in `hosts` ("*" for all). With `read_only` it offers no change; a store that was
    opened read-only allows none anyway.
    """
    made = Starlette(
        routes=[
            Route("/", _page),
            Route("/api/search", searching.endpoint),
            *[Route(f"/api/{name}", answering(read)) for name, read in READS.items()],
            Route("/api/events", events),
            Route("/api/openapi.json", _description),
            *[
                Route(f"/api/{name}", _changing(act), methods=["POST"])
                for name, act in ACTIONS.items()
            ],
            Mount("/static", _Assets(directory=_HERE / "static")),
        ],
        exception_handlers={HTTPException: _unknown},
    )
    made.state.store, made.state.read_only = store, read_only
    return Guard(made, token=token, hosts=hosts)


class _Assets(StaticFiles):
    """Kept by browsers, which ask each time whether they are still the same."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


async def _unknown(request: Request, error: Exception) -> Response:
    """No such address, or not with such a method."""
    status, why = getattr(error, "status_code", 500), getattr(error, "detail", "failed")
    return refused(InvalidRequest(f"{request.method} {request.url.path}: {why}"), status)


def _page(request: Request) -> Response:  # noqa: ARG001
    return FileResponse(_HERE / "static" / "index.html")


def _description(request: Request) -> Response:  # noqa: ARG001
    return FileResponse(_HERE / "openapi.json")


def _changing(act: Callable[[Store, Asked], Any]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that changes something, by what the body says."""

    async def endpoint(request: Request) -> Response:
        if request.app.state.read_only:
            return refused(InvalidRequest("this viewer is read-only"), 403)
        try:
            asked = Asked(await _body(request))
            return Answer(await run_in_threadpool(act, request.app.state.store, asked))
        except HoldfastError as e:
            return refused(e)

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _LONGEST:
            raise InvalidRequest("the request is longer than a megabyte")
    import json

    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"the request is no JSON: {e}") from e
    if not isinstance(body, dict):
        raise InvalidRequest("the request must be a JSON object")
    return body
