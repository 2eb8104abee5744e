"""Worker threads that run calls for event loops.

A call that is cancelled before a worker starts it never runs. A running call is finished first;
then CancelledError is raised, with the call's own error (if any) as its cause.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_MANY, _PAUSE = 16, 0.001
"""If more than _MANY calls of a loop wait, it is woken only every _PAUSE seconds."""


class Call(Generic[T]):
    """A call that a worker runs and that a coroutine waits for."""

    _result: T

    def __init__(self, run: Callable[[], T]) -> None:
        self._run, self._box = run, _mailbox()
        self._begun = threading.Lock()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._done = False

    def claim(self) -> bool:
        """Return True only once: for the worker that starts it or the waiter that cancels it."""
        return self._begun.acquire(blocking=False)

    def carry_out(self) -> None:
        """Run the call, in a worker."""
        try:
            self._result = self._run()
        except BaseException as e:  # noqa: BLE001 - the waiter raises it
            self._error = e
        self._box.post(self)

    def arrive(self) -> None:
        """Wake the waiter, on the loop, when the call is done."""
        self._done = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outcome(self) -> T:
        """Return the result of the call, or raise its error.

        If this is cancelled, the call is cancelled if it has not started, and awaited otherwise.
        """
        cancelled = None
        self._box.waiting += 1
        try:
            while not self._done:
                self._waiter = self._box.loop.create_future()
                try:
                    await self._waiter
                except asyncio.CancelledError as e:
                    if self.claim():
                        raise
                    cancelled = cancelled or e  # keep waiting, even if cancelled again
            if cancelled is not None:
                raise cancelled from self._error
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._box.waiting -= 1
            self._error = cancelled = None  # their tracebacks reference this frame


class _Mailbox:
    """Delivers finished calls to their loop, many at once, because waking the loop is expensive."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Call[Any]] = deque()
        self._rung = False
        self.waiting = 0

    def post(self, call: Call[Any]) -> None:
        """Add a finished call, in a worker. Wake the loop if that is not scheduled yet."""
        self._calls.append(call)
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the loop is closed, so there is no waiter
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        """Deliver all finished calls, on the loop."""
        if self._calls and self.waiting > _MANY:
            self.loop.call_later(_PAUSE, self._empty)  # until then the loop is not woken
        else:
            self._rung = False  # first, so that later calls wake the loop again
        for _ in range(len(self._calls)):
            self._calls.popleft().arrive()


_local = threading.local()


def _mailbox() -> _Mailbox:
    """Return the mailbox of the running loop."""
    loop = asyncio.get_running_loop()
    box: _Mailbox | None = getattr(_local, "box", None)
    if box is None or box.loop is not loop:
        box = _local.box = _Mailbox(loop)
    return box


class Lane:
    """Calls that run one after the other, in the order in which they were made."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.calls: deque[Call[Any]] = deque()
        self.pool: ThreadPoolExecutor | None = None

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a worker, after the earlier calls of this lane. Return its result."""
        call = Call[T](functools.partial(copy_context().run, function, *args, **kwargs))
        self._workers.submit(call, self)
        return await call.outcome()


class Workers:
    """The worker threads of a store, shared by all loops that use it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.reset()
        _all_workers.add(self)

    def reset(self) -> None:
        """Start with an empty pool; also used in a forked child, where the threads do not exist."""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="holdfast")
        self._ready: deque[Lane] = deque()
        self._active = 0
        self._closing = False

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a worker, independently of other calls. Return its result."""
        return await Lane(self).call(function, *args, **kwargs)

    def submit(self, call: Call[Any], lane: Lane) -> None:
        """Add a call to a lane. Raises InvalidRequest if the store is closed."""
        with self._lock:
            if self._closing:
                raise InvalidRequest("the store is closed", hint="open it again")
            if lane.pool is not self._pool:  # first call, or old calls from before a fork
                lane.pool, lane.calls = self._pool, deque()
            lane.calls.append(call)
            if len(lane.calls) == 1:
                self._ready.append(lane)
                if self._active < self._count:
                    self._active += 1
                    self._pool.submit(self._work)

    def _work(self) -> None:
        """Run one call of each lane in turn, until none is left. Runs in a worker."""
        done: Lane | None = None
        while True:
            with self._lock:
                if done is not None:
                    done.calls.popleft()
                    if done.calls:
                        self._ready.append(done)
                if not self._ready:
                    self._active -= 1
                    return
                done = self._ready.popleft()
            if done.calls[0].claim():
                done.calls[0].carry_out()

    async def close(self, then: Callable[[], None]) -> None:
        """Refuse new calls, wait for earlier ones, and then call `then`."""

        def finish() -> None:
            self._pool.shutdown()
            then()

        with self._lock:
            self._closing = True
        call = Call(finish)
        call.claim()
        threading.Thread(target=call.carry_out).start()  # not in the pool: it waits for the pool
        await call.outcome()


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for workers in list(_all_workers):
        workers.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
