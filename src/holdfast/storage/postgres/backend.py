"""PostgreSQL: one store for many machines.

A save is one statement, which is durable when it returns. Small saves of several threads share one
statement. If a connection breaks during a commit, the outcome is unknown. The change is then made
again, which is safe because it compares the head. If the second attempt is refused, the backend
checks whether the first one succeeded.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psycopg
from psycopg import errors as pg

from holdfast.errors import Conflict, Corrupt, InvalidRequest, Unavailable
from holdfast.format.records import seal_counter, unseal_counter
from holdfast.log import logger
from holdfast.storage.contract import Backend, MissingReference, StaleHead, View
from holdfast.storage.group_commit import Group, Member
from holdfast.storage.postgres import maintain, writer
from holdfast.storage.postgres import schema as schemas
from holdfast.storage.postgres.connection import (
    Link,
    Target,
    Unconfirmed,
    is_cut,
    is_worth_another_try,
)
from holdfast.storage.postgres.notify import Listener, Notifier
from holdfast.storage.postgres.pool import Connections
from holdfast.storage.postgres.reader import PostgresView
from holdfast.storage.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.storage.contract import Batch

_T = TypeVar("_T")

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_SNAPSHOT = "SELECT pg_current_snapshot()::text"
# Each commit leaves a row with a higher xmin, so no two of these are equal.
_STATE = _SNAPSHOT + ", count(*), sum(xmin::text::bigint)::text FROM heads"


class _Alone(Exception):
    """A change was not written together with others. `why` is the error, if there was one."""

    def __init__(self, why: psycopg.Error | None = None) -> None:
        self.why = why


_GROUPS = 4
"""The most statements of group commits at a time. While the server waits for the disk with one, it
takes others, so that fewer threads wait for a whole statement of others before their own. 32
threads make about 1.5 times as many appends with 4 as with 1."""


class _Group(Group["Batch"]):
    """Threads that commit together, and when the statement began that they wait for."""

    def __init__(self, write: Callable[[list[Member[Batch]]], None]) -> None:
        super().__init__(self._time)
        self.began = 0.0
        """0 if no statement is on its way."""
        self._write_all = write

    def _time(self, members: list[Member[Batch]]) -> None:
        self.began = time.monotonic()
        try:
            self._write_all(members)
        finally:
            self.began = 0.0


class PostgresBackend(Backend):
    """A store in PostgreSQL.

    Safe for threads and processes; a forked child opens new connections.
    """

    name = "postgresql"

    def __init__(
        self,
        url: str,
        *,
        create: bool | None = None,
        read_only: bool = False,
        durability: str = "full",
        timeout: float = 30.0,
        schema: str | None = None,
        pool_size: int = 8,
    ) -> None:
        if type(pool_size) is not int or pool_size < 1:
            raise InvalidRequest(f"pool_size must be a number from 1 on, not {pool_size!r}")
        self.read_only = read_only
        self._timeout = timeout
        self._target = target = Target.parse(
            url, schema, timeout=timeout, read_only=read_only, durability=durability
        )
        self.path = target.shown
        savers = min(pool_size, _GROUPS)
        self._connections = Connections(target, pool_size, savers)
        self._notifier, self._listener = Notifier(self._connections, target), Listener(target)
        self._groups = [_Group(self._write_together) for _ in range(savers)]
        self._version: tuple[object, object] = (None, None)
        with self.separate() as link:
            found = schemas.prepare(link, target, create=bool(create) and not read_only)
        self._is_tallied = found == schemas.FORMAT

    # -- connections ---------------------------------------------------------------------------

    @contextmanager
    def separate(self) -> Iterator[Link]:
        """Yield a separate connection for one long task, so that saves need not wait for it."""
        self._connections.check_open()
        with self._target.translated():
            link = self._target.connect()
            try:
                yield link
            finally:
                link.close()

    def _check_writable(self) -> None:
        self._connections.check_open()
        if self.read_only:
            raise Unavailable(
                f"the store {self.path} was opened read-only", hint="open it without read_only"
            )

    def _retry(self, do: Callable[[float], _T]) -> _T:
        """Return the result of `do(deadline)`. Repeat it as long as that may help."""
        deadline = time.monotonic() + self._timeout
        for pause in _pauses():
            try:
                return do(deadline)
            except psycopg.Error as e:
                cut = is_cut(e)
                if time.monotonic() + pause >= deadline or not (cut or is_worth_another_try(e)):
                    raise self._target.error(e) from e
                if cut:
                    self._connections.pool.clear()
            time.sleep(pause)
        raise AssertionError

    def _aside(self, do: Callable[[Link], _T]) -> _T:
        def attempt(deadline: float) -> _T:
            with self._connections.side.lend(deadline) as link:
                return do(link)

        return self._retry(attempt)

    @contextmanager
    def view(self) -> Iterator[View]:
        self._connections.check_open()
        with self._target.translated(), ExitStack() as held:

            def begin(deadline: float) -> Link:
                with ExitStack() as lent:
                    link = lent.enter_context(self._connections.pool.lend(deadline))
                    link.ask(_BEGIN)
                    held.push(lent.pop_all())
                held.callback(_end, link)
                link.deadline = None
                return link

            renew = partial(self._retry, begin)
            yield PostgresView(renew(), self._target, renew, tallied=self._is_tallied)

    # -- writing -------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        self._check_writable()
        try:
            if not writer.fits(batch):
                raise _Alone
            # One that writes nothing, or else the one that is done first.
            min(self._groups, key=attrgetter("began")).join(batch)
        except _Alone as e:
            self._write_alone(batch, e.why)
        self._notifier.poke()

    def renew(self, session: int, token: bytes) -> bool:
        self._check_writable()
        return self._aside(lambda link: writer.renew(link, session, token))

    def _write_together(self, members: list[Member[Batch]]) -> None:
        """Write the changes of several members. Those that cannot be batched are retried alone."""
        ours: dict[int, Member[Batch]] = {}
        for member in members:
            if ours.setdefault(writer.session_of(member.change), member) is not member:
                member.finish(_Alone())
        batches = [member.change for member in ours.values()]
        allowed = max(self._timeout / 3, sum([writer.seconds(batch) for batch in batches]))
        unsure: psycopg.Error | None = None
        try:
            with self._connections.saver.lend(time.monotonic() + allowed) as link:
                unsure = psycopg.OperationalError("another thread was interrupted")
                if len(batches) == 1:
                    writer.write(link, *batches)
                    done = {*ours}
                else:
                    done = writer.write_many(link, batches)
            for session, member in ours.items():
                member.finish(None if session in done else _Alone())
        except psycopg.Error as e:
            unsure = unsure and e  # without a connection nothing was sent
            if is_cut(e):
                self._connections.pool.clear()
        except Exception as e:
            if len(batches) > 1:
                raise
            ours[writer.session_of(batches[0])].finish(e)
        finally:
            for member in ours.values():
                if not member.done:
                    member.finish(_Alone(unsure))

    def _write_alone(self, batch: Batch, unsure: psycopg.Error | None = None) -> None:
        """By ourselves, after a try with others that failed, or without one."""
        writer.check_size(batch)
        if unsure is not None and not is_cut(unsure):
            unsure = None

        def attempt(deadline: float) -> None:
            nonlocal unsure
            with self._connections.pool.lend(deadline) as link:
                try:
                    self._attempt(link, batch, unsure)
                except psycopg.Error as e:
                    unsure = e if is_cut(e) else unsure
                    raise

        try:
            self._retry(attempt)
        except Unavailable as e:
            if unsure is not None:
                raise self._unknown(unsure) from e
            raise

    def _attempt(self, link: Link, batch: Batch, unsure: psycopg.Error | None) -> None:
        """One try at a change; after one whose outcome is `unsure`, a refusal may be an echo.

        It gets the time it needs even if that is the last: a lock is given up sooner than that.
        """
        before, seconds = link.patience, writer.seconds(batch)
        link.deadline = time.monotonic() + max(self._timeout / 3, seconds)
        link.patience = self._timeout + 1.0 + seconds  # the server's time begins when it has it
        try:
            writer.write(link, batch)
        except (StaleHead, MissingReference, Conflict, Corrupt):
            if unsure is None:
                raise
            link.deadline = None
            made = writer.landed(link, batch)
            if made is None:
                raise self._unknown(unsure) from None
            if not made:
                raise
        finally:
            link.patience = before

    def _unknown(self, e: psycopg.Error) -> Unavailable:
        return Unavailable(
            f"the outcome of a commit to {self.path} is unknown: {self._target.plain(e)}",
            hint="the change may have been made or not; refresh() and look before trying again",
        )

    def _collect(self, do: Callable[[Link], _T]) -> _T:
        """Run `do` in a transaction of gc, again after a cut: it then finds only the rest."""
        # Always durable: if a sweep were forgotten, a trim would take rows that are needed again.
        self._check_writable()
        target = self._target._replace(durability="full")

        def attempt(_deadline: float) -> _T:
            link = target.connect()
            try:
                with maintain.alone(link):
                    return do(link)
            finally:
                link.close()

        done = self._retry(attempt)
        self._notifier.poke()
        return done

    def commit_all(self, first: Batch, rest: Sequence[Batch]) -> list[bool]:
        return self._collect(lambda link: maintain.write_all(link, first, rest))

    def compact(
        self, progress: Callable[[int, int], None] | None = None, *, erase: bool = False
    ) -> bool:
        """Make freed space usable, and return the end of each table to the system.

        With `erase`, each table is locked and rewritten.
        """
        self._check_writable()
        tables = [*schemas.TABLES]
        vacuum, left_out = "VACUUM FULL" if erase else "VACUUM", 0
        with self.separate() as link:
            link.take_your_time()
            for n, table in enumerate(tables, start=1):
                left_out += not self._tend(link, f"{vacuum} {table}")
                if progress is not None:
                    progress(n, len(tables))
        return not (erase and left_out)

    def salvage(self, accept: int | None = None) -> bool:
        if accept is not None:
            return self._collect(lambda link: self._accept(link, accept))
        self._check_writable()
        with self.separate() as link:
            link.take_your_time()
            for table in schemas.TABLES:
                self._tend(link, f"REINDEX TABLE {table}")
            return maintain.rehash(link)

    def _accept(self, link: Link, session: int) -> bool:
        return maintain.add_up_anew(link, Reader(PostgresView(link, self._target)), session)

    def _tend(self, link: Link, sql: str) -> bool:
        """Run a maintenance statement that only an owner may run. Return whether it was done."""
        try:
            link.execute(sql)
            return True
        except (pg.InsufficientPrivilege, pg.LockNotAvailable, pg.DeadlockDetected) as e:
            logger.warning("%s on %s was left out: %s", sql, self.path, self._target.plain(e))
        except Unconfirmed as e:  # a warning: this user may not VACUUM
            logger.debug("%s on %s: %s", sql, self.path, self._target.plain(e))
        return False

    # -- small things --------------------------------------------------------------------------

    def version(self) -> object:
        """Return the state of all heads.

        It is read again if any transaction of the server has ended.
        """

        def look(link: Link) -> object:
            snapshot, state = self._version
            if link.rows(_SNAPSHOT) != [(snapshot,)]:
                [(snapshot, *state)] = link.rows(_STATE)
                self._version = (snapshot, tuple(state))
            return self._version[1]

        return self._aside(look)

    def wait(self, seconds: float) -> None:
        self._listener.wait(seconds)

    def identity(self) -> object:
        """The same through every host name, socket, role and pooler of a server."""
        with self.separate() as link:
            return link.execute(
                "SELECT pg_postmaster_start_time()::text, d.oid::bigint, n.oid::bigint "
                "FROM pg_catalog.pg_database d, pg_catalog.pg_namespace n "
                "WHERE d.datname = current_database() AND n.nspname = %s",
                (self._target.schema,),
            ).fetchall()

    def backup(self, path: Path) -> None:
        raise InvalidRequest(
            f"the store {self.path} cannot be backed up to {path}",
            hint="use pg_dump, or copy() it to another store",
        )

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        """Reserve numbers durably.

        A client survives a crash of its server. If the server had forgotten the reservation, it
        would give the same numbers a second time.
        """
        self._check_writable()
        known = "SELECT body FROM counters WHERE space = %s"
        change = "UPDATE counters SET body = %s WHERE space = %s AND body = %s"

        def take(link: Link) -> int:
            while True:
                rows: list[Any] = link.execute(known, (space,)).fetchall()
                if not rows:
                    raise Corrupt(f"the store {self.path} has lost its counters")
                [(body,)] = rows
                first = unseal_counter(space, body)
                new = seal_counter(space, first + count)
                if link.execute(change, (new, space, body)).rowcount:
                    return first

        return self._aside(take)

    def reset_lock(self) -> None:
        self._connections.reset()
        for group in self._groups:
            group.reset()
        self._notifier.reset()
        self._listener.reset()

    def close(self) -> None:
        self._notifier.stop()
        self._listener.stop()
        self._connections.clear(close=True)


def _pauses() -> Iterator[float]:
    """Seconds between tries: none at first, then more and more, and never the same for two."""
    yield 0.0
    pause = 0.01
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(pause * 2, 0.2)


def _end(link: Link) -> None:
    """End a reader's transaction. If that fails the connection is not used again."""
    if link.owner == os.getpid() and not link.closed:
        try:
            link.ask("COMMIT")
        except psycopg.Error as e:
            logger.debug("a connection broke behind a reader: %s", type(e).__name__)
            link.close()
