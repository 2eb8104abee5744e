"""SQLite, the default backend: one file, for many processes of one machine.

With WAL and synchronous=FULL, a commit is on the disk when `commit` returns. One connection writes,
under a lock. Readers have their own connections and never wait for the writer.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import apsw

from holdfast.errors import Corrupt, InvalidRequest, Unavailable, UnsupportedFormat
from holdfast.format.records import seal_counter, unseal_counter
from holdfast.log import logger
from holdfast.storage import fs
from holdfast.storage.contract import Backend, StaleHead, View
from holdfast.storage.group_commit import Group, Member, finish_all
from holdfast.storage.reader import Reader
from holdfast.storage.sqlite import schema, writer
from holdfast.storage.sqlite.reader import SqliteView
from holdfast.storage.sqlite.wal import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from holdfast.storage.contract import Batch


_VACUUM_PAGES = 256
_COMMIT = 32 << 10
"""Bytes that a commit writes in addition to its data: a few pages, twice."""
_PLENTY = 8 << 20
"""Free bytes on the disk from which on no space has to be saved."""
_PATIENCE = 0.1
"""Seconds after which a thread that waits for readers checks again."""
_TRIES = _PATIENT_TRIES = 100


class _Visit:
    """A read transaction in progress."""

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
        self.path, self.read_only = fs.absolute(path), read_only
        self._options = {"durability": durability, "timeout": timeout}
        self._group = Group(self._write_many, self._write_one)
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._checkpointer = Checkpointer(self._connect, self._alone)
        self._room = fs.Room(self.path.parent)
        self._overflowed = False
        """Whether a commit failed on a full disk and left pages behind the end of the log."""
        self._writer: apsw.Connection | None = None
        self._readers: list[apsw.Connection] = []
        self._watcher: apsw.Connection | None = None
        self._watchers = 0
        self._reading: weakref.WeakSet[_Visit] = weakref.WeakSet()
        """The readers at work. The set is weak, so a reader that was interrupted at its end is
        forgotten."""
        self._closed = False
        schema.check_library()
        with schema.translated(path):
            if not path.exists():
                if create is False or read_only:
                    raise schema.missing(path)
                schema.create(path, durability=durability, parents=create)
            self._open()
        _open_backends.add(self)

    # -- connections ---------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the first connection, check the schema, and make the WAL's name durable."""
        folder = self.path.resolve().parent  # the log is next to the file itself, not to a link
        fs.refuse_network(folder)
        connection = self._connect()
        try:
            found = schema.check_schema(connection, self.path)
            if self.read_only and found not in schema.SCHEMAS:
                raise UnsupportedFormat(
                    f"the store {self.path} has an older format",
                    hint="open it once without read_only to upgrade it",
                )
            if not self.read_only and found < schema.FORMAT:
                schema.migrate(connection)
                found = schema.check_schema(connection, self.path)
            self._is_tallied = found == schema.FORMAT
            if not self.read_only:
                try:
                    fs.sync(folder)
                except OSError as e:
                    raise Unavailable(f"cannot sync the folder of {self.path}: {e}") from e
                writer.prepare(connection)
        except BaseException:
            connection.close()
            if self.read_only:
                schema.remove_logs(self.path)
            raise
        if self.read_only:
            self._readers.append(connection)
        else:
            connection.set_wal_hook(self._checkpointer.after_commit)
            self._writer, self._cursor = connection, connection.cursor()

    def _connect(self) -> apsw.Connection:
        return schema.connect(self.path, read_only=self.read_only, **self._options)  # type: ignore[arg-type]

    def _writing(self) -> apsw.Connection:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")
        if self.read_only:
            raise Unavailable(
                f"the store {self.path} was opened read-only", hint="open it without read_only"
            )
        if self._writer is not None and self._writer.in_transaction:
            # An interrupt has prevented the rollback of this transaction. The next write must not
            # become a part of it: it would be acknowledged but never committed.
            self._undo()
        if self._writer is None:
            self._open()
        return self._writer  # type: ignore[return-value]

    @contextmanager
    def view(self) -> Iterator[View]:
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
                    yield SqliteView(connection, tallied=self._is_tallied)
                finally:
                    # A failed disk may have ended the transaction, or this thread: see _release.
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
                hint="do not fork or close in a callback, such as progress",
            ) from e
        except BaseException:
            with schema.translated(self.path):
                raise

    def reset_lock(self) -> None:
        return  # the hooks below close everything before a fork

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hold all locks, with no reader at work and no connection open, for os.fork()."""
        with self._checkpointer.lock:
            while True:
                with self._group.lock, self._lock:
                    if not self._others_read():
                        self._release()
                        yield
                        return
                self._group.wake()
                self._wait_for_readers()

    def wake(self) -> None:
        """Wake the threads that wait for a commit."""
        self._group.wake()

    def after_fork_in_child(self) -> None:
        self._group.reset()
        self._checkpointer.reset()

    def close(self) -> None:
        self._checkpointer.stop()
        with schema.translated(self.path):
            while True:
                with self._group.lock, self._lock:
                    if self._closed or not self._others_read():
                        if not self._closed:
                            self._closed = True
                            _open_backends.discard(self)
                            self._release()
                            if self.read_only:
                                schema.remove_logs(self.path)
                        break
                self._wait_for_readers()
        self._group.wake()

    def _wait_for_readers(self) -> None:
        """Wait until other threads do not read.

        Hold no lock that they may need: some write while they read.
        """
        with self._lock:
            while self._others_read():
                self._idle.wait(_PATIENCE)

    def _others_read(self) -> bool:
        """Return whether another thread is reading."""
        here = threading.get_ident()
        return any(visit.thread != here for visit in self._reading)

    def _release(self) -> None:
        """Close all connections.

        Only this thread may be using one, and it must not read any more.
        """
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

    def commit(self, batch: Batch) -> None:
        size = batch.size()
        if size:
            self._check_room(size)
        else:
            self._make_room()
        try:
            self._group.join(batch)
        except Unavailable:
            self._make_room()
            raise

    def _check_room(self, size: int) -> None:
        """Refuse a save that would use the space which gc and the write-back of the log need."""
        size = 2 * size + _COMMIT  # in the log, and in the main file
        if not self._room.has(size, self._checkpointer.pending):
            self._make_room()
            if not self._room.has(size, self._checkpointer.pending):
                with schema.translated(self.path):
                    raise apsw.FullError("the remaining space is kept for delete, prune and gc")

    def _make_room(self) -> None:
        """Write back the log if the disk is nearly full, so that the log need not grow."""
        if self._overflowed:
            self._overflowed = False
            with suppress(apsw.Error):
                self._checkpointer.cut()
        pending = self._checkpointer.pending
        if pending and fs.free_space(self.path.parent) < pending + _PLENTY:
            with suppress(apsw.Error):  # a failed save raises its own error
                self._checkpointer.write_back()

    def renew(self, session: int, token: bytes) -> bool:
        with self._transaction() as connection:
            return writer.renew(connection, session, token)

    def _write_one(self, batch: Batch) -> None:
        try:
            connection = self._writer
            if connection is None or connection.in_transaction:
                connection = self._writing()
            writer.write(connection, self._cursor, batch)
        except BaseException as e:
            self._undo()
            self._overflowed = self._overflowed or isinstance(e, apsw.FullError)
            with schema.translated(self.path):
                raise

    def _write_many(self, members: list[Member[Batch]]) -> None:
        if len(members) > 1:
            outcomes: list[BaseException | None] = []
            try:
                connection = self._writing()
                writer.write_many(connection, self._cursor, [m.change for m in members], outcomes)
                finish_all(members, outcomes)
                return
            except Exception as e:  # noqa: BLE001 - each is written alone then, and raises its own error
                self._undo()
                logger.debug("a group of %d commits failed: %s", len(members), e)
            except BaseException as e:  # only this thread is interrupted
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
        """Return whether a fully written transaction was committed before an interrupt.

        The transaction is over, too, if the commit failed and SQLite has rolled it back.
        """
        failed = isinstance(interrupt.__context__, apsw.Error)
        return not failed and self._writer is not None and not self._writer.in_transaction

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock for writing, so that no other thread writes."""
        try:
            with self._group.lock:
                yield
        finally:
            self._group.wake()

    @contextmanager
    def _transaction(self) -> Iterator[apsw.Connection]:
        with self._alone(), schema.translated(self.path):
            try:
                yield self._writing()
            except BaseException as e:
                self._undo()
                self._overflowed = self._overflowed or isinstance(e, apsw.FullError)
                raise

    def commit_all(self, first: Batch, rest: Sequence[Batch]) -> list[bool]:
        self._make_room()
        with self._transaction() as connection:
            connection.execute("BEGIN IMMEDIATE")
            writer.write_within(connection, self._cursor, first)
            done = []
            for batch in rest:
                done.append(False)
                with suppress(StaleHead):
                    writer.write_within(connection, self._cursor, batch)
                    done[-1] = True
            connection.execute("COMMIT")
            return done

    def compact(
        self, progress: Callable[[int, int], None] | None = None, *, erase: bool = False
    ) -> bool:
        """Free a few pages at a time, so that saves can run in between. They wait for VACUUM."""
        done, pages = 0, _VACUUM_PAGES
        while True:
            self._make_room()
            try:
                with self._transaction() as connection:
                    left: int = connection.pragma("freelist_count")
                    connection.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
                    after: int = connection.pragma("freelist_count")
            except Unavailable:
                if pages == 1:
                    raise
                pages = max(1, pages // 16)  # a full disk may have room for less
                continue
            done += left - after
            if progress is not None:
                progress(done, done + after)
            if after >= left:
                break
        with schema.translated(self.path):
            if erase:
                from holdfast.storage.sqlite.salvage import is_sound

                with self._checkpointer.lock, self._alone(), closing(self._connect()) as connection:
                    if not is_sound(connection):  # VACUUM can make damage worse
                        raise Corrupt(
                            f"the store {self.path} is damaged, so it is not rewritten",
                            hint="repair() it first",
                        )
                    connection.execute("VACUUM")
                return self._checkpointer.scrub(tries=_PATIENT_TRIES)
            return self._checkpointer.scrub()

    def salvage(self, accept: int | None = None) -> bool:
        from holdfast.storage.sqlite.salvage import salvage  # few stores ever need it

        if accept is not None:
            with self._transaction() as connection:
                connection.execute("BEGIN IMMEDIATE")
                reader = Reader(SqliteView(connection))
                done = writer.add_up_anew(connection, reader, accept)
                connection.execute("COMMIT")
                return done
        with self._transaction():  # so that no other thread writes
            done = salvage(self._connect)
        if done:
            with suppress(apsw.Error):  # the commit is done
                self._checkpointer.write_back()
        return done

    def version(self) -> object:
        with self._lock, schema.translated(self.path):
            if self._closed:
                raise InvalidRequest("the store is closed", hint="open it again")
            if self._watcher is None:
                self._watcher = self._connect()
                self._watchers += 1
            # A number of this connection. It changes with the commits of other connections.
            return self._watchers, self._watcher.pragma("data_version")

    def identity(self) -> object:
        return fs.identity(self.path)

    def backup(self, path: Path) -> None:
        with schema.translated(path):
            schema.backup(self._connect, path)

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
        """Roll back the transaction that an exception left open."""
        connection = self._writer
        if connection is None:
            return
        try:
            old, self._cursor = self._cursor, connection.cursor()
            old.close(force=True)  # it may keep a reference to the error
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            # Its state is unknown; the next write opens another connection.
            self._writer = None
            with suppress(apsw.Error):
                connection.close()


# -- fork safety ---------------------------------------------------------------------------------
# A SQLite connection must not be used across fork(): the child would believe that it holds locks
# which it has not. So all connections are closed before a fork, and opened again when needed.

_open_backends: weakref.WeakSet[SqliteBackend] = weakref.WeakSet()
_one_at_a_time = threading.Lock()


class _Forking(threading.local):
    """The locks that a thread holds while it forks."""

    held: Generator[None, None, None] | None = None


_forking = _Forking()


def _all_at_rest() -> Generator[None, None, None]:
    with _one_at_a_time, ExitStack() as stack:
        for backend in list(_open_backends):
            stack.enter_context(backend.at_rest())
        yield


def _before_fork() -> None:
    """Take all locks. Python forks even if this raises, so an interrupt is raised last."""
    interrupt: BaseException | None = None
    for _ in range(_TRIES if _forking.held is None else 0):
        # A generator holds the locks: it releases them wherever it is interrupted.
        held = _all_at_rest()
        try:
            next(held)
            _forking.held = held
            break
        except BaseException as e:  # noqa: BLE001 - raised below
            interrupt = e
    if interrupt is not None:
        raise interrupt  # Python prints that it is ignored


def _after_fork_in_parent() -> None:
    _let_go()
    for backend in list(_open_backends):
        backend.wake()


def _after_fork_in_child() -> None:
    _let_go()
    for backend in list(_open_backends):
        backend.after_fork_in_child()


def _let_go() -> None:
    if _forking.held is not None:
        _forking.held.close()
        _forking.held = None


if hasattr(os, "register_at_fork"):
    for _ in range(2):  # the second does the work if an interrupt stops the first
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
