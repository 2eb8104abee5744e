"""Writing to SQLite: the statements of a commit and of gc.

Each function expects an open connection, and leaves with its transaction committed or with an
exception; the caller rolls back. Everything is bound as a parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw

from holdfast import clock
from holdfast.backends.base import Gone, Jot, Moved, Turnover
from holdfast.backends.sqlite_reader import name_hash
from holdfast.codec.records import (
    COPIED,
    FREED,
    SEQ_BITS,
    position,
    seal_counter,
    unseal_counter,
)
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import Corrupt, KeyTaken, SessionExists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.backends.base import Change, Copied, Notes, Sweep, Trim

_MAX_BINDINGS = 8

_BEGIN = "BEGIN IMMEDIATE; "
_SWAP = "UPDATE heads SET body = ? WHERE session = ? AND body = ?"
_HEAD = """INSERT INTO heads VALUES (?, ?)
ON CONFLICT (session) DO UPDATE SET body = excluded.body WHERE body = x''"""
_CREATE = """INSERT INTO sessions VALUES (?, ?, ?, ?);
INSERT INTO names VALUES (?, ?); INSERT INTO heads VALUES (?, ?)"""
_ITEM = "INSERT INTO items VALUES (?, ?); "
_PACKED = "DELETE FROM items WHERE pos >= ? AND pos < ?; "
# A blob that goes and comes back must not look to gc like the one that was there before.
_SHARE = """INSERT INTO blobs (digest, uses, body) VALUES (?, random() & 0xffffffff, ?)
ON CONFLICT (digest) DO UPDATE SET uses = uses + 1"""
_REWRITE = _SHARE + ", body = excluded.body"
_CHECKPOINT = "INSERT INTO checkpoints VALUES (?, ?, ?); "
# The most frequent change is one statement, which is a transaction of its own: a row for a view of
# the writing connection alone, and a trigger that puts its parts where they belong.
_APPEND = "INSERT INTO appends VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_APPENDS = """CREATE TEMP VIEW appends (head, session, expect, item, row, pos, id, body)
AS SELECT 0, 0, 0, 0, 0, 0, 0, 0;
CREATE TEMP TRIGGER append INSTEAD OF INSERT ON appends BEGIN
UPDATE main.heads SET body = NEW.head WHERE session = NEW.session AND body = NEW.expect;
SELECT RAISE(ABORT, 'moved') WHERE changes() <> 1;
INSERT INTO items VALUES (NEW.item, NEW.row);
INSERT INTO checkpoints VALUES (NEW.pos, NEW.id, NEW.body);
END"""


def prepare(connection: apsw.Connection) -> None:
    """For a connection that is going to write."""
    connection.execute(_APPENDS)


def write(connection: apsw.Connection, cursor: apsw.Cursor, change: Change | Jot) -> None:
    """One change in a transaction of its own."""
    if not _write_at_once(connection, cursor, change):
        _write(connection, cursor, change, _BEGIN, "COMMIT")


def _write_at_once(connection: apsw.Connection, cursor: apsw.Cursor, change: Change | Jot) -> bool:
    """A change that takes one statement; False, and nothing done, if it takes more.

    Such a statement is a transaction by itself. Within another, it leaves nothing if it fails.
    """
    if isinstance(change, Jot):
        if len(change.entries) != 1:
            return False
        _jot(connection, cursor, change, "", "")
        return True
    rows = change.rows
    if (
        change.notes is not None
        or len(rows) != 1
        or rows[0][2]
        or not change.checkpoint
        or change.blobs
        or change.create
    ):
        return False
    session = change.session
    (stream, first, _, row), (seq, id, body) = rows[0], change.checkpoint
    item, pos = stream << STREAM_BITS | first, session << SEQ_BITS | seq
    values = (change.head, session, change.expect, item, row, pos, id, body)
    try:
        cursor.execute(_APPEND, values)
    except apsw.ConstraintError as e:
        if str(e) == "moved":
            raise Moved from None
        raise _taken() from e
    return True


def write_many(
    connection: apsw.Connection,
    cursor: apsw.Cursor,
    changes: Sequence[Change | Jot],
    outcomes: list[BaseException | None],
) -> None:
    """Several changes in one transaction; `outcomes` gets what is wrong with each, or None.

    A change that is refused leaves nothing behind, and does not harm the others. Any other error
    is raised, and then nothing of all this is written.
    """
    cursor.execute("BEGIN IMMEDIATE")
    for change in changes:
        try:
            # Most take one statement, which needs no savepoint.
            if not _write_at_once(connection, cursor, change):
                _write_within(connection, cursor, change)
            outcomes.append(None)
        except (Moved, Gone, KeyTaken, SessionExists) as e:
            outcomes.append(e)
    cursor.execute("COMMIT")


def _write_within(connection: apsw.Connection, cursor: apsw.Cursor, change: Change | Jot) -> None:
    """All of a change or nothing, as a part of a transaction."""
    cursor.execute("SAVEPOINT member")
    try:
        _write(connection, cursor, change, "", "")
    except (Moved, Gone, KeyTaken, SessionExists):
        cursor.execute("ROLLBACK TO member; RELEASE member")
        raise
    cursor.execute("RELEASE member")


def _write(
    connection: apsw.Connection,
    cursor: apsw.Cursor,
    change: Change | Jot,
    before: str,
    after: str,
) -> None:
    if isinstance(change, Jot):
        _jot(connection, cursor, change, before, after)
    else:
        _apply(connection, cursor, change, before, after)


def _apply(
    connection: apsw.Connection, cursor: apsw.Cursor, change: Change, before: str, after: str
) -> None:
    """All statements of a change. Several go in one call: a call costs as much as a statement."""
    execute = cursor.execute
    session = change.session
    if change.create is None:
        if change.expect:
            execute(before + _SWAP, (change.head, session, change.expect))
        else:  # a head that was lost
            execute(before + _HEAD, (session, change.head))
        if connection.changes() != 1:
            raise Moved
    else:
        name, row = change.create
        origin = change.notes.origin if change.notes else None
        where = None if origin is None else position(*origin)
        try:
            execute(
                before + _CREATE,
                (session, name, where, row, name_hash(name), session, session, change.head),
            )
        except apsw.ConstraintError:
            raise SessionExists("a session of this name exists already") from None
    if change.notes is not None:
        _write_notes(connection, execute, session, change.notes, change.checkpoint)
    for digest, body, rewrite in change.blobs:
        execute(_REWRITE if rewrite else _SHARE, (digest, body))
    sql = ""
    values: list[Any] = []
    for stream, first, replaces, body in change.rows:
        pos = stream << STREAM_BITS | first
        if len(values) >= _MAX_BINDINGS:
            _put(cursor, sql, values)
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
    if sql + after:
        _put(cursor, sql + after, values)


_ENTRY = "INSERT INTO journal SELECT ?, ? WHERE "
_OURS = "EXISTS (SELECT 1 FROM leases WHERE session = ? AND token = ?); "
_THERE_IS = "EXISTS (SELECT 1 FROM heads WHERE session = ?); "


def _jot(
    connection: apsw.Connection, cursor: apsw.Cursor, jot: Jot, before: str, after: str
) -> None:
    """Entries of a journal; each is written only if the lease is what it should be."""
    where = (jot.session,) if jot.token is None else (jot.session, jot.token)
    text = _ENTRY + (_THERE_IS if jot.token is None else _OURS)
    pos, last = jot.session << SEQ_BITS | jot.first, len(jot.entries) - 1
    for n, body in enumerate(jot.entries):
        sql = (before if not n else "") + text + (after if n == last else "")
        try:
            cursor.execute(sql, (pos + n, body, *where))
        except apsw.ConstraintError:
            raise Moved from None
        if connection.changes() != 1:
            raise Moved


def _put(cursor: apsw.Cursor, sql: str, bindings: Any) -> None:
    try:
        cursor.execute(sql, bindings)
    except apsw.ConstraintError as e:
        raise _taken() from e


def _taken() -> Corrupt:
    return Corrupt("a row that is about to be written exists already")


def _write_notes(
    connection: apsw.Connection,
    execute: Any,
    session: int,
    notes: Notes,
    checkpoint: tuple[int, bytes, bytes] | None,
) -> None:
    _check_there(connection, execute, notes)
    if notes.copied is not None:
        _check_turn(execute, FREED, notes.copied.freed)
        turn(execute, COPIED)
    if notes.rename is not None:
        _rename(execute, session, *notes.rename)
    if notes.key is not None and checkpoint is not None:
        try:
            execute("INSERT INTO keys VALUES (?, ?, ?)", (session, notes.key, checkpoint[0]))
        except apsw.ConstraintError:
            raise KeyTaken("the key names another checkpoint of this session") from None
    for key, seq in notes.keys:
        execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?)", (session, key, seq))
    for seq, kind, value in notes.unmarks:
        execute(
            "DELETE FROM marks WHERE pos = ? AND kind = ? AND value = ?",
            (position(session, seq), kind, value),
        )
    for seq, kind, value, body in notes.marks:
        execute(
            "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?)",
            (position(session, seq), kind, value, body),
        )
    if notes.operation is not None:
        number, body = notes.operation
        execute("INSERT INTO operations VALUES (?, ?)", (position(session, number), body))
    for seq, body in notes.tombs:
        execute("INSERT OR REPLACE INTO tombs VALUES (?, ?)", (position(session, seq), body))
    for seq in notes.untombs:
        execute("DELETE FROM tombs WHERE pos = ?", (position(session, seq),))
    for facet in notes.unfacets:
        execute("DELETE FROM facets WHERE kind = ? AND value = ? AND id = ?", facet)
    for facet in notes.facets:
        execute("INSERT OR IGNORE INTO facets VALUES (?, ?, ?)", facet)
    if notes.lease is not None:
        token, body = notes.lease
        row = (session, token, clock.boot_id(), clock.elapsed(), body)
        execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", row)
    if notes.copied is not None:
        _write_copied(execute, session, notes.copied)


def _write_copied(execute: Any, session: int, copied: Copied) -> None:
    for seq, id, body in copied.checkpoints:
        try:
            execute(_CHECKPOINT, (position(session, seq), id, body))
        except apsw.ConstraintError as e:
            raise _taken() from e
    for number, body in copied.operations:
        where = position(session, number)
        execute("INSERT OR REPLACE INTO operations VALUES (?, ?)", (where, body))
    for seq, ancestor, body in copied.gaps:
        row = (position(session, seq), ancestor, body)
        execute("INSERT OR REPLACE INTO gaps VALUES (?, ?, ?)", row)
    low, high = position(session, 0), position(session, copied.journal_from)
    execute("DELETE FROM journal WHERE pos >= ? AND pos < ?", (low, high))
    for number, body in copied.journal:
        where = position(session, number)
        try:
            execute("INSERT INTO journal VALUES (?, ?)", (where, body))
        except apsw.ConstraintError:
            raise Moved from None


def turn(execute: Any, space: str) -> None:
    """Say that something was freed or copied."""
    new = seal_counter(space, Turnover.new())
    execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (space, new))


def _check_turn(execute: Any, space: str, expected: int) -> None:
    found = execute("SELECT body FROM counters WHERE space = ?", (space,)).fetchall()
    if expected != (unseal_counter(space, found[0][0]) if found else 0):
        raise Gone


_RENEW = "UPDATE leases SET boot = ?, since = ? WHERE session = ? AND token = ?"


def renew(connection: apsw.Connection, session: int, token: bytes) -> bool:
    connection.execute(_RENEW, (clock.boot_id(), clock.elapsed(), session, token))
    return bool(connection.changes())


_THERE = "SELECT 1 FROM checkpoints WHERE pos = ?"
_ALIVE = """SELECT 1 FROM checkpoints WHERE pos = ?
AND NOT EXISTS (SELECT 1 FROM tombs WHERE tombs.pos = checkpoints.pos)"""


def _check_there(connection: apsw.Connection, execute: Any, notes: Notes) -> None:
    """Raise Gone unless all that the change builds on is there; note that blobs are shared."""
    for place in notes.needs:
        pos = position(*place)
        there = execute(_ALIVE if place[1] not in notes.untombs else _THERE, (pos,)).fetchall()
        if not there:
            raise Gone
    for digest in notes.shares:
        execute("UPDATE blobs SET uses = uses + 1 WHERE digest = ?", (digest,))
        if connection.changes() != 1:
            raise Gone


def _rename(execute: Any, session: int, name: bytes, row: bytes) -> None:
    [(old,)] = execute("SELECT name FROM sessions WHERE num = ?", (session,)).fetchall()
    try:
        execute("UPDATE sessions SET name = ?, body = ? WHERE num = ?", (name, row, session))
        execute("DELETE FROM names WHERE hash = ?", (name_hash(old),))
        execute("INSERT INTO names VALUES (?, ?)", (name_hash(name), session))
    except apsw.ConstraintError:
        raise SessionExists("a session of this name exists already") from None


# -- gc ------------------------------------------------------------------------------------------

_FREE = """DELETE FROM checkpoints WHERE pos BETWEEN ? AND ?;
DELETE FROM tombs WHERE pos BETWEEN ? AND ?; DELETE FROM gaps WHERE pos BETWEEN ? AND ?;
DELETE FROM marks WHERE pos BETWEEN ? AND ?"""


def sweep(cursor: apsw.Cursor, sweep: Sweep) -> None:
    execute, many = cursor.execute, cursor.executemany
    session = sweep.session
    low = high = -1
    for seq in sorted([seq for seq, _ in sweep.checkpoints]):
        if seq != high + 1:
            _free(execute, session, low, high)
            low = seq
        high = seq
    _free(execute, session, low, high)
    many("DELETE FROM keys WHERE session = ? AND key = ?", [(session, k) for k in sweep.keys])
    many("DELETE FROM facets WHERE kind = ? AND value = ? AND id = ?", sweep.facets)
    for other, seq, ancestor, body in sweep.gaps:
        row = (position(other, seq), ancestor, body)
        execute("INSERT OR REPLACE INTO gaps VALUES (?, ?, ?)", row)
    low, high = position(session, 0), position(session, sweep.journal)
    execute("DELETE FROM journal WHERE pos >= ? AND pos < ?", (low, high))
    if sweep.remove is not None:
        low, high = position(session, 0), position(session + 1, 0)
        execute("DELETE FROM journal WHERE pos >= ? AND pos < ?", (low, high))
        execute("DELETE FROM leases WHERE session = ?", (session,))
        execute("DELETE FROM sessions WHERE num = ?", (session,))
        execute("DELETE FROM names WHERE hash = ?", (name_hash(sweep.remove),))
        execute("DELETE FROM heads WHERE session = ?", (session,))
        execute("DELETE FROM operations WHERE pos >= ? AND pos < ?", (low, high))
        execute("DELETE FROM gaps WHERE pos = ?", (low,))


def _free(execute: Any, session: int, low: int, high: int) -> None:
    """A run of checkpoints, all of which go."""
    if low >= 0:
        execute(_FREE, (position(session, low), position(session, high)) * 4)


_DEAD = "DELETE FROM items WHERE pos = ? AND substr(body, 1, 9) IS ?"  # damaged ones, too


def trim(connection: apsw.Connection, cursor: apsw.Cursor, trim: Trim) -> int:
    execute = cursor.execute
    execute(_BEGIN)
    _check_turn(execute, COPIED, trim.copied)
    turn(execute, FREED)
    gone = 0
    for rows, instead in trim.items:
        execute("SAVEPOINT together")
        here = 0
        for row in rows:
            execute(_DEAD, row)
            here += connection.changes()
        if here < len(rows):
            execute("ROLLBACK TO together")
        else:
            gone += here
            for new in instead:
                execute("INSERT INTO items VALUES (?, ?)", new)
        execute("RELEASE together")
    for blob in trim.blobs:
        execute("DELETE FROM blobs WHERE digest = ? AND uses = ?", blob)
        gone += connection.changes()
    execute("COMMIT")
    return gone
