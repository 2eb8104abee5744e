"""The store behind an adapter, and how asyncio reaches it."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from holdfast.errors import InvalidRequest
from holdfast.store import Store
from holdfast.store import open as open_store
from holdfast.workers import Lane, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")

_WORKERS = 16


class Host:
    """A store that was given, and stays open; or a URL, which is opened, and closed with this.

    Several adapters may share one Host.
    """

    def __init__(self, store: Store | str | os.PathLike[str]) -> None:
        if isinstance(store, (str, os.PathLike)):
            self.store, self._opened = open_store(store), True
        elif isinstance(store, Store):
            self.store, self._opened = store, False
        else:
            raise InvalidRequest(
                f"a store or a URL is wanted, not {type(store).__name__}",
                hint='pass holdfast.open("agents.db"), or the path itself',
            )
        self._workers = Workers(_WORKERS)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it in a worker. If this is cancelled, a call that has begun comes to its end."""
        return await self._workers.call(function, *args, **kwargs)

    def lane(self) -> Lane:
        """Calls that run one after the other."""
        return Lane(self._workers)

    def close(self) -> None:
        """Where no loop is running. Idempotent."""
        if self._opened:
            self.store.close()

    async def aclose(self) -> None:
        """Calls made before are finished; later ones raise InvalidRequest. Idempotent."""
        await self._workers.close(self.close)


class Closing(ABC):
    """What closes at the end of `with` or `async with`."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class Hosted(Closing):
    """An adapter on a store of its own, or on one that was given."""

    host: Host

    @property
    def store(self) -> Store:
        return self.host.store

    def close(self) -> None:
        """Close the store if it was opened here. Where no loop is running. Idempotent."""
        self.host.close()

    async def aclose(self) -> None:
        """Close the store if it was opened here, when calls made before are finished."""
        await self.host.aclose()


async def finished(call: Coroutine[Any, Any, T]) -> T:
    """Wait for the end of a call also when cancelled, even one that has not begun yet."""
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
