"""PostgreSQL: many machines, one store.

A save is one statement, durable when it returns; small ones of several threads share one. Where a
connection breaks in a commit, nobody knows whether the change was made: it is then made again,
which its comparison of the head makes safe, and if that is refused, one looks whether it had been
made.
"""

from __future__ import annotations

import os
import random
import time
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psycopg
from psycopg import errors as pg

from holdfast.backends import postgres_batch as batch
from holdfast.backends import postgres_gc as gc
from holdfast.backends import postgres_schema as schemas
from holdfast.backends import postgres_writer as writer
from holdfast.backends.base import Backend, Change, Gone, Moved, Reader
from holdfast.backends.group import Group, Member
from holdfast.backends.postgres_indexes import rehash
from holdfast.backends.postgres_link import (
    Link,
    Target,
    Unconfirmed,
    is_cut,
    is_worth_another_try,
)
from holdfast.backends.postgres_pool import Connections
from holdfast.backends.postgres_reader import PostgresReader
from holdfast.backends.postgres_signals import Listener, Notifier
from holdfast.codec.records import seal_counter, unseal_counter
from holdfast.errors import Conflict, Corrupt, InvalidRequest, Unavailable
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.backends.base import Jot, Sweep, Trim

_T = TypeVar("_T")

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_SNAPSHOT = "SELECT pg_current_snapshot()::text"
# Of rows, each commit leaves one with a higher xmin; so no two of these are alike.
_STATE = _SNAPSHOT + ", count(*), sum(xmin::text::bigint)::text FROM heads"


class _Alone(Exception):
    """A change was not made together with others, as far as is known: `why` may be a cut."""

    def __init__(self, why: psycopg.Error | None = None) -> None:
        self.why = why


