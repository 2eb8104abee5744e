"""Write batches to SQLite.

Each function expects an open connection. It commits its transaction or raises; the caller rolls
back. All values are bound as parameters.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import apsw

from holdfast import clock
from holdfast.errors import KeyTaken, SessionExists
from holdfast.format.records import MAX_SEQ, SEQ_BITS, position
from holdfast.storage.contract import (
    Delete,
    DeleteIf,
    DeleteRange,
    Equals,
    Insert,
    MissingReference,
    Present,
    Put,
    Rename,
    Share,
    StaleHead,
    check,
)
from holdfast.storage.sqlite.reader import COMPUTED, SqliteView, name_hash
from holdfast.storage.sqlite.schema import SPANS_OF_ROWS
from holdfast.storage.tables import LEASES, SESSIONS, SESSIONS_BY_NAME, TABLES
from holdfast.storage.tally import TALLY_MASK, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.storage.contract import Batch, Guard, Refusal, Swap, Write
    from holdfast.storage.reader import Reader
    from holdfast.storage.tables import Index, Row

_MAX_BINDINGS = 16
_MAX_PLAIN = 4

_BEGIN = "BEGIN IMMEDIATE; "
_SWAP = "UPDATE heads SET body = ? WHERE session = ? AND body = ?"
_NEW_HEAD = """INSERT INTO heads VALUES (?, ?)
ON CONFLICT (session) DO UPDATE SET body = excluded.body WHERE body = x''"""
# A blob that is removed and written again must not look to gc like the one before.
_SHARE = """INSERT INTO blobs (digest, uses, body) VALUES (?, random() & 0xffffffff, ?)
ON CONFLICT (digest) DO UPDATE SET uses = uses + 1"""
_REWRITE = _SHARE + ", body = excluded.body; "
_SHARE += "; "
_USE = "UPDATE blobs SET uses = uses + 1 WHERE digest = ?"
# The most frequent batch is one statement, and so one transaction: it inserts a row into a view of
# the writing connection, and a trigger writes its parts to the tables.
_APPEND = "INSERT INTO appends VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_APPENDS = """CREATE TEMP VIEW appends (head, session, expect, item, row, pos, id, body)
AS SELECT 0, 0, 0, 0, 0, 0, 0, 0;
CREATE TEMP TRIGGER append INSTEAD OF INSERT ON appends BEGIN
UPDATE main.heads SET body = NEW.head WHERE session = NEW.session AND body = NEW.expect;
SELECT RAISE(ABORT, 'moved') WHERE changes() <> 1;
INSERT INTO items VALUES (NEW.item, NEW.row);
INSERT INTO checkpoints VALUES (NEW.pos, NEW.id, NEW.body);
END"""
# An entry of a journal is one statement, too. It must be the next entry. The lease must have the
# token; without a token, the session must exist.
_ENTRY = "INSERT INTO jots VALUES (?, ?, ?, ?, ?)"
_ENTRIES = """CREATE TEMP VIEW jots (session, token, number, pos, body) AS SELECT 0, 0, 0, 0, 0;
CREATE TEMP TRIGGER jot INSTEAD OF INSERT ON jots BEGIN
INSERT INTO spans SELECT NEW.session, 1, NEW.number + 1
WHERE iif(NEW.token IS NULL, EXISTS (SELECT 1 FROM heads WHERE session = NEW.session),
EXISTS (SELECT 1 FROM leases WHERE session = NEW.session AND token = NEW.token))
AND (NEW.number = 1 OR EXISTS (SELECT 1 FROM spans WHERE session = NEW.session))
ON CONFLICT (session) DO UPDATE SET next = excluded.next WHERE next = NEW.number;
SELECT RAISE(ABORT, 'moved') WHERE changes() <> 1;
INSERT INTO journal VALUES (NEW.pos, NEW.body);
END"""
# Sums over rows, and the second index of names, are kept by triggers of the writing connection.
_NONE = {"marks": "0", "operations": "0", "tombs": "0", "lease": "NULL"}
_TALLY = """CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} BEGIN
INSERT INTO tallies VALUES ({session}, {values}) ON CONFLICT (session) DO UPDATE SET {change};
END"""
_NAMES = (
    """CREATE TEMP TRIGGER name_added AFTER INSERT ON main.sessions BEGIN
INSERT INTO names VALUES (name_hash(NEW.name), NEW.num); END""",
    """CREATE TEMP TRIGGER name_removed AFTER DELETE ON main.sessions BEGIN
