"""What a request asks for, checked; and how what went wrong is answered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from holdfast import shapes
from holdfast.blame import parse_path
from holdfast.errors import (
    Conflict,
    Corrupt,
    HoldfastError,
    InvalidRequest,
    NotFound,
    NotSerializable,
    SessionNotFound,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from holdfast import Checkpoint, Session, Store

MOST = 1_000
"""Rows that one answer holds at most."""
STATUS: tuple[tuple[type[HoldfastError], int], ...] = (
    (NotFound, 404),
    (Conflict, 409),
    (InvalidRequest, 400),
    (NotSerializable, 400),
    (Unavailable, 503),
    (Corrupt, 500),
)


class Answer(Response):
    """JSON, in the exact rendering of values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return shapes.dumps(content).encode()


def refused(error: HoldfastError, status: int | None = None) -> Response:
    """The same as the command line prints with --json."""
    if status is None:
        status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    told = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    return Answer(told, status)


def answering(function: Callable[[Store, Asked], Any]) -> Callable[[Request], Response]:
    """An endpoint, which starlette runs in a thread."""

    def endpoint(request: Request) -> Response:
        try:
            state = request.app.state
            return Answer(
                function(state.store, Asked(request.query_params, read_only=state.read_only))
            )
        except HoldfastError as e:
            return refused(e)

    return endpoint


class Asked:
    """The parameters of a request. Names of sessions are any text, so that all are parameters."""

    def __init__(self, given: Any, *, read_only: bool = False) -> None:
        self._given, self.read_only = given, read_only

    def text(self, name: str) -> str:
        found = self.maybe(name)
        if found is None:
            raise InvalidRequest(f"{name} is missing")
        return found

    def maybe(self, name: str) -> str | None:
        found = self._given.get(name)
        if found is not None and not isinstance(found, str):
            raise InvalidRequest(f"{name} must be text, not {found!r}")
        return found or None

    def number(self, name: str, default: int, most: int = MOST) -> int:
        found = self.maybe(name)
        if found is None:
            return default
        if not (found.isascii() and found.isdecimal()) or len(found) > 15:
            raise InvalidRequest(f"{name} must be a number from 0 on, not {found[:40]!r}")
        return min(int(found), most)

    def value(self, name: str) -> Any:
        """Any JSON."""
        if name not in self._given:
            raise InvalidRequest(f"{name} is missing")
        return self._given[name]

    def pair(self, name: str) -> dict[str, Any] | None:
        """KEY=VALUE, where the value is JSON if it is some, else the text itself."""
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
        """Where in a state: a JSON list, or keys with dots between them."""
        text = self.maybe(name)
        if text is None:
            return ()
        if not text.startswith("["):
            return parse_path(text)
        try:
            steps = json.loads(text)
        except (ValueError, RecursionError):
            steps = None
        if not isinstance(steps, list) or not all(type(s) in (str, int) for s in steps):
            raise InvalidRequest(f"{name} must be a list of keys and numbers")
        return tuple(steps)

    def session(self, store: Store) -> Session:
        name = self.text("session")
        session = store.session(name)
        if not session.exists():
            raise SessionNotFound(f"there is no session {name!r}")
        return session

    def checkpoint(self, store: Store, name: str = "id") -> Checkpoint:
        return store.get(self.text(name))
