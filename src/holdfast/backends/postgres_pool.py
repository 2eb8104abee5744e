"""Lending connections: a pool for readers and savers, and one connection for small things.

A thread that has one already is never made to wait for another, lest all wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from holdfast.backends.postgres_link import Link
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.postgres_link import Target

_PATIENCE = 1.0
"""Seconds after which somebody who waits for a new connection looks for the reason himself."""


class Connections:
    """All connections of a store. Those of a forked parent are never touched."""

    def __init__(self, target: Target, size: int) -> None:
        self._target, self._size = target, size
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Also in a forked child, which has no connections of its own yet."""
        self._lock = threading.Lock()
        self._side_lock = threading.Lock()
        self._pid = os.getpid()
        self._pool: ConnectionPool[Link] | None = None
        self._side: Link | None = None
        self._held: dict[int, int] = {}
        """By thread: how many it has."""
        self._out = 0

    def check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def close(self) -> None:
        self._closed = True
        with self._side_lock, self._lock:
            self._release()

    def _release(self) -> None:
        """Close what nobody uses just now. What is in use is closed when it comes back."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        side, self._side = self._side, None
        if side is not None:
            side.close()

    @contextmanager
    def lend(self, deadline: float) -> Iterator[Link]:
        """A connection for one thread; psycopg's errors if there is none by the deadline."""
        thread = threading.get_ident()
        pool, link = self._take(thread, deadline)
        link.deadline = deadline
        try:
            yield link
        finally:
            if os.getpid() == self._pid == link.owner:
                self._give_back(thread, pool, link)

    def _take(self, thread: int, deadline: float) -> tuple[ConnectionPool[Link] | None, Link]:
        while True:
            with self._lock:
                self.check_open()
                pool = self._pool
                if pool is None:
                    pool = self._pool = self._start()
                full = self._out >= self._size
                alone = full and self._held.get(thread, 0) > 0
                self._held[thread] = self._held.get(thread, 0) + 1
                self._out += 1
            try:
                if alone:
                    return None, self._target.connect()
                try:
                    left = deadline - time.monotonic()
                    return pool, pool.getconn(max(left if full else min(left, _PATIENCE), 1e-3))
                except PoolTimeout:
                    if full or time.monotonic() >= deadline:
                        raise
                    return None, self._target.connect()  # or an error that tells why
            except BaseException as e:
                self._forget(thread)
                if not isinstance(e, PoolClosed):  # which a fork does
                    raise

    def _start(self) -> ConnectionPool[Link]:
        return ConnectionPool(
            "",
            connection_class=Link,
            kwargs=self._target.kwargs,
            configure=self._target.configure,
            min_size=0,
            max_size=self._size,
            reconnect_timeout=_PATIENCE,
            num_workers=1,
            open=True,
        )

    def _forget(self, thread: int) -> None:
        with self._lock:
            self._out -= 1
            left = self._held.get(thread, 0) - 1
            if left > 0:
                self._held[thread] = left
            else:
                self._held.pop(thread, None)

    def _give_back(self, thread: int, pool: ConnectionPool[Link] | None, link: Link) -> None:
        self._forget(thread)
        if link.pgconn.transaction_status != TransactionStatus.IDLE:
            link.close()
        if pool is None:
            link.close()
        else:
            pool.putconn(link)

    def distrust(self) -> None:
        """A connection broke; those that lie ready may be no better."""
        with self._lock:
            pool = self._pool
        if pool is not None:
            pool.drain()

    @contextmanager
    def side(self, deadline: float) -> Iterator[Link]:
        """The connection for what is short and must not wait for the pool."""
        with self._side_lock:
            self.check_open()
            if self._side is None or self._side.closed:
                self._side = self._target._replace(durability="full").connect()
            link = self._side
            link.deadline = deadline
            try:
                yield link
            except BaseException:
                self._side = None
                with suppress(psycopg.Error):
                    link.close()
                raise

    # -- fork safety ---------------------------------------------------------------------------

    def before_fork(self) -> None:
        """A connection must not be shared with a child, nor do the pool's threads get there."""
        self._side_lock.acquire()
        self._lock.acquire()
        self._release()

    def after_fork_in_parent(self) -> None:
        self._lock.release()
        self._side_lock.release()
