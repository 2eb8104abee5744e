"""The store behind an adapter, calls from asyncio, and helpers that several adapters need."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from itertools import chain, takewhile
from typing import Any, ParamSpec, Self, TypeVar

import holdfast
from holdfast import Checkpoint, Session, SessionInfo, Store
from holdfast.aio import Lane, Workers
from holdfast.errors import InvalidRequest, NotFound

P = ParamSpec("P")
T = TypeVar("T")

_WORKERS = 16


class Host:
    """The store of an adapter, and the worker threads that call it for asyncio.

    A store that is passed in stays open. A URL is opened, and closed together with the Host.
    `workers` are those of another Host, which closes them.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], workers: Workers | None = None
    ) -> None:
        if isinstance(store, (str, os.PathLike)):
            self.store, self._opened = holdfast.open(store), True
        elif isinstance(store, holdfast.Store):
            self.store, self._opened = store, False
        else:
            raise InvalidRequest(
                f"a store or a URL is wanted, not {type(store).__name__}",
                hint='pass holdfast.open("agents.db"), or the path itself',
            )
        self._workers, self._lent = workers or Workers(_WORKERS), workers is not None

    def lent(self) -> Host:
        """Return a Host with the same store and workers, which closes neither."""
        return Host(self.store, self._workers)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a worker and return its result.

        If this is cancelled while the function runs, the function completes first.
        """
        return await self._workers.call(function, *args, **kwargs)

    def lane(self) -> Lane:
        """Return a Lane: its calls run one after the other."""
        return Lane(self._workers)

    def close(self) -> None:
        """Close the store if it was opened here. Use it where no event loop runs. Idempotent."""
        if self._opened:
            self.store.close()

    async def aclose(self) -> None:
        """Finish earlier calls, refuse later ones with InvalidRequest, then close(). Idempotent."""
        if not self._lent:
            await self._workers.close(self.close)


class Hosted:
    """An adapter with a Host. `with` or `async with` closes it at the end."""

    host: Host

    @property
    def store(self) -> Store:
        return self.host.store

    def close(self) -> None:
        """Close the store if it was opened here. Use it where no event loop runs. Idempotent."""
        self.host.close()

    async def aclose(self) -> None:
        """Finish earlier calls, then close the store if it was opened here. Idempotent."""
        await self.host.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


async def finished(call: Coroutine[Any, Any, T]) -> T:
    """Await a call. If this is cancelled, even before the call has begun, the call completes."""
    task = asyncio.ensure_future(call)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()


def retried_on(*errors: type[Exception]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function start again when it raises one of these: another writer came first."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            while True:
                with suppress(*errors):
                    return function(*args, **kwargs)

        return run

    return decorate


# -- reading sessions ------------------------------------------------------------------------------


def read_head(session: Session) -> tuple[Checkpoint | None, Any]:
    """Return the head and its state, or twice None. The next save expects this head."""
    while (head := session.refresh()) is not None:
        with suppress(NotFound):  # deleted after refresh(): look again
            return head, session.load(head)
    return None, None


def sessions_below(store: Store, prefix: str) -> Iterator[SessionInfo]:
    """Yield the sessions whose names begin with a prefix and are longer than it, by name."""
    return takewhile(lambda s: s.name.startswith(prefix), store.sessions(after=prefix or None))


def find_meta(
    session: Session, checkpoint: Checkpoint, key: str
) -> tuple[Checkpoint, Mapping[str, Any]] | None:
    """Return a dict in the meta of a checkpoint, and the checkpoint.

    The first checkpoint of a fork may have none; then it is that of the fork's origin.
    """
    for each in chain([checkpoint], session.history(checkpoint)):
        found = each.meta.get(key)
        if isinstance(found, Mapping):
            return each, found
        if each.operation != "fork":
            return None
    return None


def foreign_session(session: Session, kind: str, argument: str) -> InvalidRequest:
    """Return the error for a session that holds other data than this adapter's."""
    return InvalidRequest(
        f"session {session.name!r} is no {kind}", hint=f"use another {argument}, or another store"
    )


# -- data of other libraries -----------------------------------------------------------------------


def value_at(data: Any, *keys: str) -> Any:
    """Return data[key][key]…, or None where there is no such value."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def list_of_dicts(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the value as a new list. Raises InvalidRequest if it is not a list of dicts."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"{name} must be a list of dicts")
    return [*value]
