"""Lend connections: a pool, some connections for most saves, and one for small tasks.

A thread that has a connection of a pool never waits for a second one. So no two threads wait for
each other.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import TransactionStatus

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.postgres.connection import Link, Target

_SAVER = """SELECT set_config(name, 'off', false) FROM unnest(
ARRAY['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin']) name
UNION ALL SELECT set_config('plan_cache_mode', 'force_generic_plan', false)"""
"""Settings for group commits, which look up single rows. Each statement is planned once."""
_LOCKED = 0.05
"""Seconds for which all saves may wait for a lock that concerns one of them."""
_TICK = 0.1
"""Seconds until a waiting thread looks again, in case it missed that a connection is free."""
_IDLE = 600.0
"""Seconds after which an unused connection is closed, when another one is given back."""


class _Loan:
    """A connection that a thread has, or is about to get."""

    __slots__ = ("__weakref__", "link")

    def __init__(self) -> None:
        self.link: Link | None = None


class Pool:
    """At most `size` connections, each lent to one user at a time.

    The user connects, so an error has its reason. A loan counts as long as it exists: an interrupt
    may come at any point, and nothing has to be given back.
    """

    def __init__(
        self, target: Target, size: int, settings: str | None = None, *, closed: bool = False
    ) -> None:
        self._target, self._size, self._settings = target, size, settings
        self._closed = closed
        self._lock = threading.Lock()
        self._loans: dict[weakref.ref[_Loan], int] = {}
        """The loans, with their threads."""
        self._idle: list[tuple[float, Link]] = []
        """The connections that are not lent, with the time since when; the latest is the last."""
        self._returned: queue.SimpleQueue[None] = queue.SimpleQueue()

    @contextmanager
    def lend(self, deadline: float) -> Iterator[Link]:
        """Lend a connection to this thread.

        Raise psycopg's error if there is none by the deadline.
        """
        loan = _Loan()
        try:
            while not self._admit(loan):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise psycopg.OperationalError("couldn't get a connection: all are in use")
                with suppress(queue.Empty):
                    self._returned.get(timeout=min(left, _TICK))
            if loan.link is None:
                loan.link = self._connect()
            loan.link.deadline = deadline
            yield loan.link
        finally:
            self._give_back(loan)

    def check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def _admit(self, loan: _Loan) -> bool:
        """Begin a loan, with an idle connection if there is one.

        Return False if all connections are lent, unless this thread has one of them.
        """
        thread = threading.get_ident()
        with self._lock:
            self.check_open()
            if len(self._loans) >= self._size and thread not in self._loans.values():
                return False
            self._loans[weakref.ref(loan, self._loans.pop)] = thread
            while self._idle and loan.link is None:
                _, link = self._idle.pop()
                loan.link = link if _is_usable(link) else None
        return True

    def _connect(self) -> Link:
        link = self._target.connect()
        if self._settings is not None:
            try:
                link.execute(self._settings)
            except BaseException:
                link.close()
                raise
        return link

    def _give_back(self, loan: _Loan) -> None:
        link, now = loan.link, time.monotonic()
        if link is not None and link.owner != os.getpid():
            return  # the pool is that of the parent
        with self._lock:
            if link is not None and _is_usable(link):
                self._idle.append((now, link))
            self._loans.pop(weakref.ref(loan), None)
            most = 0 if self._closed else max(0, self._size - len(self._loans))
            while self._idle and (len(self._idle) > most or now - self._idle[0][0] > _IDLE):
                _close(self._idle.pop(0)[1])
        if self._returned.qsize() < self._size:
            self._returned.put(None)

    def clear(self, *, close: bool = False) -> None:
        """Close the idle connections. With `close`, those in use are closed when they return."""
        with self._lock:
            self._closed = self._closed or close
            while self._idle:
                _close(self._idle.pop()[1])


def _is_usable(link: Link) -> bool:
    """Return whether a connection has no transaction open. Close it otherwise."""
    if link.pgconn.transaction_status == TransactionStatus.IDLE:
        return True
    _close(link)
    return False


def _close(link: Link) -> None:
    with suppress(psycopg.Error):
        link.close()


class Connections:
    """All connections of a store. Those of a forked parent are never touched."""

    def __init__(self, target: Target, size: int, savers: int) -> None:
        self._target, self._size, self._savers = target, size, savers
        self._closed = False
        self.reset()
        _open.add(self)

    def reset(self) -> None:
        """Start from scratch. A forked child calls this, because it has no connections yet."""
        target, closed = self._target, self._closed
        hasty = target._replace(lock_timeout=min(_LOCKED, target.lock_timeout))
        self.pool = Pool(target, self._size, closed=closed)
        self.saver = Pool(hasty, self._savers, _SAVER, closed=closed)
        """For group commits. They do not wait long for a lock."""
        self.side = Pool(target._replace(durability="full"), 1, closed=closed)
        """For short tasks that must not wait for the pool."""

    def check_open(self) -> None:
        self.pool.check_open()

    def clear(self, *, close: bool = False) -> None:
        """Close the idle connections; with `close`, all of them, for good."""
        self._closed = self._closed or close
        for pool in (self.saver, self.side, self.pool):
            pool.clear(close=close)


_open: weakref.WeakSet[Connections] = weakref.WeakSet()


def _before_fork() -> None:
    """Close the idle connections: a child would share them."""
    for connections in list(_open):
        connections.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
