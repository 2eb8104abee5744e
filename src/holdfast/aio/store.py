"""The API for asyncio: `async with holdfast.aopen("agent.db") as store`.

Worker threads run the synchronous API, at most `workers` threads for each store. The event loop
never waits for the disk, and several loops in several threads can use one store. In addition to the
rules of Store and Session:

- Calls of one handle that write, or that move its expected head, run one after the other, in the
  order in which they were made. They occupy only one worker, however many of them wait.
- A call that is cancelled before a worker starts it never runs. A running call is finished first;
  then CancelledError is raised, with the call's own error (if any) as its cause. In both cases the
  handle knows what was written, and the next save works. So a timeout waits for a running commit.
- A worker encodes the state: do not change it while its save is awaited.
- Workers see the context variables of the caller. Callbacks (`progress` of gc) run in a worker.
- Iterators fetch one page at a time, on demand. Methods that read before they return are awaited:
  `session = await store.session(…)` and `async for event in await session.watch()`.
"""

from __future__ import annotations

import asyncio
import functools
import os
from contextlib import AsyncExitStack, ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

from holdfast.aio.run import AsyncRun
from holdfast.aio.workers import Lane, Workers
from holdfast.errors import InvalidRequest, require_count
from holdfast.history.watch import Watcher
from holdfast.runs.abandoned import (
    NOT_RESUMED,
    check_concurrency,
    log_failed,
    log_not_resumed,
    resumable,
)
from holdfast.runs.autosave import Autosave
from holdfast.runs.conversation import Conversation
from holdfast.runs.resume import RunOptions
from holdfast.runs.run_core import RunCore
from holdfast.runs.streams import StreamReader
from holdfast.session import SAME, Session, run_target
from holdfast.session import backend_of as backend_of_session
from holdfast.store import CONCURRENCY, Store
from holdfast.store import open as open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
    from typing import Unpack

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.history.watch import Event
    from holdfast.maintenance.retention import Retention
    from holdfast.model import ToolCall
    from holdfast.runs.abandoned import Abandoned
    from holdfast.runs.checkpoint_policy import Policy
    from holdfast.session import Revision
    from holdfast.transfer.copy import CopyResult

P = ParamSpec("P")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")

