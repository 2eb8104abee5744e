"""SQLite: the default. One file, many processes of one machine.

WAL with synchronous=FULL: a commit is on the disk when `commit` returns. One connection writes,
under a lock; readers have connections of their own and never wait for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import apsw

from holdfast.backends import sqlite_file as files
from holdfast.backends.base import Backend, Change, Moved, Reader
from holdfast.backends.sqlite_reader import SqliteReader, name_hash
from holdfast.codec.records import (
    SEQ_BITS,
    position,
    seal_counter,
    unseal_counter,
)
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import (
    Corrupt,
    InvalidRequest,
    KeyTaken,
    SessionExists,
    Unavailable,
    UnsupportedFormat,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_BINDINGS = 8


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
        self.path, self.read_only = path, read_only
        self._options = {"durability": durability, "timeout": timeout}
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._writer: apsw.Connection | None = None
        self._readers: list[apsw.Connection] = []
        self._reading = 0
        self._closed = False
        files.check_library()
        with files.translated(path):
            if not path.exists():
                if create is False or read_only:
                    raise files.missing(path)
                if not path.parent.is_dir():
                    raise Unavailable(f"the folder {path.parent} does not exist")
                files.create(path, durability=durability)
            self._open()
        _open_backends.add(self)

    # -- connections ---------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the first connection, check the schema, and make the WAL's name durable."""
        files.refuse_network(self.path.parent)
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
                    files.sync(self.path.parent)
                except OSError as e:
                    raise Unavailable(f"cannot sync the folder of {self.path}: {e}") from e
        except BaseException:
            connection.close()
            raise
        if self.read_only:
            self._readers.append(connection)
        else:
            self._writer, self._cursor = connection, connection.cursor()

    def _connect(self) -> apsw.Connection:
        return files.connect(self.path, read_only=self.read_only, **self._options)  # type: ignore[arg-type]

    def _writing(self) -> apsw.Connection:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")
        if self.read_only:
            raise Unavailable(f"the store {self.path} was opened read-only")
        if self._writer is None:
            self._open()
        return self._writer  # type: ignore[return-value]

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        with files.translated(self.path):
            with self._lock:
                if self._closed:
                    raise InvalidRequest("the store is closed", hint="open it again")
                self._reading += 1
                connection = self._readers.pop() if self._readers else None
            healthy = False
            try:
                if connection is None:
                    connection = self._connect()
                connection.execute("BEGIN")
                try:
                    yield SqliteReader(connection, self.path)
                finally:
                    connection.execute("ROLLBACK")
                healthy = True
            finally:
                with self._lock:
                    self._reading -= 1
                    if connection is not None and (self._closed or not healthy):
                        connection.close()
                    elif connection is not None:
                        self._readers.append(connection)
                    self._idle.notify_all()

    def reset_lock(self) -> None:
        return  # its own hooks let go of everything before a fork

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                _open_backends.discard(self)
                with files.translated(self.path):
                    self._release()

    def _release(self) -> None:
        """Close all connections and wait for those in use."""
        while self._reading:
            self._idle.wait()
        connections = [*self._readers, self._writer]
        self._readers.clear()
        self._writer = None
        for connection in connections:
            if connection is not None:
                connection.close(force=True)

    # -- writing -------------------------------------------------------------------------------

    def commit(self, change: Change) -> None:
        with self._lock:
            try:
                connection = self._writer or self._writing()
                _write(connection, self._cursor, change)
            except BaseException:
                if self._writer is not None:
                    self._roll_back(self._writer)
                with files.translated(self.path):
                    raise

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._lock, files.translated(self.path):
            connection = self._writing()
            connection.execute("BEGIN IMMEDIATE")
            try:
                body: Any = connection.execute(
                    "SELECT body FROM counters WHERE space = ?", (space,)
                ).get
                first = unseal_counter(space, body)
                connection.execute(
                    "UPDATE counters SET body = ? WHERE space = ?",
                    (seal_counter(space, first + count), space),
                )
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise
            return first

    def _roll_back(self, connection: apsw.Connection) -> None:
        try:
            self._cursor.close(force=True)  # it may hold on to the error
            self._cursor = connection.cursor()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            # Its state is unknown; the next write opens another.
            self._writer = None
            with suppress(apsw.Error):
                connection.close()


