"""SQLite: the default. One file, many processes of one machine.

WAL with synchronous=FULL: a commit is on the disk when `commit` returns. One connection writes,
under a lock; readers have connections of their own and never wait for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import apsw

from holdfast.backends import disk
from holdfast.backends import sqlite_file as files
from holdfast.backends import sqlite_writer as writer
from holdfast.backends.base import Backend, Change, Reader
from holdfast.backends.group import Group, Member, finish_all
from holdfast.backends.sqlite_checkpointer import Checkpointer
from holdfast.backends.sqlite_indexes import reindex
from holdfast.backends.sqlite_reader import SqliteReader
from holdfast.codec.records import FREED, seal_counter, unseal_counter
from holdfast.errors import InvalidRequest, Unavailable, UnsupportedFormat
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from holdfast.backends.base import Jot, Sweep, Trim


_VACUUM_PAGES = 256
_PATIENCE = 0.1
"""Seconds until somebody who waits for readers looks again."""
_TRIES = 100


class _Visit:
    """Somebody who reads."""

    __slots__ = ("__weakref__", "connection", "thread")

    def __init__(self) -> None:
        self.connection: apsw.Connection | None = None
        self.thread = threading.get_ident()


class SqliteBackend(Backend):
    name = "sqlite"

    def __init__(
        self,
        path: Path,
        *,
        create: bool | None = None,
        read_only: bool = False,
        durability: str = "full",
        timeout: float = 30.0,
    ) -> None:
        self.path, self.read_only = disk.lasting(path), read_only
        self._options = {"durability": durability, "timeout": timeout}
        self._group = Group(self._write_many, self._write_one)
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._checkpointer = Checkpointer(self._connect, self._alone)
        self._writer: apsw.Connection | None = None
        self._readers: list[apsw.Connection] = []
        self._watcher: apsw.Connection | None = None
        self._watchers = 0
        self._reading: weakref.WeakSet[_Visit] = weakref.WeakSet()
        """Who reads now. Weak: one that is interrupted on its way out is forgotten all the same."""
        self._closed = False
        files.check_library()
        with files.translated(path):
            if not path.exists():
                if create is False or read_only:
                    raise files.missing(path)
                if not path.parent.is_dir():
                    raise Unavailable(
                        f"the folder {path.parent} does not exist", hint="make it first"
                    )
                files.create(path, durability=durability)
            self._open()
        _open_backends.add(self)

    # -- connections ---------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the first connection, check the schema, and make the WAL's name durable."""
        folder = self.path.resolve().parent  # the log lies beside the file itself, not a link to it
        disk.refuse_network(folder)
        connection = self._connect()
        try:
            if files.check_schema(connection, self.path) < files.FORMAT:
                if self.read_only:
                    raise UnsupportedFormat(
                        f"the store {self.path} has an older format",
                        hint="open it once without read_only to upgrade it",
                    )
                files.migrate(connection)
            if not self.read_only:
                try:
                    disk.sync(folder)
                except OSError as e:
                    raise Unavailable(f"cannot sync the folder of {self.path}: {e}") from e
                writer.prepare(connection)
        except BaseException:
            connection.close()
            raise
        if self.read_only:
            self._readers.append(connection)
        else:
            connection.set_wal_hook(self._checkpointer.after_commit)
            self._writer, self._cursor = connection, connection.cursor()

    def _connect(self) -> apsw.Connection:
        return files.connect(self.path, read_only=self.read_only, **self._options)  # type: ignore[arg-type]

    def _writing(self) -> apsw.Connection:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")
        if self.read_only:
            raise Unavailable(
                f"the store {self.path} was opened read-only", hint="open it without read_only"
            )
        if self._writer is not None and self._writer.in_transaction:
            # Whoever was about to roll this back was interrupted. What is written next must not
            # become a part of it: it would be acknowledged, and never committed.
            self._undo()
        if self._writer is None:
            self._open()
        return self._writer  # type: ignore[return-value]

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        healthy, visit = False, _Visit()
        try:
            try:
                with self._lock:
                    if self._closed:
                        raise InvalidRequest("the store is closed", hint="open it again")
                    self._reading.add(visit)
                    visit.connection = self._readers.pop() if self._readers else None
                if visit.connection is None:
                    visit.connection = self._connect()
                connection = visit.connection
                connection.execute("BEGIN")
                try:
                    yield SqliteReader(connection, self.path)
                finally:
                    # A disk that failed has ended it, or this very thread: see _release.
                    if visit.connection is not None and connection.in_transaction:
                        connection.execute("ROLLBACK")
                healthy = True
            finally:
                with self._lock:
                    self._reading.discard(visit)
                    if visit.connection is not None and (self._closed or not healthy):
                        visit.connection.close()
                    elif visit.connection is not None:
                        self._readers.append(visit.connection)
                    self._idle.notify_all()
        except apsw.ConnectionClosedError as e:
            raise InvalidRequest(
                "the process was forked, or the store closed, by a thread that was reading it",
                hint="not in what a store calls back, such as progress",
            ) from e
        except BaseException:
            with files.translated(self.path):
                raise

    def reset_lock(self) -> None:
        return  # its own hooks let go of everything before a fork

    def close(self) -> None:
        self._checkpointer.stop()
        with files.translated(self.path):
            while True:
                with self._group.lock, self._lock:
                    if self._closed or not self._others_read():
                        if not self._closed:
                            self._closed = True
                            _open_backends.discard(self)
                            self._release()
                        break
                self._wait_for_readers()
        self._group.wake()

    def _wait_for_readers(self) -> None:
        """Without holding what they may need to get on: some write while they read."""
        with self._lock:
            while self._others_read():
                self._idle.wait(_PATIENCE)

    def _others_read(self) -> bool:
        """Whether there is anybody to wait for: nobody waits for himself."""
        here = threading.get_ident()
        return any(visit.thread != here for visit in self._reading)

    def _release(self) -> None:
        """Close all connections. None is in use but by this thread, which cannot go on reading."""
        connections = [*self._readers, self._writer, self._watcher]
        self._readers.clear()
        self._writer = self._watcher = None
        for visit in self._reading:
            connections.append(visit.connection)
            visit.connection = None
        for connection in connections:
            if connection is not None:
                connection.close(force=True)

    # -- writing -------------------------------------------------------------------------------

    def commit(self, change: Change) -> None:
        self._group.join(change)

    def jot(self, jot: Jot) -> None:
        self._group.join(jot)

    def renew(self, session: int, token: bytes) -> bool:
        with self._transaction() as connection:
            return writer.renew(connection, session, token)

    def _write_one(self, change: Change | Jot) -> None:
        try:
            connection = self._writer
            if connection is None or connection.in_transaction:
                connection = self._writing()
            writer.write(connection, self._cursor, change)
        except BaseException:
            self._undo()
            with files.translated(self.path):
                raise

    def _write_many(self, members: list[Member[Change | Jot]]) -> None:
        if len(members) > 1:
            outcomes: list[BaseException | None] = []
            try:
                connection = self._writing()
                writer.write_many(connection, self._cursor, [m.change for m in members], outcomes)
                finish_all(members, outcomes)
                return
            except Exception as e:  # noqa: BLE001 - each on its own will tell whom it concerns
                self._undo()
                logger.debug("a group of %d commits failed: %s", len(members), e)
            except BaseException as e:  # this thread is interrupted; the others are not
                if len(outcomes) == len(members) and self._is_committed(e):
                    finish_all(members, outcomes)
                else:
                    self._undo()
                raise
        for member in members:
            try:
                self._write_one(member.change)
                member.finish()
            except Exception as e:  # noqa: BLE001 - raised in the thread whose change it is
                member.finish(e)

    def _is_committed(self, interrupt: BaseException) -> bool:
        """Whether a transaction, all of which was written, had ended well before an interrupt.

        It is over, too, where SQLite has rolled it back because the commit failed.
        """
        failed = isinstance(interrupt.__context__, apsw.Error)
        return not failed and self._writer is not None and not self._writer.in_transaction

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other thread writes."""
        try:
            with self._group.lock:
                yield
        finally:
            self._group.wake()

    @contextmanager
    def _transaction(self) -> Iterator[apsw.Connection]:
        with self._alone(), files.translated(self.path):
            try:
                yield self._writing()
            except BaseException:
                self._undo()
                raise

    def sweep(self, sweeps: Sequence[Sweep]) -> list[bool]:
        with self._transaction() as connection:
            connection.execute("BEGIN IMMEDIATE")
            reader = SqliteReader(connection, self.path)
            done = []
            for sweep in sweeps:
                done.append(sweep.is_current(reader))
                if done[-1]:
                    writer.sweep(self._cursor, sweep)
            writer.turn(connection.execute, FREED)
            connection.execute("COMMIT")
            return done

    def trim(self, trim: Trim) -> int:
        with self._transaction() as connection:
            return writer.trim(connection, self._cursor, trim)

    def compact(self, progress: Callable[[int, int], None] | None = None) -> None:
        """A few pages at a time, so that savers get their turn."""
        done = 0
        while True:
            with self._transaction() as connection:
                left: int = connection.pragma("freelist_count")
                connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
                after: int = connection.pragma("freelist_count")
            done += left - after
            if progress is not None:
                progress(done, done + after)
            if after >= left:
                break
        with files.translated(self.path):
            self._checkpointer.empty()

    def reindex(self) -> None:
        with self._transaction() as connection:
            reindex(connection)

    def version(self) -> object:
        with self._lock, files.translated(self.path):
            if self._closed:
                raise InvalidRequest("the store is closed", hint="open it again")
            if self._watcher is None:
                self._watcher = self._connect()
                self._watchers += 1
            # A number of this very connection, which changes with the commits of others.
            return self._watchers, self._watcher.pragma("data_version")

    def backup(self, path: Path) -> None:
        with files.translated(path):
            files.backup(self._connect, path)

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._transaction() as connection:
            connection.execute("BEGIN IMMEDIATE")
            body: Any = connection.execute(
                "SELECT body FROM counters WHERE space = ?", (space,)
            ).get
            first = unseal_counter(space, body)
            connection.execute(
                "UPDATE counters SET body = ? WHERE space = ?",
                (seal_counter(space, first + count), space),
            )
            connection.execute("COMMIT")
            return first

    def _undo(self) -> None:
        """Roll back what an exception left open."""
        connection = self._writer
        if connection is None:
            return
        try:
            old, self._cursor = self._cursor, connection.cursor()
            old.close(force=True)  # it may hold on to the error
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            # Its state is unknown; the next write opens another.
            self._writer = None
            with suppress(apsw.Error):
                connection.close()


# -- fork safety ---------------------------------------------------------------------------------
# A SQLite connection must not cross fork(): the child would inherit its idea of which locks it
# holds, without the locks. So all are closed before a fork, and reopened on the next use.

_open_backends: weakref.WeakSet[SqliteBackend] = weakref.WeakSet()
_one_at_a_time = threading.Lock()


class _Forking(threading.local):
    """What a thread that is about to fork keeps from all others."""

    held: Generator[None, None, None] | None = None


_forking = _Forking()


@contextmanager
def _at_rest(backend: SqliteBackend) -> Iterator[None]:
    """Nobody uses a backend, and it has no connections."""
    with backend._checkpointer.lock:
        while True:
            with backend._group.lock, backend._lock:
                if not backend._others_read():
                    backend._release()
                    yield
                    return
            backend._group.wake()
            backend._wait_for_readers()


def _all_at_rest() -> Generator[None, None, None]:
    with _one_at_a_time, ExitStack() as stack:
        for backend in list(_open_backends):
            stack.enter_context(_at_rest(backend))
        yield


def _before_fork() -> None:
    """Python goes on with the fork whatever is raised here: so an interrupt has to wait."""
    interrupt: BaseException | None = None
    for _ in range(_TRIES if _forking.held is None else 0):
        # All locks are those of a generator: it lets them go wherever it is interrupted.
        held = _all_at_rest()
        try:
            next(held)
            _forking.held = held
            break
        except BaseException as e:  # noqa: BLE001 - raised below
            interrupt = e
    if interrupt is not None:
        raise interrupt  # Python says that it was ignored


def _after_fork_in_parent() -> None:
    _let_go()
    for backend in list(_open_backends):
        backend._group.wake()


def _after_fork_in_child() -> None:
    _let_go()
    for backend in list(_open_backends):
        backend._group.reset()
        backend._checkpointer.reset()


def _let_go() -> None:
    if _forking.held is not None:
        _forking.held.close()
        _forking.held = None


if hasattr(os, "register_at_fork"):
    for _ in range(2):  # an interrupt may strike as the first is entered; the second does it then
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
