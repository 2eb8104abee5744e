"""Lend connections: a pool, one connection for most saves, and one for small tasks.

A thread that has a connection of the pool never waits for a second one. So no two threads wait for
each other.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from holdfast.errors import InvalidRequest
from holdfast.storage.postgres.connection import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from holdfast.storage.postgres.connection import Target

_PATIENCE = 0.25
"""Seconds after which a thread that waits for a connection tries to connect, to learn the reason.
"""


_SAVER = """SELECT set_config(name, 'off', false) FROM unnest(
ARRAY['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin']) name
UNION ALL SELECT set_config('plan_cache_mode', 'force_generic_plan', false)"""
"""Settings of the saving connection: it looks up single rows, and plans each statement once."""
_LOCKED = 0.05
"""Seconds for which all saves may wait for a lock that concerns one of them."""


class Single:
    """One connection, for one user at a time."""

    def __init__(
        self, target: Target, check_open: Callable[[], None], settings: str | None = None
    ) -> None:
        self.lock = threading.Lock()
        self._target, self._check_open, self._settings = target, check_open, settings
        self._link: Link | None = None

    @contextmanager
    def lend(self, deadline: float) -> Iterator[Link]:
        with self.lock:
            self._check_open()
            link = self._link
            if link is None or link.pgconn.transaction_status != TransactionStatus.IDLE:
                self.release()
                link = self._link = self._connect()
            link.deadline = deadline
            try:
                yield link
            finally:
                if link.pgconn.transaction_status != TransactionStatus.IDLE:
                    self.release()

    def _connect(self) -> Link:
        link = self._target.connect()
        if self._settings is not None:
            try:
                link.execute(self._settings)
            except BaseException:
                link.close()
                raise
        return link

    def release(self) -> None:
        """Close the connection. The caller holds the lock."""
        link, self._link = self._link, None
        if link is not None:
            with suppress(psycopg.Error):
                link.close()


class _Loan:
    """A connection that a thread has, or is about to get."""

    __slots__ = ("__weakref__", "link", "pool")

    def __init__(self) -> None:
        self.link: Link | None = None
        self.pool: ConnectionPool[Link] | None = None
        """The pool that it is returned to."""


class Connections:
    """All connections of a store. Those of a forked parent are never touched."""

    def __init__(self, target: Target, size: int) -> None:
        self._target, self._size = target, size
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Start from scratch. A forked child calls this, because it has no connections yet."""
        self._lock = threading.Lock()
        target = self._target
        self._side = Single(target._replace(durability="full"), self.check_open)
        hasty = target._replace(lock_timeout=min(_LOCKED, target.lock_timeout))
        self._saver = Single(hasty, self.check_open, _SAVER)
        self._pid = os.getpid()
        self._pool: ConnectionPool[Link] | None = None
        self._loans: dict[weakref.ref[_Loan], int] = {}
        """The loans by thread. An interrupt may come at any point: loans of ended threads do not
        count."""

    def check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def close(self) -> None:
        self._closed = True
        with self._saver.lock, self._side.lock, self._lock:
            self._release()

    def _release(self) -> None:
        """Close the idle connections. Those in use are closed when they are returned."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._side.release()
        self._saver.release()

    @contextmanager
    def lend(self, deadline: float) -> Iterator[Link]:
        """Lend a connection to this thread.

        Raise psycopg's error if there is none by the deadline.
        """
        loan = _Loan()
        try:
            try:
                link = self._take(loan, deadline)
                link.deadline = deadline
                yield link
            finally:
                self._give_back(loan)
        finally:  # also if an interrupt has kept it from being given back
            self._loans.pop(weakref.ref(loan), None)

    def _take(self, loan: _Loan, deadline: float) -> Link:
        thread = threading.get_ident()
        while True:
            with self._lock:
                self.check_open()
                pool = self._pool
                if pool is None:
                    pool = self._pool = self._start()
                full = len(self._loans) >= self._size
                alone = full and thread in self._loans.values()
                self._loans[weakref.ref(loan, self._loans.pop)] = thread
            if alone:
                loan.link = link = self._target.connect()
                return link
            left = deadline - time.monotonic()
            try:
                loan.pool = pool
                loan.link = link = pool.getconn(max(left if full else min(left, _PATIENCE), 1e-3))
            except PoolClosed:  # which a fork does, and who replaces it
                self._loans.pop(weakref.ref(loan), None)
                continue
            except PoolTimeout:
                if full or time.monotonic() >= deadline:
                    raise
                loan.pool, began = None, time.monotonic()
                loan.link = link = self._target.connect()  # or an error with the reason
                if time.monotonic() - began < _PATIENCE:
                    self._replace_if_lossy(pool)
            return link

    def _replace_if_lossy(self, pool: ConnectionPool[Link]) -> None:
        """Replace a pool that has lost connections.

        An interrupt inside of it can lose one. The pool then gives none although few are lent and
        connecting is quick.
        """
        if pool.get_stats()["pool_size"] >= self._size:
            with self._lock:
                if self._pool is pool:
                    self._pool = None
            pool.close(_PATIENCE)

    def _start(self) -> ConnectionPool[Link]:
        return ConnectionPool(
            "",
            connection_class=Link,
            kwargs=self._target.kwargs,
            configure=self._target.configure,
            min_size=0,
            max_size=self._size,
            reconnect_timeout=1.0,
            num_workers=1,
            open=True,
        )

    def _give_back(self, loan: _Loan) -> None:
        link, pool = loan.link, loan.pool
        if link is not None and os.getpid() == self._pid == link.owner:
            if pool is None or link.pgconn.transaction_status != TransactionStatus.IDLE:
                link.close()
            if pool is not None:
                pool.putconn(link)

    def distrust(self) -> None:
        """After a broken connection: do not trust the idle ones either."""
        with self._lock:
            pool = self._pool
        if pool is not None:
            pool.drain()

    def side(self, deadline: float) -> AbstractContextManager[Link]:
        """Yield the connection for short tasks that must not wait for the pool."""
        return self._side.lend(deadline)

    def saver(self, deadline: float) -> AbstractContextManager[Link]:
        """Yield the connection for group commits. It does not wait long for a lock."""
        return self._saver.lend(deadline)

    # -- fork safety ---------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close all connections. A child must not share them, and has no threads of the pool."""
        self._saver.lock.acquire()
        self._side.lock.acquire()
        self._lock.acquire()
        self._release()

    def after_fork_in_parent(self) -> None:
        self._lock.release()
        self._side.lock.release()
        self._saver.lock.release()
