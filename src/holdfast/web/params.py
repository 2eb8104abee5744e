"""Endpoints: read the parameters of a request, call a function, and answer with JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast import Checkpoint, Session, Store
from holdfast import json as holdfast_json
from holdfast.errors import (
    Conflict,
    Corrupt,
    HoldfastError,
    InvalidRequest,
    NotFound,
    NotSerializable,
    SessionNotFound,
    TooBig,
    Unavailable,
)

MOST = 1_000
"""Rows in one answer, at most."""
HIGHEST = 1 << 40
"""A number higher than any seq or position."""
STATUS: tuple[tuple[type[HoldfastError], int], ...] = (
    (NotFound, 404),
    (Conflict, 409),
    (InvalidRequest, 400),
    (NotSerializable, 400),
    (TooBig, 413),
    (Unavailable, 503),
    (Corrupt, 500),
)
_LONGEST_BODY = 1 << 20


class Answer(Response):
    """A response with JSON, in the exact rendering of values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return holdfast_json.dumps(content).encode()


def error_answer(error: HoldfastError, status: int | None = None) -> Answer:
    """Return an error as the command line prints it with --json."""
    if status is None:
        status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    shape = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    return Answer(shape, status)


def get_endpoint(read: Callable[[Store, Params], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that reads. Its parameters are in the address."""

    def endpoint(request: Request) -> Response:  # starlette runs it in a thread
        state = request.app.state
        return Answer(read(state.store, Params(request.query_params, read_only=state.read_only)))

    return endpoint


def post_endpoint(act: Callable[[Store, Params], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that changes something. Its parameters are the body, a JSON object."""

    async def endpoint(request: Request) -> Response:
        if request.app.state.read_only:
            return error_answer(InvalidRequest("this viewer is read-only"), 403)
        try:
            params = Params(await _body(request))
        except ClientDisconnect:
            return error_answer(InvalidRequest("the request was not sent to its end"))
        return Answer(await run_in_threadpool(act, request.app.state.store, params))

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _LONGEST_BODY:
            raise InvalidRequest("the request is longer than a megabyte")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"the request is no JSON: {e}") from e
    if not isinstance(body, dict):
        raise InvalidRequest("the request must be a JSON object")
    return body


class Params:
    """The parameters of a request. Every method raises InvalidRequest for an invalid parameter.

    Names of sessions can be any text, so they are parameters and no part of a path.
    """

    def __init__(self, given: Any, *, read_only: bool = False) -> None:
        self._given, self.read_only = given, read_only

    def text(self, name: str) -> str:
        found = self.maybe(name)
        if found is None:
            raise InvalidRequest(f"{name} is missing")
        return found

    def maybe(self, name: str) -> str | None:
        """Return a text; None if it is missing or empty."""
        found = self._given.get(name)
        if found is not None and not isinstance(found, str):
            raise InvalidRequest(f"{name} must be text, not {found!r}")
        return found or None

    def number(self, name: str, default: int, most: int = MOST) -> int:
        """Return a number from 0 on. A number above `most` counts as `most`."""
        found = self.maybe(name)
        if found is None:
            return default
        if not (found.isascii() and found.isdecimal()) or len(found) > 15:
            raise InvalidRequest(f"{name} must be a number from 0 on, not {found[:40]!r}")
        return min(int(found), most)

    def value(self, name: str) -> Any:
        """Return any JSON."""
        if name not in self._given:
            raise InvalidRequest(f"{name} is missing")
        return self._given[name]

    def pair(self, name: str) -> dict[str, Any] | None:
        """Return KEY=VALUE as a dict. A value that is not JSON is a text."""
        text = self.maybe(name)
        if text is None:
            return None
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidRequest(f"{name} must be KEY=VALUE, not {text[:40]!r}")
        try:
            return {key: json.loads(value)}
        except (ValueError, RecursionError):
            return {key: value}

    def path(self, name: str = "path") -> tuple[str | int, ...]:
        """Return a path in a state: a JSON list, or keys with dots between them."""
        text = self.maybe(name)
        if text is None:
            return ()
        if not text.startswith("["):
            return holdfast_json.path(text)
        try:
            steps = json.loads(text)
        except (ValueError, RecursionError):
            parsed = holdfast_json.path(text)  # such as ['a.b'].c
            steps = None if str(parsed[0]).startswith("[") else [*parsed]
        if not isinstance(steps, list) or not all(type(s) in (str, int) for s in steps):
            raise InvalidRequest(f"{name} must be a list of keys and numbers")
        return tuple(steps)

    def session(self, store: Store) -> Session:
        """Return a session that exists. Raises SessionNotFound if it does not."""
        name = self.text("session")
        session = store.session(name)
        if not session.exists():
            raise SessionNotFound(f"there is no session {name!r}")
        return session

    def checkpoint(self, store: Store, name: str = "id") -> Checkpoint:
        return store.get(self.text(name))