_SWAP = "BEGIN IMMEDIATE; UPDATE heads SET body = ? WHERE session = ? AND body = ?"
_CREATE = """BEGIN IMMEDIATE; INSERT INTO sessions VALUES (?, ?, ?);
INSERT INTO names VALUES (?, ?); INSERT INTO heads VALUES (?, ?)"""
_ITEM = "INSERT INTO items VALUES (?, ?); "
_PACKED = "DELETE FROM items WHERE pos >= ? AND pos < ?; "
_SHARE = "INSERT OR IGNORE INTO blobs (digest, body) VALUES (?, ?)"
_REWRITE = "INSERT OR REPLACE INTO blobs (digest, body) VALUES (?, ?)"
_CHECKPOINT = "INSERT INTO checkpoints VALUES (?, ?, ?); "
# The most frequent change in one call. Each statement goes on only if the one before changed a row.
_APPEND = f"""{_SWAP}; INSERT INTO items SELECT ?, ? WHERE changes();
INSERT INTO checkpoints SELECT ?, ?, ? WHERE changes(); COMMIT"""


def _write(connection: apsw.Connection, cursor: apsw.Cursor, change: Change) -> None:
    """One transaction. Several statements go in one call: a call costs as much as a statement."""
    execute = cursor.execute
    session, rows = change.session, change.rows
    if change.plain and len(rows) == 1 and not rows[0][2] and change.checkpoint:
        (stream, first, _, row), (seq, id, body) = rows[0], change.checkpoint
        _finish(
            execute,
            _APPEND,
            (change.head, session, change.expect, stream << STREAM_BITS | first, row,
             session << SEQ_BITS | seq, id, body),
        )  # fmt: skip
        if not connection.changes():
            raise Moved
        return
    if change.create is None:
        execute(_SWAP, (change.head, session, change.expect))
        if connection.changes() != 1:
            raise Moved
    else:
        try:
            name = change.create[0]
            execute(
                _CREATE,
                (session, *change.create, name_hash(name), session, session, change.head),
            )
        except apsw.ConstraintError:
            raise SessionExists("a session of this name exists already") from None
    if not change.plain:
        _write_annotations(execute, change)
    for digest, body, rewrite in change.blobs:
        execute(_REWRITE if rewrite else _SHARE, (digest, body))
    sql = ""
    values: list[Any] = []
    for stream, first, replaces, body in rows:
        pos = stream << STREAM_BITS | first
        if len(values) >= _MAX_BINDINGS:
            _finish(execute, sql, values)
            sql, values = "", []
        if replaces:
            sql += _PACKED
            values += (pos, pos + replaces)
        sql += _ITEM
        values += (pos, body)
    if change.checkpoint is not None:
        seq, id, body = change.checkpoint
        sql += _CHECKPOINT
        values += (session << SEQ_BITS | seq, id, body)
    _finish(execute, sql + "COMMIT", values)


def _finish(execute: Any, sql: str, bindings: Any) -> None:
    try:
        execute(sql, bindings)
    except apsw.ConstraintError as e:
        raise Corrupt("a row that is about to be written exists already") from e


def _write_annotations(execute: Any, change: Change) -> None:
    session = change.session
    if change.key is not None and change.checkpoint is not None:
        row = (session, change.key, change.checkpoint[0])
        try:
            execute("INSERT INTO keys VALUES (?, ?, ?)", row)
        except apsw.ConstraintError:
            raise KeyTaken("the key names another checkpoint of this session") from None
    for seq, kind, value in change.unmarks:
        execute(
            "DELETE FROM marks WHERE pos = ? AND kind = ? AND value = ?",
            (position(session, seq), kind, value),
        )
    for seq, kind, value, body in change.marks:
        execute(
            "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?)",
            (position(session, seq), kind, value, body),
        )
    if change.operation is not None:
        number, body = change.operation
        execute("INSERT INTO operations VALUES (?, ?)", (position(session, number), body))


# -- fork safety ---------------------------------------------------------------------------------
# A SQLite connection must not cross fork(): the child would inherit its idea of which locks it
# holds, without the locks. So all are closed before a fork, and reopened on the next use.

_open_backends: weakref.WeakSet[SqliteBackend] = weakref.WeakSet()
_forking: list[SqliteBackend] = []


def _before_fork() -> None:
    for backend in list(_open_backends):
        backend._lock.acquire()
        _forking.append(backend)
        backend._release()


def _after_fork() -> None:
    while _forking:
        _forking.pop()._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