class PostgresBackend(Backend):
    """Safe for threads and processes; after a fork the child makes connections of its own."""

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
        self._connections = Connections(target, pool_size)
        self._notifier, self._listener = Notifier(self._connections, target), Listener(target)
        self._group = Group(self._write_together)
        self._version: tuple[object, object] = (None, None)
        with self._maintenance() as link:
            schemas.prepare(link, target, create=bool(create) and not read_only)
        _open_backends.add(self)

    # -- connections ---------------------------------------------------------------------------

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    @contextmanager
    def _maintenance(self) -> Iterator[Link]:
        """A connection for one long task, which keeps none from those who save."""
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

    def _go_on(self, e: psycopg.Error, deadline: float, pause: float) -> None:
        """Before another try; raises if there is no use or no time for one."""
        cut = is_cut(e)
        if time.monotonic() + pause >= deadline or not (cut or is_worth_another_try(e)):
            raise self._target.error(e) from e
        if cut:
            self._connections.distrust()
        time.sleep(pause)

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        self._connections.check_open()
        with self._target.translated(), ExitStack() as held:

            def begin() -> Link:
                deadline = self._deadline()
                for pause in _pauses():
                    lent = ExitStack()
                    try:
                        link = lent.enter_context(self._connections.lend(deadline))
                        link.ask(_BEGIN)
                    except psycopg.Error as e:
                        lent.close()
                        self._go_on(e, deadline, pause)
                    except BaseException:
                        lent.close()
                        raise
                    else:
                        held.push(lent)
                        held.callback(_end, link)
                        link.deadline = None
                        return link
                raise AssertionError

            yield PostgresReader(begin(), self._target, begin)

    # -- writing -------------------------------------------------------------------------------

    def commit(self, change: Change) -> None:
        self._check_writable()
        deadline = self._deadline()
        alone = self._join(change) if batch.fits(change) else _Alone()
        if alone is not None:
            self._write_alone(change, deadline, alone.why)
        self._notifier.poke()

    def jot(self, jot: Jot) -> None:
        self._check_writable()
        self._write_alone(jot, self._deadline())
        self._notifier.poke()

    def renew(self, session: int, token: bytes) -> bool:
        self._check_writable()
        return self._aside(lambda link: writer.renew(link, session, token))

    def _join(self, change: Change) -> _Alone | None:
        try:
            self._group.join(change)
        except _Alone as e:
            return e
        return None

    def _write_together(self, members: list[Member[Change]]) -> None:
        """Whoever does not fit in, or whose outcome is unknown, goes on by himself."""
        ours: dict[int, Member[Change]] = {}
        for member in members:
            if ours.setdefault(member.change.session, member) is not member:
                member.finish(_Alone())
        changes = [member.change for member in ours.values()]
        allowed = max(self._timeout / 3, sum([writer.seconds(change) for change in changes]))
        unsure: psycopg.Error | None = None
        try:
            with self._connections.saver(time.monotonic() + allowed) as link:
                unsure = psycopg.OperationalError("another thread was interrupted")
                if len(changes) == 1:
                    writer.write(link, *changes)
                    done = {*ours}
                else:
                    done = batch.write(link, changes)
            for session, member in ours.items():
                member.finish(None if session in done else _Alone())
        except psycopg.Error as e:
            unsure = unsure and e  # without a connection nothing was sent
            if is_cut(e):
                self._connections.distrust()
        except Exception as e:
            if len(changes) > 1:
                raise
            ours[changes[0].session].finish(e)
        finally:
            for member in ours.values():
                if not member.done:
                    member.finish(_Alone(unsure))

    def _write_alone(
        self, change: Change | Jot, deadline: float, unsure: psycopg.Error | None = None
    ) -> None:
        """By ourselves, after a try with others that failed, or without one."""
        writer.check_size(change)
        if unsure is not None and not is_cut(unsure):
            unsure = None
        for pause in _pauses():
            sent = False
            try:
                with self._connections.lend(deadline) as link:
                    sent = True
                    self._attempt(link, change, unsure)
                break
            except psycopg.Error as e:
                if sent and is_cut(e):
                    unsure = e
                try:
                    self._go_on(e, deadline, pause)
                except Unavailable as refused:
                    if unsure is not None:
                        raise self._unknown(unsure) from e
                    raise refused from e

    def _attempt(self, link: Link, change: Change | Jot, unsure: psycopg.Error | None) -> None:
        """One try at a change; after one whose outcome is `unsure`, a refusal may be an echo.

        It gets the time it needs even if that is the last: a lock is given up sooner than that.
        """
        before, seconds = link.patience, writer.seconds(change)
        link.deadline = time.monotonic() + max(self._timeout / 3, seconds)
        link.patience = self._timeout + 1.0 + seconds  # the server's time begins when it has it
        try:
            if isinstance(change, Change) and change.notes and change.notes.copied is not None:
                gc.write_copied(link, self._target.schema, change, change.notes.copied)
            else:
                writer.write(link, change)
        except (Moved, Gone, Conflict, Corrupt):
            if unsure is None:
                raise
            link.deadline = None
            made = writer.landed(link, change)
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
        """In a transaction of gc. What was done already is not found a second time."""
        # Always durable: if a sweep were forgotten, a trim would take rows that are needed again.
        self._check_writable()
        deadline, target = self._deadline(), self._target._replace(durability="full")
        for pause in _pauses():
            try:
                link = target.connect()
                try:
                    with gc.alone(link, self._target.schema):
                        done = do(link)
                finally:
                    link.close()
                self._notifier.poke()
                return done
            except psycopg.Error as e:
                self._go_on(e, deadline, pause)
        raise AssertionError

    def sweep(self, sweeps: Sequence[Sweep]) -> list[bool]:
        def do(link: Link) -> list[bool]:
            gc.begin_sweeps(link, sweeps)
            reader = PostgresReader(link, self._target)
            done = []
            for sweep in sweeps:
                done.append(sweep.is_current(reader))
                if done[-1]:
                    gc.sweep(link, sweep)
            return done

        return self._collect(do)

    def trim(self, trim: Trim) -> int:
        return self._collect(lambda link: gc.trim(link, trim))

    def compact(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make room that was freed usable again; what lies at the end of a table is given back."""
        self._check_writable()
        tables = [*schemas.TABLES]
        with self._maintenance() as link:
            link.take_your_time()
            for n, table in enumerate(tables, start=1):
                self._tend(link, f"VACUUM {table}")
                if progress is not None:
                    progress(n, len(tables))

    def reindex(self) -> None:
        self._check_writable()
        with self._maintenance() as link:
            link.take_your_time()
            for table in schemas.TABLES:
                self._tend(link, f"REINDEX TABLE {table}")
            rehash(link)

    def _tend(self, link: Link, sql: str) -> None:
        """What only an owner may do, and what matters little if it has to wait for another time."""
        try:
            link.execute(sql)
        except (pg.InsufficientPrivilege, pg.LockNotAvailable, pg.DeadlockDetected) as e:
            logger.warning("%s on %s was left out: %s", sql, self.path, self._target.plain(e))
        except Unconfirmed as e:  # so one is told that one may not VACUUM
            logger.debug("%s on %s: %s", sql, self.path, self._target.plain(e))

    # -- small things --------------------------------------------------------------------------

    def _aside(self, do: Callable[[Link], _T]) -> _T:
        deadline = self._deadline()
        for pause in _pauses():
            try:
                with self._connections.side(deadline) as link:
                    return do(link)
            except psycopg.Error as e:
                self._go_on(e, deadline, pause)
        raise AssertionError

    def version(self) -> object:
        """What the heads are, looked at again if any transaction of the server has ended since."""

        def look(link: Link) -> object:
            snapshot, state = self._version
            if link.rows(_SNAPSHOT) != [(snapshot,)]:
                [(snapshot, *state)] = link.rows(_STATE)
                self._version = (snapshot, tuple(state))
            return self._version[1]

        return self._aside(look)

    def wait(self, seconds: float) -> None:
        self._listener.wait(seconds)

    def backup(self, path: Path) -> None:
        raise InvalidRequest(
            f"the store {self.path} cannot be backed up to {path}",
            hint="use pg_dump, or copy() it to another store",
        )

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        """Durable before anybody uses a number.

        A client outlives a crash of its server: had the server forgotten the reservation, it would
        give numbers a second time that the client still goes on to use.
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
        return  # its own hooks see to that

    def close(self) -> None:
        self._notifier.stop()
        self._listener.stop()
        self._connections.close()
        _open_backends.discard(self)


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


# -- fork safety ---------------------------------------------------------------------------------

_open_backends: weakref.WeakSet[PostgresBackend] = weakref.WeakSet()
_forking: list[PostgresBackend] = []


def _before_fork() -> None:
    for backend in list(_open_backends):
        backend._connections.before_fork()
        _forking.append(backend)


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._connections.after_fork_in_parent()


def _after_fork_in_child() -> None:
    while _forking:
        backend = _forking.pop()
        backend._connections.reset()
        backend._group.reset()
        backend._notifier.reset()
        backend._listener.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
