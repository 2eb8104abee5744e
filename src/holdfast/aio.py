"""The same API for asyncio: `async with holdfast.aopen("agent.db") as store:`.

This is the sync core behind threads of its own, at most `workers` of them for each store. The loop
never waits for the disk, and a store may serve several loops in several threads at once. What goes
beyond Store and Session:

- The calls of one handle that write, or move its expected head, run one after the other in the
  order in which they were made. However many wait, they take one worker.
- A call that is cancelled before a worker began it never runs. One that runs is finished first;
  only then is CancelledError raised, with the call's own error, if it failed, as its cause. Either
  way the handle knows what was written, and the next save works. So a timeout waits for a commit.
- A state is encoded in a worker: do not change it while its save is awaited.
- Context variables are visible in workers. What is called back (`progress` of gc) runs in one.
- Iterators fetch a page at a time, when it is needed. What reads before it returns is awaited, so
  also `session = await store.session(…)` and `async for event in await session.watch()`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

from holdfast.aruns import AsyncConversation, AsyncRun
from holdfast.errors import InvalidRequest
from holdfast.logs import logger
from holdfast.runs.handles import NOT_RESUMED
from holdfast.runs.run import RunCore
from holdfast.session import Session
from holdfast.store import Store
from holdfast.store import open as open_store
from holdfast.watching import Watcher
from holdfast.workers import Lane, Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator

    from holdfast.checkpoint import Checkpoint
    from holdfast.model import ToolCall
    from holdfast.retention import Retention
    from holdfast.session import Revision
    from holdfast.transfer import Transferred
    from holdfast.watching import Event

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_PAGE = 64


def aopen(
    url: str | os.PathLike[str],
    *,
    create: bool | None = None,
    read_only: bool = False,
    durability: Literal["full", "normal"] = "full",
    cache_bytes: int = 64 << 20,
    timeout: float = 30.0,
    retention: Retention | None = None,
    schema: str | None = None,
    pool_size: int | None = None,
    workers: int = 32,
) -> Opening:
    """Open a store for asyncio: `async with aopen(…) as store`, or `store = await aopen(…)`.

    The options are those of open(). At most `workers` calls run at once; others wait their turn.
    """
    if type(workers) is not int or workers < 1:
        raise InvalidRequest(f"workers must be a number from 1 on, not {workers!r}")
    make = functools.partial(
        open_store, url, create=create, read_only=read_only, durability=durability,
        cache_bytes=cache_bytes, timeout=timeout, retention=retention, schema=schema,
        pool_size=pool_size,
    )  # fmt: skip
    return Opening(make, workers)


class Opening:
    """A store that opens when this is awaited or entered."""

    def __init__(self, make: Callable[[], Store], workers: int) -> None:
        self._make, self._count = make, workers

    def __await__(self) -> Generator[Any, None, AsyncStore]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncStore:
        self._store = await self
        return self._store

    async def __aexit__(self, *error: object) -> None:
        await self._store.close()

    async def _open(self) -> AsyncStore:
        workers, opened = Workers(self._count), ExitStack()
        try:
            store = await workers.call(lambda: opened.enter_context(self._make()))
        except BaseException:
            await workers.close(opened.close)  # it may be open, but nobody has it
            raise
        return AsyncStore(store, workers)


# -- what users hold in their hands --------------------------------------------------------------


class _Mirror(Generic[S]):
    """Stands for `sync`, an object of the sync API, which code that may block is free to use."""

    def __init__(self, sync: S, workers: Workers) -> None:
        self.sync, self._workers, self._lane = sync, workers, Lane(workers)

    def __repr__(self) -> str:
        return f"<Async{repr(self.sync)[1:]}"

    async def watch(
        self, *, interval: float = 0.1, patience: float | None = None
    ) -> AsyncIterator[Event]:
        """Checkpoints and operations as they land from now on, whoever makes them.

        Ends after `patience` seconds without any, and when the store is closed.
        """
        return self._follow(await self._workers.call(self._watcher), interval, patience)

    def _watcher(self) -> Watcher:
        raise NotImplementedError

    async def _follow(
        self, watcher: Watcher, interval: float, patience: float | None
    ) -> AsyncIterator[Event]:
        """As Watcher.follow(), but no worker sleeps."""
        heard = time.monotonic()
        with suppress(InvalidRequest):  # closed
            while True:
                news = await self._workers.call(watcher.poll)
                for event in news:
                    yield event
                if news:
                    heard = time.monotonic()
                elif patience is not None and time.monotonic() - heard >= patience:
                    return
                else:
                    await asyncio.sleep(interval)


def _awaited(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[_Mirror[S], P], Coroutine[Any, Any, T]]:
    """The same method, by its name (`sync` may be of a subclass), run by a worker."""

    @functools.wraps(method)
    async def call(self: _Mirror[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._workers.call(getattr(self.sync, method.__name__), *args, **kwargs)

    return call


def _in_turn(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[_Mirror[S], P], Coroutine[Any, Any, T]]:
    """The same method, run by a worker after those that were called before it."""

    @functools.wraps(method)
    async def call(self: _Mirror[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._lane.call(getattr(self.sync, method.__name__), *args, **kwargs)

    return call


def _paged(
    method: Callable[Concatenate[S, P], Iterator[T]],
) -> Callable[Concatenate[_Mirror[S], P], AsyncIterator[T]]:
    """The same iterator, a page at a time."""

    async def pages(workers: Workers, source: Iterator[T]) -> AsyncIterator[T]:
        while page := await workers.call(lambda: list(islice(source, _PAGE))):
            for item in page:
                yield item

    @functools.wraps(method)
    def call(self: _Mirror[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return pages(self._workers, getattr(self.sync, method.__name__)(*args, **kwargs))

    return call


class AsyncStore(_Mirror[Store]):
    """A Store whose methods are awaited. Made by aopen(); closes at the end of `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent. Calls made before are finished; later ones raise InvalidRequest."""
        await self._workers.close(self.sync.close)

    async def session(
        self, name: str, *, agent: str | None = None, parent: str | Session | None = None
    ) -> AsyncSession:
        """A handle on the session of this name. Nothing is written until the first save."""
        session = await self._workers.call(self.sync.session, name, agent=agent, parent=parent)
        return AsyncSession(session, self._workers)

    def _watcher(self) -> Watcher:
        return Watcher(self.sync.backend)

    get = _awaited(Store.get)
    sessions = _paged(Store.sessions)
    find = _paged(Store.find)
    verify = _awaited(Store.verify)
    gc = _awaited(Store.gc)
    prune = _awaited(Store.prune)
    repair = _awaited(Store.repair)
    stats = _awaited(Store.stats)
    backup = _awaited(Store.backup)
    export = _awaited(Store.export)
    import_ = _awaited(Store.import_)
    pending = _awaited(Store.pending)
    abandoned = _awaited(Store.abandoned)

    async def resume_all(
        self, fn: Callable[[AsyncRun], Awaitable[Any]], **options: Any
    ) -> list[str]:
        """Resume each abandoned run by `await fn(run)`, one by one; see Store.resume_all."""
        done = []
        for each in await self.abandoned():
            run = (await self.session(each.session)).run(resume=True, **options)
            stack = AsyncExitStack()
            try:
                await stack.enter_async_context(run)
            except NOT_RESUMED as e:
                logger.warning("session %r is not resumed here: %s", each.session, e.message)
                continue
            try:
                async with stack:
                    await fn(run)
            except Exception:  # noqa: BLE001 - the others are to be resumed all the same
                logger.exception("resuming session %r failed", each.session)
            done.append(each.session)
        return done

    @functools.wraps(Store.copy)
    async def copy(self, other: AsyncStore | Store, **options: Any) -> Transferred:
        target = other.sync if isinstance(other, AsyncStore) else other
        return await self._workers.call(self.sync.copy, target, **options)


class AsyncSession(_Mirror[Session]):
    """A Session whose methods are awaited, and its properties head and step with them."""

    @property
    def name(self) -> str:
        return self.sync.name

    @property
    def agent(self) -> str | None:
        return self.sync.agent

    save = _in_turn(Session.save)
    append = _in_turn(Session.append)
    patch = _in_turn(Session.patch)
    rewind = _in_turn(Session.rewind)
    tag = _in_turn(Session.tag)
    label = _in_turn(Session.label)
    delete = _in_turn(Session.delete)
    prune = _in_turn(Session.prune)
    undo = _in_turn(Session.undo)
    redo = _in_turn(Session.redo)
    refresh = _in_turn(Session.refresh)
    load = _in_turn(Session.load)

    async def fork(self, name: str, at: Revision | None = None) -> AsyncSession:
        """A new session that begins with this one's state at `at` (the head). No data is copied."""
        return AsyncSession(await self._lane.call(self.sync.fork, name, at), self._workers)

    async def head(self) -> Checkpoint | None:
        """The newest checkpoint of the line the session is on, as it is in the store now."""
        return await self._workers.call(lambda: self.sync.head)

    async def step(self) -> int:
        """The head's step; 0 before the first save."""
        return await self._workers.call(lambda: self.sync.step)

    async def count(self) -> int:
        """How many checkpoints the session has, on all branches: len() of a Session."""
        return await self._workers.call(len, self.sync)

    def _watcher(self) -> Watcher:
        return Watcher(self.sync.store.backend, self.name)

    def run(self, *, sigterm: bool = False, **options: Any) -> AsyncRun:
        """Run the session: `async with session.run() as run`; see Session.run."""
        return AsyncRun(RunCore(self.sync, **options), self._workers.call, sigterm=sigterm)

    async def conversation(self, **options: Any) -> AsyncConversation:
        """The conversation in the session's state, or a new one; see Session.conversation."""
        found = await self._lane.call(lambda: self.sync.conversation(**options))
        return AsyncConversation(found, self._lane.call)

    @property
    def repaired(self) -> tuple[ToolCall, ...]:
        """What the last load(repair=True) has closed."""
        return self.sync.repaired

    pending = _awaited(Session.pending)
    calls = _awaited(Session.calls)
    tool_calls = _awaited(Session.tool_calls)
    resolve = _awaited(Session.resolve)
    answer = _awaited(Session.answer)
    usage = _awaited(Session.usage)
    exists = _awaited(Session.exists)
    get = _awaited(Session.get)
    history = _paged(Session.history)
    tree = _paged(Session.tree)
    ops = _awaited(Session.ops)
    diff = _awaited(Session.diff)
    blame = _awaited(Session.blame)
    verify = _awaited(Session.verify)