_PAGE = 64
"""Items that an iterator fetches at a time."""


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

    The options are those of open(). At most `workers` calls run at once; others wait for a free
    worker.
    """
    require_count("workers", workers)
    make = functools.partial(
        open_store, url, create=create, read_only=read_only, durability=durability,
        cache_bytes=cache_bytes, timeout=timeout, retention=retention, schema=schema,
        pool_size=pool_size,
    )  # fmt: skip
    return Opening(make, workers)


class Opening:
    """A store that opens when this object is awaited or entered."""

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
            await workers.close(opened.close)  # it may be open, but no caller gets it
            raise
        return AsyncStore(store, workers)


# -- the public classes --------------------------------------------------------------------------


class _Mirror(Generic[S_co]):
    """The async counterpart of `sync`, an object of the synchronous API.

    Code that may block can use `sync` directly.
    """

    def __init__(self, sync: S_co, workers: Workers) -> None:
        self.sync, self._workers, self._lane = sync, workers, Lane(workers)


class _Handle(_Mirror[S_co]):
    """The async counterpart of a Store or a Session."""

    def __repr__(self) -> str:
        return f"<Async{repr(self.sync)[1:]}"

    async def watch(
        self, *, interval: float = 0.1, patience: float | None = None
    ) -> AsyncIterator[Event]:
        """Return an iterator over checkpoints and operations of any process, from now on.

        It ends when nothing was committed for `patience` seconds, and when the store is closed.
        `interval` is the pause between two checks, in seconds.
        """
        return self._follow(await self._workers.call(self._watcher), interval, patience)

    def _watcher(self) -> Watcher:
        raise NotImplementedError

    async def _follow(
        self, watcher: Watcher, interval: float, patience: float | None
    ) -> AsyncIterator[Event]:
        """Yield events as Watcher.follow() does, but sleep on the loop, not in a worker."""
        polls = watcher.polls(patience)
        with suppress(InvalidRequest):  # the store is closed
            while (news := await self._workers.call(next, polls, None)) is not None:
                for event in news:
                    yield event
                if not news:
                    await asyncio.sleep(interval)


def _awaited(
    method: Callable[Concatenate[S_co, P], T],
) -> Callable[Concatenate[_Mirror[S_co], P], Coroutine[Any, Any, T]]:
    """Return an async version of a method, which a worker runs.

    The method is looked up by its name, because `sync` may be of a subclass.
    """

    @functools.wraps(method)
    async def call(self: _Mirror[S_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._workers.call(getattr(self.sync, method.__name__), *args, **kwargs)

    return call


def _in_turn(
    method: Callable[Concatenate[S_co, P], T],
) -> Callable[Concatenate[_Mirror[S_co], P], Coroutine[Any, Any, T]]:
    """Return an async version of a method, run after the earlier calls of the same handle."""

    @functools.wraps(method)
    async def call(self: _Mirror[S_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._lane.call(getattr(self.sync, method.__name__), *args, **kwargs)

    return call


def _paged(
    method: Callable[Concatenate[S_co, P], Iterator[T]],
) -> Callable[Concatenate[_Mirror[S_co], P], AsyncIterator[T]]:
    """Return an async version of an iterator, which fetches one page at a time."""

    async def pages(workers: Workers, source: Iterator[T]) -> AsyncIterator[T]:
        while page := await workers.call(lambda: list(islice(source, _PAGE))):
            for item in page:
                yield item

    @functools.wraps(method)
    def call(self: _Mirror[S_co], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return pages(self._workers, getattr(self.sync, method.__name__)(*args, **kwargs))

    return call


class AsyncConversation(_Mirror[Conversation]):
    """A Conversation whose methods are awaited; see Conversation. `sync` is the Conversation."""

    def __init__(self, sync: Conversation, workers: Workers, lane: Lane) -> None:
        super().__init__(sync, workers)
        self._lane = lane

    async def messages(self) -> list[dict[str, Any]]:
        """Return all messages, oldest first."""
        return await self._lane.call(lambda: self.sync.messages)

    append = _in_turn(Conversation.append)
    window = _in_turn(Conversation.window)
    repair = _in_turn(Conversation.repair)


class AsyncAutosave(_Mirror[Autosave]):
    """An Autosave whose methods are awaited; see Autosave. `sync` is the Autosave."""

    def __init__(self, sync: Autosave, workers: Workers, lane: Lane) -> None:
        super().__init__(sync, workers)
        self._lane = lane

    offer = _in_turn(Autosave.offer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._lane.call(self.sync.__exit__, kind, error, trace)


class AsyncStore(_Handle[Store]):
    """A Store whose methods are awaited; see Store. Made by aopen().

    `async with` closes it at the end. `sync` is the Store itself.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish the calls made so far, and close the store. Later calls raise InvalidRequest.

        Idempotent.
        """
        await self._workers.close(self.sync.close)

    async def session(
        self, name: str, *, agent: str | None = None, parent: str | Session | None = None
    ) -> AsyncSession:
        """Return a handle on the session of this name; see Store.session.

        Nothing is written before the first save.
        """
        session = await self._workers.call(self.sync.session, name, agent=agent, parent=parent)
        return AsyncSession(session, self._workers)

    @property
    def kind(self) -> str:
        """The kind of storage: "sqlite", "files", "postgresql" or "memory"."""
        return self.sync.kind

    @property
    def address(self) -> str | None:
        """The address that opens this store from any folder; None for a store in memory."""
        return self.sync.address

    @property
    def read_only(self) -> bool:
        """Whether the store was opened for reading only."""
        return self.sync.read_only

    def _watcher(self) -> Watcher:
        return self.sync.watcher()

    get = _awaited(Store.get)
    sessions = _paged(Store.sessions)
    deleted = _paged(Store.deleted)
    running = _awaited(Store.running)
    recent = _awaited(Store.recent)
    checkpoints = _paged(Store.checkpoints)
    search = _paged(Store.search)
    usage = _awaited(Store.usage)
    index = _awaited(Store.index)
    drop_index = _awaited(Store.drop_index)
    compare = _awaited(Store.compare)
    neighbours = _awaited(Store.neighbours)
    id_length = _awaited(Store.id_length)
    verify = _awaited(Store.verify)
    gc = _awaited(Store.gc)
    prune = _awaited(Store.prune)
    undo_prune = _awaited(Store.undo_prune)
    repair = _awaited(Store.repair)
    stats = _awaited(Store.stats)
    backup = _awaited(Store.backup)
    export = _awaited(Store.export)
    import_exported = _awaited(Store.import_exported)
    pending = _awaited(Store.pending)
    abandoned = _awaited(Store.abandoned)
    ready = _awaited(Store.ready)

    async def resume_all(
        self,
        fn: Callable[[AsyncRun], Awaitable[Any]],
        *,
        concurrency: int = CONCURRENCY,
        **options: Any,
    ) -> list[str]:
        """Resume the runs of abandoned() and ready(), each by `await fn(run)` in a task.

        See Store.resume_all.
        """
        check_concurrency(concurrency, options)
        free = asyncio.Semaphore(concurrency)

        async def resume(each: Abandoned) -> bool:
            async with free:
                stack = AsyncExitStack()
                try:
                    session = await self.session(each.session)
                    run = await stack.enter_async_context(session.run(resume=True, **options))
                except NOT_RESUMED as e:
                    log_not_resumed(each, e)
                    return False
                try:
                    async with stack:
                        await fn(run)
                except Exception:  # noqa: BLE001 - the others are still resumed
                    log_failed(each)
                return True

        left = resumable(await self.abandoned(halted=True))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(resume(each)) for each in left]
        return [each.session for each, task in zip(left, tasks, strict=True) if task.result()]

    @functools.wraps(Store.copy)
    async def copy(self, other: AsyncStore | Store, **options: Any) -> CopyResult:
        target = other.sync if isinstance(other, AsyncStore) else other
        return await self._workers.call(self.sync.copy, target, **options)


class AsyncSession(_Handle[Session]):
    """A Session whose methods are awaited; see Session.

    `head` and `step` are methods here, and count() is len() of a Session. `sync` is the Session
    itself.
    """

    @property
    def name(self) -> str:
        """The name of the session."""
        return self.sync.name

    @property
    def agent(self) -> str | None:
        """The agent of the session, or None."""
        return self.sync.agent

    save = _in_turn(Session.save)
    append = _in_turn(Session.append)
    patch = _in_turn(Session.patch)
    rewind = _in_turn(Session.rewind)
    adopt = _in_turn(Session.adopt)
    rename = _in_turn(Session.rename)
    tag = _in_turn(Session.tag)
    label = _in_turn(Session.label)
    untag = _in_turn(Session.untag)
    unlabel = _in_turn(Session.unlabel)
    delete = _in_turn(Session.delete)
    prune = _in_turn(Session.prune)
    undo = _in_turn(Session.undo)
    redo = _in_turn(Session.redo)
    next_undo = _awaited(Session.next_undo)
    next_redo = _awaited(Session.next_redo)
    refresh = _in_turn(Session.refresh)
    load = _in_turn(Session.load)

    async def fork(
        self,
        name: str,
        at: Revision | None = None,
        *,
        state: Any = SAME,
        **fields: Unpack[Fields],
    ) -> AsyncSession:
        """Return a new session that starts with the state at `at`; see Session.fork."""
        forked = await self._lane.call(self.sync.fork, name, at, state=state, **fields)
        return AsyncSession(forked, self._workers)

    async def head(self) -> Checkpoint | None:
        """Return the current head in the store, or None if there is no checkpoint."""
        return await self._workers.call(lambda: self.sync.head)

    async def step(self) -> int:
        """Return the step number of the head; 0 before the first save."""
        return await self._workers.call(lambda: self.sync.step)

    async def count(self) -> int:
        """Return the number of checkpoints, on all branches: len() of a Session."""
        return await self._workers.call(len, self.sync)

    def _watcher(self) -> Watcher:
        return Watcher(backend_of_session(self.sync), self.name)

    def run(self, *, sigterm: bool = False, **options: Any) -> AsyncRun:
        """Run the session: `async with session.run() as run`; see Session.run."""
        core = RunCore(run_target(self.sync), RunOptions(**options))
        return AsyncRun(core, self._workers.call, sigterm=sigterm)

    async def conversation(self, **options: Any) -> AsyncConversation:
        """Return the conversation in the session's state; see Session.conversation."""
        found = await self._lane.call(lambda: self.sync.conversation(**options))
        return AsyncConversation(found, self._workers, self._lane)

    def stream(
        self, key: str, *, after: int = 0, interval: float = 0.1, patience: float | None = None
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield the cursors and chunks of a stream; see Session.stream."""
        reader = StreamReader(backend_of_session(self.sync), self.name, key, after)
        return self._chunks(reader, interval, patience)

    async def _chunks(
        self, reader: StreamReader, interval: float, patience: float | None
    ) -> AsyncIterator[tuple[int, Any]]:
        polls = reader.polls(patience)
        while (news := await self._workers.call(next, polls, None)) is not None:
            for item in news:
                yield item
            if not (news or reader.ended):
                await asyncio.sleep(interval)

    def autosave(self, policy: Policy | None = None) -> AsyncAutosave:
        """Save the states of a loop: `async with session.autosave(…)`; see Session.autosave."""
        return AsyncAutosave(self.sync.autosave(policy), self._workers, self._lane)

    @property
    def closed_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that the last load(close_calls=True) has closed."""
        return self.sync.closed_calls

    pending = _awaited(Session.pending)
    calls = _awaited(Session.calls)
    tool_calls = _awaited(Session.tool_calls)
    resolve = _awaited(Session.resolve)
    answer = _awaited(Session.answer)
    usage = _awaited(Session.usage)
    owner = _awaited(Session.owner)
    abandoned = _awaited(Session.abandoned)
    exists = _awaited(Session.exists)
    info = _awaited(Session.info)
    forks = _awaited(Session.forks)
    pack = _awaited(Session.pack)
    part = _awaited(Session.part)
    items = _awaited(Session.items)
    get = _awaited(Session.get)
    transcript = _awaited(Session.transcript)
    history = _paged(Session.history)
    tree = _paged(Session.tree)
    checkpoints = _paged(Session.checkpoints)
    search = _paged(Session.search)
    operations = _awaited(Session.operations)
    diff = _awaited(Session.diff)
    changes = _awaited(Session.changes)
    blame = _awaited(Session.blame)
    verify = _awaited(Session.verify)
