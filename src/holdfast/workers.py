"""Calls in threads of their own, awaited on event loops.

A call that is cancelled before a worker began it never runs. One that runs is finished first; only
then is CancelledError raised, with the call's own error, if it failed, as its cause.
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
"""When so many calls of a loop wait, it is woken up for what is done every so many seconds."""


class Call(Generic[T]):
    """A call that a worker runs, and the wait for it on a loop."""

    _result: T

    def __init__(self, run: Callable[[], T]) -> None:
        self._run, self._box = run, _mailbox()
        self._begun = threading.Lock()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._done = False

    def claim(self) -> bool:
        """True for the first who asks: the worker that runs it, or the waiter who gives it up."""
        return self._begun.acquire(blocking=False)

    def carry_out(self) -> None:
        """In a worker."""
        try:
            self._result = self._run()
        except BaseException as e:  # noqa: BLE001 - the one who waits gets it
            self._error = e
        self._box.post(self)

    def arrive(self) -> None:
        """On the loop, when it is done."""
        self._done = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outcome(self) -> T:
        """What it returns or raises. If this is cancelled, it never begins, or comes to its end."""
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
                    cancelled = cancelled or e  # wait on, also if cancelled again
            if cancelled is not None:
                raise cancelled from self._error
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._box.waiting -= 1
            self._error = cancelled = None  # their tracebacks hold this frame


class _Mailbox:
    """Brings finished calls to their loop; many at a time, because waking it up costs most."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Call[Any]] = deque()
        self._rung = False
        self.waiting = 0

    def post(self, call: Call[Any]) -> None:
        """In a worker."""
        self._calls.append(call)
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        if self._calls and self.waiting > _MANY:
            self.loop.call_later(_PAUSE, self._empty)  # until then nobody rings
        else:
            self._rung = False  # before looking: what comes later rings again
        for _ in range(len(self._calls)):
            self._calls.popleft().arrive()


_local = threading.local()


def _mailbox() -> _Mailbox:
    """That of the running loop."""
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
        call = Call[T](functools.partial(copy_context().run, function, *args, **kwargs))
        self._workers.submit(call, self)
        return await call.outcome()


class Workers:
    """The threads of a store, for all loops that use it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.reset()
        _all_workers.add(self)

    def reset(self) -> None:
        """Begin anew; also in a forked child, where the threads are gone."""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="holdfast")
        self._ready: deque[Lane] = deque()
        self._active = 0
        self._closing = False

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await Lane(self).call(function, *args, **kwargs)

    def submit(self, call: Call[Any], lane: Lane) -> None:
        with self._lock:
            if self._closing:
                raise InvalidRequest("the store is closed", hint="open it again")
            if lane.pool is not self._pool:  # its first call; what a fork left in it never runs
                lane.pool, lane.calls = self._pool, deque()
            lane.calls.append(call)
            if len(lane.calls) == 1:
                self._ready.append(lane)
                if self._active < self._count:
                    self._active += 1
                    self._pool.submit(self._work)

    def _work(self) -> None:
        """In a worker: a call of each lane in turn, until there is none."""
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
        """Refuse new calls, wait for those that were made, and do the rest."""

        def finish() -> None:
            self._pool.shutdown()
            then()

        with self._lock:
            self._closing = True
        call = Call(finish)
        call.claim()
        threading.Thread(target=call.carry_out).start()  # not in the pool, which it waits for
        await call.outcome()


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for workers in list(_all_workers):
        workers.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
