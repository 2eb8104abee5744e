"""Write batches to PostgreSQL.

A batch is one statement. Its first part compares and swaps the head. The other parts write only if
the head was swapped. Under READ COMMITTED, the swap waits for a transaction that holds the head's
row, and then reads the row again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from psycopg import errors as pg

from holdfast.errors import InvalidRequest
from holdfast.format.records import MAX_SEQ, SEQ_BITS
from holdfast.storage import contract
from holdfast.storage.contract import (
    Batch,
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
)
from holdfast.storage.postgres import schema as schemas
from holdfast.storage.postgres.reader import COMPUTED, PostgresView, hash_of
from holdfast.storage.postgres.schema import SUM
from holdfast.storage.tables import COUNTERS, LEASES, SESSIONS, SESSIONS_BY_NAME, TABLES
from holdfast.storage.tally import TALLY_MASK, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.storage.contract import Guard, Key, Refusal, Swap
    from holdfast.storage.postgres.connection import Link
    from holdfast.storage.tables import Row


_ALWAYS = "WITH moved AS (SELECT 1)"
_SWAP = """WITH moved AS (UPDATE heads SET body = %s WHERE session = %s AND body = %s
RETURNING session)"""
# A server that crashed may have lost the parent checkpoint, and another one may have got its number
# since. Then the head row is as expected, but refers to another checkpoint.
_SWAP_ON = """WITH moved AS (UPDATE heads SET body = %s WHERE session = %s AND body = %s
AND EXISTS (SELECT 1 FROM checkpoints WHERE pos = %s AND id = %s) RETURNING session)"""
_HEAD = """WITH moved AS (INSERT INTO heads AS h VALUES (%s, %s)
ON CONFLICT (session) DO UPDATE SET body = excluded.body WHERE h.body = '' RETURNING session)"""
# The lock prevents a takeover of the lease until this ends.
_LEASED = "WITH held AS (SELECT 1 FROM leases WHERE session = %s AND token = %s FOR SHARE)"
_EXISTS = "WITH held AS (SELECT 1 FROM heads WHERE session = %s FOR SHARE)"
_NEXT = """, moved AS (INSERT INTO spans AS s SELECT %s, 1, %s FROM held
WHERE %s = 1 OR EXISTS (SELECT 1 FROM spans WHERE session = %s)
ON CONFLICT (session) DO UPDATE SET next = excluded.next WHERE s.next = %s RETURNING session)"""
# A blob that is removed and written again must not look to gc like the one before.
_BLOBS = """, {} AS (INSERT INTO blobs AS b (digest, uses, body)
SELECT t.digest, %s, t.body FROM moved, unnest(%s, %s) t (digest, body)
ON CONFLICT (digest) DO UPDATE SET uses = b.uses + 1{})"""
_BODY = ", body = excluded.body"
_RENAME = """, renamed AS (UPDATE sessions SET hash = %s, name = %s, body = %s FROM moved
WHERE num = %s)"""
_SPAN = """, spanned AS (INSERT INTO spans AS s SELECT %s, %s, %s FROM moved ON CONFLICT (session)
DO UPDATE SET first = greatest(s.first, excluded.first), next = greatest(s.next, excluded.next))"""
# Rows that are removed or replaced leave the tally. So they are read first; the statements that
# change them depend on that.
_OLD = """, old_{0} AS MATERIALIZED (SELECT o.body FROM moved, {1} JOIN {0} o ON {2}
FOR UPDATE OF o)"""
_LESS = f"(%s + {TALLY_MASK + 1} - (SELECT {SUM} FROM old_{{}})) & {TALLY_MASK}"  # noqa: S608
_TALLIES = """, tallied AS (INSERT INTO tallies AS t SELECT %s, {}, {}, {}, {} FROM moved
ON CONFLICT (session) DO UPDATE SET marks = (t.marks + excluded.marks) & {mask},
operations = (t.operations + excluded.operations) & {mask},
tombs = (t.tombs + excluded.tombs) & {mask}, lease = coalesce(excluded.lease, t.lease))"""
_END = " SELECT 1 FROM moved"
# All or nothing: if a blob is missing, a division by zero undoes the statement.
_USE = """, used AS (UPDATE blobs SET uses = uses + 1 FROM moved WHERE digest = ANY(%s)
RETURNING digest) SELECT 1 / ((SELECT count(*) FROM used) = %s)::int FROM moved"""

_TALLIED = ("marks", "operations", "tombs")
_COLUMNS = {name: table.columns for name, table in TABLES.items()} | {
    "sessions": ("num", "hash", "name", "origin", "body"),
    "keys": ("session", "hash", "seq"),
    "marks": ("pos", "kind", "hash", "value", "body"),
    "facets": ("kind", "hash", "id"),
}
"""The columns of the tables here."""
_HASHED = {"sessions": "name", "keys": "key", "marks": "value", "facets": "value"}
"""The columns that may be longer than an index key allows. The column `hash` has their hash."""
_STAMPED = {"leases": {"since": "clock_timestamp()"}}
"""The columns that the server fills whenever it writes a row."""
_LARGEST = 10**9
"""The most bytes of data in one change. A PostgreSQL message has less than 2**30 bytes."""


def _marks(values: Sequence[Any]) -> str:
    """Return a placeholder for each value."""
    return ", ".join(["%s"] * len(values))


def _listed(rows: Iterable[Row]) -> tuple[str, list[Any]]:
    """Return SQL for a list of rows, and their columns, in the order in which rows are locked."""
    columns = [[*column] for column in zip(*sorted(rows), strict=True)]
    return f"unnest({_marks(columns)}) t", columns


class _Writes:
    """The writes of a batch to one table. A later write replaces an earlier one to the same key."""

    def __init__(self, table: str) -> None:
        self.table, self.columns = table, _COLUMNS[table]
        self.key = self.columns[: TABLES[table].key]
        self.new: dict[Key, Row] = {}
        """Rows that must not exist yet."""
        self.put: dict[Key, Row] = {}
        self.gone: dict[Key, None] = {}
        self.ranges: list[tuple[int, int]] = []

    def _stored(self, values: Row, columns: Sequence[str]) -> Row:
        """Return these columns of a row, or of a key, as the table has them."""
        if self.table not in _HASHED:
            return values
        named = dict(zip(TABLES[self.table].columns, values, strict=False))
        hashed = named.get(_HASHED[self.table])
        named["hash"] = None if hashed is None else hash_of(hashed)
        return tuple([named[column] for column in columns])

    def insert(self, row: Row) -> None:
        row = self._stored(row, self.columns)
        key = row[: len(self.key)]
        if key in self.gone:  # a statement cannot remove a row and insert it again
            self.put[key] = row
            del self.gone[key]
        else:
            self.new[key] = row

    def replace(self, row: Row) -> None:
        row = self._stored(row, self.columns)
        self._forget(row[: len(self.key)])
        self.put[row[: len(self.key)]] = row

    def remove(self, key: Key) -> None:
        key = self._stored(key, self.key)
        self._forget(key)
        self.gone[key] = None

    def _forget(self, key: Key) -> None:
        for rows in (self.new, self.put, self.gone):
            rows.pop(key, None)

    def remove_range(self, low: int, high: int) -> None:
        if self.table == "items":  # some of them may be written again
            for pos in range(low, high):
                self.remove((pos,))
        else:
            self.ranges.append((low, high))

    def written(self) -> list[Row]:
        return [*self.new.values(), *self.put.values()]

    def replaced(self) -> Iterable[Row]:
        """Return the keys, or the ranges, of the rows that are replaced or removed."""
        return [*self.put, *self.gone] or self.ranges

    def session(self) -> int:
        """Return the session of the rows. A batch writes summed rows of one session only."""
        for first in (*self.new, *self.put, *self.gone, *self.ranges):
            return int(first[0]) >> SEQ_BITS
        return 0


def _insertion(table: str, rows: list[Row]) -> tuple[str, list[Any]]:
    """Return SQL that inserts rows, and their values: of one row, or as arrays."""
    stamp = _STAMPED.get(table, {})
    if len(rows) == 1:
        source, new, values = "moved", _marks(rows[0]), [*rows[0]]
    else:
        listed, values = _listed(rows)
        source, new = f"moved, {listed}", "t.*"
    columns, new = ", ".join([*_COLUMNS[table], *stamp]), ", ".join([new, *stamp.values()])
    return f"INSERT INTO {table} ({columns}) SELECT {new} FROM {source}", values  # noqa: S608


def _found(writes: _Writes, rows: Iterable[Row]) -> tuple[str, str, list[Any]]:
    """Return SQL for keys or ranges, for the condition that a row `o` is meant, and the values."""
    text, values = _listed(rows)
    if rows is writes.ranges:
        return f"{text} (low, high)", "o.pos >= t.low AND o.pos < t.high", values
    names = [f"k_{column}" for column in writes.key]
    same = [f"o.{column} = t.k_{column}" for column in writes.key]
    return f"{text} ({', '.join(names)})", " AND ".join(same), values


def _after_old(table: str) -> str:
    """Return the condition by which a part depends on `_read_old`."""
    return f" AND (SELECT count(*) FROM old_{table}) >= 0" if table in _TALLIED else ""  # noqa: S608


class Statement:
    """The text and the values of one batch.

    There are few texts, because the server plans each once.
    """

    def __init__(self, batch: Batch) -> None:
        self.refusal: Refusal = StaleHead
        """Makes the error that is raised if the statement returns no row. It wrote nothing then."""
        self._text: list[str] = []
        self._values: list[Any] = []
        self._tables: dict[str, _Writes] = {}
        self._shares: list[Share] = []
        self._renames: list[Rename] = []
        for write in batch.writes:
            self._collect(write)
        self._begin(batch)
        for writes in self._tables.values():
            self._insert(writes)
        for table in sorted(self._tables.keys() & _TALLIED):
            self._read_old(self._tables[table])
        for writes in self._tables.values():
            self._replace(writes)
            self._remove(writes)
        for session, name, body, _ in self._renames:
            self._add(_RENAME, hash_of(name), name, body, session)
        self._tally()
        self._share()
        self.text, self.values = "".join(self._text), self._values

    def _add(self, text: str, *values: Any) -> None:
        self._text.append(text)
        self._values += values

    def _of(self, table: str) -> _Writes:
        return self._tables.get(table) or _Writes(table)

    def _collect(self, write: Any) -> None:
        """Sort a write by its table."""
        if isinstance(write, Share):
            self._shares.append(write)
            return
        if isinstance(write, Rename):
            self._renames.append(write)
            return
        table = write.by.table if isinstance(write, DeleteIf) else write.table
        writes = self._tables.setdefault(table, _Writes(table))
        if isinstance(write, Insert):
            writes.insert(write.row)
        elif isinstance(write, Put):
            writes.replace(write.row)
        elif isinstance(write, DeleteRange):
            writes.remove_range(write.low, write.high)
        else:
            writes.remove(write.key)

    # -- parts of the text ---------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        """Add the part that decides: the others write only if it returns a row."""
        swap = batch.swap
        if swap is not None:
            self._swap(swap)
        elif is_entries(batch):
            self._take_turn(batch.guards[0])
            return
        else:
            self._add(_ALWAYS)
        self._span()

    def _swap(self, swap: Swap) -> None:
        self.refusal = swap.refusal
        if swap.expect and swap.parent is not None:
            self._add(_SWAP_ON, swap.body, swap.session, swap.expect, *swap.parent)
        elif swap.expect:
            self._add(_SWAP, swap.body, swap.session, swap.expect)
        else:  # the head was lost
            self._add(_HEAD, swap.session, swap.body)

    def _take_turn(self, guard: Any) -> None:
        """Count entries of a journal, if the first one follows the last that was counted."""
        self.refusal = guard.refusal
        if isinstance(guard, Equals):
            self._add(_LEASED, *guard.key, guard.value)
        else:
            self._add(_EXISTS, *guard.key)
        places = [pos for pos, _ in self._tables["journal"].new.values()]
        session, first = places[0] >> SEQ_BITS, places[0] & MAX_SEQ
        self._add(_NEXT, session, first + len(places), first, session, first)

    def _insert(self, writes: _Writes) -> None:
        if writes.new:
            text, values = _insertion(writes.table, [*writes.new.values()])
            self._add(f", new_{writes.table} AS ({text})", *values)

    def _replace(self, writes: _Writes) -> None:
        if writes.put:
            text, values = _insertion(writes.table, [*writes.put.values()])
            written = (*writes.columns, *_STAMPED.get(writes.table, {}))
            changed = [f"{c} = excluded.{c}" for c in written if c not in writes.key]
            self._add(
                f", put_{writes.table} AS ({text} WHERE TRUE{_after_old(writes.table)} "
                f"ON CONFLICT ({', '.join(writes.key)}) "
                f"DO {'UPDATE SET ' + ', '.join(changed) if changed else 'NOTHING'})",
                *values,
            )

    def _remove(self, writes: _Writes) -> None:
        for name, rows in (("gone", [*writes.gone]), ("range", writes.ranges)):
            if rows:
                text, where, values = _found(writes, rows)
                self._add(
                    f", {name}_{writes.table} AS (DELETE FROM {writes.table} o "  # noqa: S608
                    f"USING moved, {text} WHERE {where}{_after_old(writes.table)})",
                    *values,
                )

    def _read_old(self, writes: _Writes) -> None:
        """Read the rows of a table that the batch removes or replaces."""
        rows = writes.replaced()
        if rows:
            text, where, values = _found(writes, rows)
            self._add(_OLD.format(writes.table, text, where), *values)

    def _span(self) -> None:
        """Note which entries a journal has, unless it is removed."""
        journal = self._tables.get("journal")
        if journal and (journal.new or journal.ranges) and not self._of("spans").gone:
            low, high = (journal.ranges or [(0, 0)])[0]
            first = max(1, high - low)
            last = max([pos for pos, _ in journal.new.values()], default=0)
            session = (last or low) >> SEQ_BITS
            self._add(_SPAN, session, first, max(first, (last & MAX_SEQ) + 1))

    def _tally(self) -> None:
        """Update the sums over rows, unless the session is removed."""
        if not self._tables.keys() & {*_TALLIED, "leases"}:
            return
        summed = [self._of(table) for table in _TALLIED]
        leases = [*self._of("leases").put.values()]
        sessions = [writes.session() for writes in summed if writes.session()]
        sessions += [lease[0] for lease in leases]
        if sessions and not self._of("tallies").gone:
            texts = [_LESS.format(w.table) if w.replaced() else "%s" for w in summed]
            values = [Tally.total([row[-1] for row in w.written()]) for w in summed]
            lease = [Tally.of_lease(token, body) for _, token, body in leases]
            text = _TALLIES.format(*texts, "%s" if lease else "NULL", mask=TALLY_MASK)
            self._add(text, sessions[-1], *values, *lease)

    def _share(self) -> None:
        """Write and use blobs in the order of their digests, so that no two commits wait for each
        other. Add the end of the statement, which counts the blobs that are used.
        """
        shares = sorted(self._shares, key=lambda share: share.digest)
        for name, more, rewrite in (("blobs_", "", False), ("rewritten", _BODY, True)):
            some = {s.digest: s.body for s in shares if s.body is not None and s.rewrite is rewrite}
            if some:
                text = _BLOBS.format(name, more)
                self._add(text, random.getrandbits(32), [*some], [*some.values()])
        used = [*dict.fromkeys([share.digest for share in shares if share.body is None])]
        if used:
            self._add(_USE, used, len(used))
        else:
            self._add(_END)


def seconds(change: Batch) -> float:
    """Return the seconds that sending a change may take on a slow line."""
    return change.size() / 1e6


def check_size(change: Batch) -> None:
    """Raise InvalidRequest if a change does not fit into one message.

    The server would close the connection while it is sent.
    """
    size = change.size()
    if size > _LARGEST:
        raise InvalidRequest(
            f"{size:,} bytes of new data are too many for one save to PostgreSQL",
            hint=f"save it in parts of less than {_LARGEST:,} bytes",
        )


def exclude_gc(link: Link) -> None:
    """Wait until no gc runs; none begins before the end of the transaction."""
    schemas.lock(link, "gc", shared=True)


def is_entries(batch: Batch) -> bool:
    """Return whether a batch only appends to a journal. Its statement checks its guard, too."""
    if len(batch.guards) != 1 or {(type(w), w[0]) for w in batch.writes} != {(Insert, "journal")}:
        return False
    [guard] = batch.guards
    by_lease = isinstance(guard, Equals) and guard.by is LEASES
    return by_lease or (isinstance(guard, Present) and guard.by is SESSIONS)


def write(link: Link, batch: Batch) -> None:
    """Write all of a batch, or nothing. It is durable when this returns."""
    # The index of names refuses a second one.
    guards = [guard for guard in batch.guards if guard.by is not SESSIONS_BY_NAME]
    removals = removed_if(batch)
    if is_entries(batch) or not (guards or removals):
        execute(link, batch)
        return
    with link.transaction():
        if any(guard.by is COUNTERS for guard in guards):  # no gc may run
            exclude_gc(link)
        _lock(link, batch)
        check(link, guards)
        if not all(hold(link, [batch])):
            raise removals[0].refusal()
        execute(link, batch)


def execute(link: Link, batch: Batch) -> None:
    """Write a batch whose guards hold, and whose conditional removals are due."""
    statement = Statement(batch)
    try:
        moved = link.ask(statement.text, statement.values).ntuples
    except pg.UniqueViolation as e:
        raise _refused(batch, e.diag.table_name or "") from e
    except pg.DivisionByZero:
        raise MissingReference from None
    if not moved:
        raise statement.refusal()


def _refused(batch: Batch, table: str) -> Exception:
    """Return the error of the write that found a row of its key."""
    for write in batch.writes:
        if isinstance(write, Insert) and write.table == table:
            return write.refusal()
        if isinstance(write, Rename) and table == "sessions":
            return write.refusal()
    return StaleHead()  # two batches put back a head that was lost


def renew(link: Link, session: int, token: bytes) -> bool:
    return bool(
        link.ask(
            "UPDATE leases SET since = clock_timestamp() WHERE session = %s AND token = %s "
            "RETURNING 1",
            (session, token),
        ).ntuples
    )


def _lock(link: Link, batch: Batch) -> None:
    """Lock the heads in the order of their numbers, so that no two commits wait for each other.

    A commit that deletes or frees a checkpoint locks its session's head. So a checkpoint that
    exists after this exists until the end of the transaction.
    """
    swap = batch.swap
    own = [] if swap is None else [swap.session]
    for number in sorted({*own, *batch.shared}):
        how = "UPDATE" if number in own else "SHARE"
        found = link.rows(f"SELECT body FROM heads WHERE session = %s FOR {how}", (number,))  # noqa: S608
        if swap is not None and number in own and (found[0][0] if found else b"") != swap.expect:
            raise swap.refusal()


def check(link: Link, guards: Sequence[Guard]) -> None:
    """Raise the error of a guard that does not hold."""
    view = PostgresView(link, link.target)
    for guard in guards:
        contract.check(guard, view)


_UNCHANGED = """SELECT o.{1}, t.value FROM unnest(%s, %s) t (key, value)
JOIN {0} o ON o.{1} = t.key AND {2} = t.value ORDER BY o.{1} FOR UPDATE OF o"""


def hold(link: Link, batches: Sequence[Batch]) -> list[bool]:
    """Lock the rows that batches remove on condition. Return which batches may be made.

    All rows of such a batch are unchanged, and no batch before it removes one of them.
    """
    removals = [{(w.by, w.column, *w.key, w.value) for w in removed_if(batch)} for batch in batches]
    wanted = set().union(*removals)
    there: set[tuple[Any, ...]] = set()
    for by, column in {row[:2] for row in wanted}:
        some = [row[2:] for row in wanted if row[:2] == (by, column)]
        text = _UNCHANGED.format(by.table, by.by[0], COMPUTED.get(column, column))
        found = link.rows(text, [[*each] for each in zip(*some, strict=True)])
        there |= {(by, column, *row) for row in found}
    done = []
    for rows in removals:
        done.append(rows <= there)
        there -= rows if done[-1] else set()
    return done


def removed_if(batch: Batch) -> list[DeleteIf]:
    return [write for write in batch.writes if isinstance(write, DeleteIf)]


# A server that is stopped while it waits for its standby later shows a change that the standby
# lacks. This statement writes a little, so it waits until everything before it is on the standby.
_SEEN = "SELECT pg_logical_emit_message(true, 'holdfast', '') FROM "
_ONLY_OURS = {
    "sessions": ("num",),  # no other process has the number
    "checkpoints": ("pos", "id"),
    "operations": ("pos", "body"),
    "journal": ("pos", "body"),
}
"""Columns by which a new row is recognized: no other batch writes one with the same values."""


def landed(link: Link, batch: Batch) -> bool | None:
    """Return whether a batch of unknown outcome was written and is durable; None if unknown.

    Must not be called within a transaction.
    """

    def is_there(where: str, *values: Any) -> bool:
        return bool(link.ask(_SEEN + where, values).ntuples)

    copied = any(guard.by is COUNTERS for guard in batch.guards)  # others may bring the same rows
    new = {w.table: w.row for w in batch.writes if isinstance(w, Insert) and not copied}
    for table, columns in _ONLY_OURS.items():
        if table in new:
            same = " AND ".join([f"{column} = %s" for column in columns])
            return is_there(f"{table} WHERE {same}", *new[table][: len(columns)])
    swap = batch.swap
    if swap is not None and is_there(
        "heads WHERE session = %s AND body = %s", swap.session, swap.body
    ):
        return True
    return None


_LARGE = 1 << 16
"""Changes of this many bytes are written alone, so that no other change waits for them."""

_MANY = """WITH held AS (SELECT t.* FROM unnest(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) t
(session, expect, head, pos, id, body, parent, parent_id, item, row, pack, stop)
JOIN heads h ON h.session = t.session AND h.body = t.expect
WHERE EXISTS (SELECT 1 FROM checkpoints c WHERE c.pos = t.parent AND c.id = t.parent_id)
FOR UPDATE OF h SKIP LOCKED),
moved AS (UPDATE heads h SET body = held.head FROM held WHERE h.session = held.session
RETURNING held.*),
checkpoint AS (INSERT INTO checkpoints SELECT pos, id, body FROM moved),
item AS (INSERT INTO items SELECT item, row FROM moved WHERE item IS NOT NULL),
pack AS (INSERT INTO items SELECT pack, row FROM moved WHERE pack IS NOT NULL
ON CONFLICT (pos) DO UPDATE SET body = excluded.body),
packed AS (DELETE FROM items i USING moved WHERE i.pos > pack AND i.pos < stop)
SELECT session FROM moved"""


def fits(batch: Batch) -> bool:
    """Return whether a batch can be written together with others.

    It must be a small checkpoint with one row of items, on a head that exists.
    """
    kinds = [(type(write), write[0]) for write in batch.writes]
    return (
        not batch.guards
        and kinds in (_APPEND, _PACK)
        and batch.swap is not None
        and batch.swap.parent is not None
        and batch.swap.expect != b""
        and batch.size() < _LARGE
    )


_APPEND: list[tuple[type, Any]] = [(Insert, "items"), (Insert, "checkpoints")]
_PACK: list[tuple[type, Any]] = [(DeleteRange, "items"), *_APPEND]


def write_many(link: Link, batches: Sequence[Batch]) -> set[int]:
    """Write batches of different sessions, and return the sessions of those that were written.

    The others are not written at all: their heads differ, or another transaction holds them.
    """
    lines = [_line(batch) for batch in sorted(batches, key=session_of)]
    moved = link.rows(_MANY, [[*column] for column in zip(*lines, strict=True)])
    return {session for (session,) in moved}


def session_of(batch: Batch) -> int:
    """Return the session whose head a batch replaces."""
    return 0 if batch.swap is None else batch.swap.session


def _line(batch: Batch) -> Row:
    """Return the columns of a batch that `fits`."""
    writes: list[Any] = batch.writes
    *gone, item, checkpoint = writes
    swap: Any = batch.swap
    pos, row = item.row
    place = (None, row, gone[0].low, gone[0].high) if gone else (pos, row, None, None)
    return (swap.session, swap.expect, swap.body, *checkpoint.row, *swap.parent, *place)