DELETE FROM names WHERE hash = name_hash(OLD.name); END""",
    """CREATE TEMP TRIGGER name_changed AFTER UPDATE OF name ON main.sessions BEGIN
DELETE FROM names WHERE hash = name_hash(OLD.name);
INSERT INTO names VALUES (name_hash(NEW.name), NEW.num); END""",
)
_REFUSALS = (StaleHead, MissingReference, KeyTaken, SessionExists)


def prepare(connection: apsw.Connection) -> None:
    """Create the temporary views and triggers through which a connection writes."""
    functions: list[tuple[str, Any, int]] = [
        ("name_hash", name_hash, 1),
        ("tally", Tally.of_row, 1),
        ("lease_tally", Tally.of_lease, 2),
    ]
    for name, function, arguments in functions:
        connection.create_scalar_function(name, function, arguments, deterministic=True)
    connection.execute("PRAGMA recursive_triggers = 1")  # a row that is replaced is deleted, too
    for sql in (_APPENDS, _ENTRIES, *_NAMES, *_tallies()):
        connection.execute(sql)


def _tallies() -> Iterator[str]:
    """Yield the triggers that keep the tallies."""
    for table in ("marks", "operations", "tombs"):
        change = f"{table} = ({table} + excluded.{table}) & {TALLY_MASK}"
        for event, value in (
            ("INSERT", "tally(NEW.body)"),
            ("DELETE", f"(-tally(OLD.body)) & {TALLY_MASK}"),
        ):
            session = f"{'NEW' if event == 'INSERT' else 'OLD'}.pos >> {SEQ_BITS}"
            yield _tally(table, event, session, {table: value}, change)
    lease = {"lease": "lease_tally(NEW.token, NEW.body)"}
    yield _tally("leases", "INSERT", "NEW.session", lease, "lease = excluded.lease")


def _tally(table: str, event: str, session: str, value: dict[str, str], change: str) -> str:
    values = ", ".join((_NONE | value).values())
    return _TALLY.format(table=table, event=event, session=session, values=values, change=change)


def write(connection: apsw.Connection, cursor: apsw.Cursor, batch: Batch) -> None:
    """Write one batch as one transaction."""
    if not _write_at_once(cursor, batch):
        _write(connection, cursor, batch, _BEGIN, "COMMIT")


def _write_at_once(cursor: apsw.Cursor, batch: Batch) -> bool:
    """Write a batch that takes one statement. Return False, and write nothing, if it takes more.

    Such a statement is a transaction by itself. Within another transaction, it leaves nothing if it
    fails.
    """
    writes = batch.writes
    if len(writes) == 1 and len(batch.guards) == 1 and batch.swap is None:
        return _write_entry(cursor, batch.guards[0], writes[0])
    if len(writes) != 2 or batch.guards or batch.swap is None:
        return False
    item, checkpoint = writes
    if (
        type(item) is not Insert
        or type(checkpoint) is not Insert
        or item.table != "items"
        or checkpoint.table != "checkpoints"
    ):
        return False
    session, expect, head, refusal, _ = batch.swap
    try:
        cursor.execute(_APPEND, (head, session, expect, *item.row, *checkpoint.row))
    except apsw.ConstraintError as e:
        if str(e) == "moved":
            raise refusal() from None
        raise checkpoint.refusal() from e
    return True


def _write_entry(cursor: apsw.Cursor, guard: Guard, write: Write) -> bool:
    """Write an entry of a journal. Return False if the guard or the write is another one."""
    if type(write) is not Insert or write.table != "journal":
        return False
    if type(guard) is Equals and guard.by is LEASES:
        token = guard.value
    elif type(guard) is Present and guard.by is SESSIONS:
        token = None
    else:
        return False
    pos, body = write.row
    try:
        cursor.execute(_ENTRY, (*guard.key, token, pos & MAX_SEQ, pos, body))
    except apsw.ConstraintError:
        raise guard.refusal() from None
    return True


def write_many(
    connection: apsw.Connection,
    cursor: apsw.Cursor,
    batches: Sequence[Batch],
    outcomes: list[BaseException | None],
) -> None:
    """Write several batches in one transaction. Add the error of each, or None, to `outcomes`.

    A refused batch leaves nothing behind and does not affect the others. Any other error is raised,
    and then none of the batches is written.
    """
    cursor.execute("BEGIN IMMEDIATE")
    for batch in batches:
        try:
            # Most take one statement, which needs no savepoint.
            if not _write_at_once(cursor, batch):
                write_within(connection, cursor, batch)
            outcomes.append(None)
        except _REFUSALS as e:
            outcomes.append(e)
    cursor.execute("COMMIT")


def write_within(connection: apsw.Connection, cursor: apsw.Cursor, batch: Batch) -> None:
    """Write all of a batch or nothing, within an open transaction."""
    if len(batch.writes) == 1 and batch.swap is None:
        _write(connection, cursor, batch, "", "")  # one statement leaves nothing if it is refused
        return
    cursor.execute("SAVEPOINT member")
    try:
        _write(connection, cursor, batch, "", "")
    except _REFUSALS:
        cursor.execute("ROLLBACK TO member; RELEASE member")
        raise
    cursor.execute("RELEASE member")


def _write(
    connection: apsw.Connection, cursor: apsw.Cursor, batch: Batch, before: str, after: str
) -> None:
    if _write_plain(connection, cursor, batch, before, after):
        return
    statements = _Statements(connection, cursor, before)
    if batch.swap is not None:
        statements.swap(batch.swap)
    for guard in batch.guards:
        statements.check(guard)
    for write in batch.writes:
        statements.add(write)
    statements.execute(after)


_PLAIN = {
    "items": "INSERT INTO items VALUES (?, ?); ",
    "checkpoints": "INSERT INTO checkpoints VALUES (?, ?, ?); ",
}
_PACKED = "DELETE FROM items WHERE pos >= ? AND pos < ?; "


def _write_plain(
    connection: apsw.Connection, cursor: apsw.Cursor, batch: Batch, before: str, after: str
) -> bool:
    """Write a batch that has only a head, items and a checkpoint, as most saves have.

    Return False, and write nothing, if it has more. This code is short, because code that runs once
    between two waits for the disk runs with cold caches.
    """
    swap = batch.swap
    if swap is None or not swap.expect or batch.guards or len(batch.writes) > _MAX_PLAIN:
        return False
    sql, values = "", list[Any]()
    refusal: Refusal = swap.refusal
    for write in batch.writes:
        if type(write) is Insert and write.table in _PLAIN:
            sql += _PLAIN[write.table]
            values += write.row
            refusal = write.refusal
        elif type(write) is DeleteRange and write.table == "items":
            sql += _PACKED
            values += (write.low, write.high)
        else:
            return False
    cursor.execute(before + _SWAP, (swap.body, swap.session, swap.expect))
    if connection.changes() != 1:
        raise swap.refusal()
    if sql + after:
        try:
            cursor.execute(sql + after, values)
        except apsw.ConstraintError as e:
            if not _is_taken(e):
                raise
            raise refusal() from e
    return True


def _is_taken(error: Any) -> bool:
    """Return whether a statement failed because there is a row with its key."""
    return error.extendedresult in (
        apsw.SQLITE_CONSTRAINT_PRIMARYKEY,
        apsw.SQLITE_CONSTRAINT_ROWID,
        apsw.SQLITE_CONSTRAINT_UNIQUE,
    )


@cache
def _insert(table: str, *, replace: bool) -> str:
    marks = ", ".join("?" * (len(TABLES[table].columns) + 2 * (table == "leases")))
    return f"INSERT {'OR REPLACE ' * replace}INTO {table} VALUES ({marks}); "  # noqa: S608


@cache
def _delete(table: str) -> str:
    terms = [f"{column} = ?" for column in TABLES[table].columns[: TABLES[table].key]]
    return f"DELETE FROM {table} WHERE {' AND '.join(terms)}; "  # noqa: S608 - our own names


@cache
def _delete_range(table: str) -> str:
    return f"DELETE FROM {table} WHERE pos >= ? AND pos < ?; "  # noqa: S608


@cache
def _delete_if(by: Index, column: str) -> str:
    value = COMPUTED.get(column, column)
    return f"DELETE FROM {by.table} WHERE {by.by[0]} = ? AND {value} IS ?"  # noqa: S608 - a damaged one, too


_RENAME = "UPDATE sessions SET name = ?, body = ? WHERE num = ?; "
_SPAN = """INSERT INTO spans VALUES (?, ?, ?) ON CONFLICT (session) DO UPDATE SET
first = max(first, excluded.first), next = max(next, excluded.next); """


class _Statements:
    """Executes the statements of one batch.

    Those that return nothing are collected and executed in one call, because a call costs as much
    as a statement.
    """

    __slots__ = ("_connection", "_cursor", "_refusal", "_sql", "_values")

    def __init__(self, connection: apsw.Connection, cursor: apsw.Cursor, before: str) -> None:
        self._connection, self._cursor = connection, cursor
        self._sql, self._values = before, list[Any]()
        self._refusal: Refusal | None = None

    def _collect(self, sql: str, values: Sequence[Any], refusal: Refusal | None = None) -> None:
        if refusal is not self._refusal and refusal is not None:
            if self._refusal is not None:
                self.execute()
            self._refusal = refusal
        if len(self._values) >= _MAX_BINDINGS:
            self.execute()
            self._refusal = refusal
        self._sql += sql
        self._values += values

    def execute(self, sql: str = "", values: Sequence[Any] = ()) -> None:
        """Execute what was collected, and one more statement."""
        text, bindings, refusal = self._sql + sql, self._values, self._refusal
        if not text:
            return
        bindings += values
        self._sql, self._values, self._refusal = "", [], None
        try:
            self._cursor.execute(text, bindings)
        except apsw.ConstraintError as e:
            if refusal is None or not _is_taken(e):
                raise
            raise refusal() from e

    def _change(self, sql: str, values: Sequence[Any], refusal: Refusal) -> None:
        """Execute a statement. Raise the refusal unless it changes a row."""
        self.execute(sql, values)
        if not self._connection.changes():
            raise refusal()

    def swap(self, swap: Swap) -> None:
        session, expect, body, refusal, _ = swap
        if expect:
            self._change(_SWAP, (body, session, expect), refusal)
        else:  # a head that was lost
            self._change(_NEW_HEAD, (session, body), refusal)

    def check(self, guard: Guard) -> None:
        if guard.by is not SESSIONS_BY_NAME:  # its index refuses a second one
            self.execute()
            check(guard, SqliteView(self._connection))

    def add(self, write: Write) -> None:
        match write:
            case Insert(table, row, refusal):
                self._insert(table, row, refusal)
            case Put(table, row):
                self._insert(table, row, None, replace=True)
            case Delete(table, key):
                self._collect(_delete(table), key)
            case DeleteRange(table, low, high):
                self._collect(_delete_range(table), (low, high))
                if table == "journal":
                    self._collect(_SPAN, (low >> SEQ_BITS, high - low, high - low))
            case DeleteIf(by, key, column, value, refusal):
                self._change(_delete_if(by, column), (*key, value), refusal)
            case Rename(session, name, body, refusal):
                self._collect(_RENAME, (name, body, session), refusal)
            case Share(digest, None, _, refusal):
                self._change(_USE, (digest,), refusal)
            case Share(digest, body, rewrite):
                self._collect(_REWRITE if rewrite else _SHARE, (digest, body))

    def _insert(
        self, table: str, row: Row, refusal: Refusal | None, *, replace: bool = False
    ) -> None:
        if table == "leases":
            session, token, body = row
            row = session, token, clock.boot_id(), clock.elapsed(), body
        self._collect(_insert(table, replace=replace), row, refusal)
        if table == "journal":
            session, number = row[0] >> SEQ_BITS, row[0] & MAX_SEQ
            self._collect(_SPAN, (session, 1, number + 1), refusal)


_RENEW = "UPDATE leases SET boot = ?, since = ? WHERE session = ? AND token = ?"


def renew(connection: apsw.Connection, session: int, token: bytes) -> bool:
    connection.execute(_RENEW, (clock.boot_id(), clock.elapsed(), session, token))
    return bool(connection.changes())


_SPAN_OF_ROWS = f"""INSERT INTO spans {SPANS_OF_ROWS.format("WHERE pos BETWEEN ? AND ?")}
ON CONFLICT (session) DO UPDATE SET next = max(next, excluded.next)"""


def add_up_anew(connection: apsw.Connection, reader: Reader, session: int) -> bool:
    """Update the tally of a session to match its rows. Return whether it was different."""
    if reader.damage(session) is None:
        return False
    execute = connection.execute
    lease = (reader.tally(session) or Tally()).lease
    held = "SELECT token, body FROM leases WHERE session = ?"
    leases: list[Any] = execute(held, (session,)).fetchall()
    if lease is None and leases:
        lease = Tally.of_lease(*leases[0])
    sums = reader.sums(session).values()
    execute("INSERT OR REPLACE INTO tallies VALUES (?, ?, ?, ?, ?)", (session, *sums, lease))
    low, first = position(session, 0), position(session, reader.span(session).first)
    execute("DELETE FROM journal WHERE pos >= ? AND pos < ?", (low, first))
    execute(_SPAN_OF_ROWS, (low, low | MAX_SEQ))
    return True
