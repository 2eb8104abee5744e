"""Write batches to PostgreSQL.

A batch is one statement. Its first part compares and swaps the head. The other parts write only if
the head was swapped. Under READ COMMITTED, the swap waits for a transaction that holds the head's
row, and then reads the row again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from psycopg import errors as pg
from psycopg.types.numeric import Int8

from holdfast.errors import InvalidRequest
from holdfast.format.records import (
    MAX_SEQ,
    SEQ_BITS,
)
from holdfast.storage.contract import (
    Absent,
    Batch,
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
    Unchanged,
)
from holdfast.storage.postgres.reader import PostgresView, hash_of
from holdfast.storage.postgres.schema import SUM, lock_key
from holdfast.storage.tables import (
    BLOB_VERSIONS,
    COUNTERS,
    ITEM_SIZES,
    LEASES,
    SESSIONS,
    SESSIONS_BY_NAME,
    TABLES,
)
from holdfast.storage.tally import TALLY_MASK, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.storage.contract import Guard, Key, Swap
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
_CREATE = "WITH moved AS (INSERT INTO sessions VALUES (%s, %s, %s, %s, %s) RETURNING num)"
# A blob that is removed and written again must not look to gc like the one before.
_BLOBS = """, blobs_ AS (INSERT INTO blobs AS b (digest, uses, body)
SELECT t.digest, %s, t.body FROM moved, unnest(%s, %s) t (digest, body)
ON CONFLICT (digest) DO UPDATE SET uses = b.uses + 1)"""
_REWRITES = """, rewritten AS (INSERT INTO blobs AS b (digest, uses, body)
SELECT t.digest, %s, t.body FROM moved, unnest(%s, %s) t (digest, body)
ON CONFLICT (digest) DO UPDATE SET uses = b.uses + 1, body = excluded.body)"""
_SHARES = """, shared AS (UPDATE blobs SET uses = uses + 1 FROM moved WHERE digest = ANY(%s)
RETURNING digest)"""
_RENAME = """, renamed AS (UPDATE sessions SET hash = %s, name = %s, body = %s FROM moved
WHERE num = %s)"""
_LEASED = """, leased AS (INSERT INTO leases SELECT %s, %s, clock_timestamp(), %s FROM moved
ON CONFLICT (session) DO UPDATE
SET token = excluded.token, since = excluded.since, body = excluded.body)"""
_COUNTER = """, counter AS (INSERT INTO counters SELECT convert_from(%s, 'UTF8'), %s FROM moved
ON CONFLICT (space) DO UPDATE SET body = excluded.body)"""
_SPAN = """, spanned AS (INSERT INTO spans AS s SELECT %s, %s, %s FROM moved ON CONFLICT (session)
DO UPDATE SET first = greatest(s.first, excluded.first), next = greatest(s.next, excluded.next))"""
# Rows that are removed or replaced leave the tally. So they are read first; the statements that
# change them depend on that.
_OLD = """, old_{0} AS MATERIALIZED (SELECT o.body FROM moved, unnest({1}) t ({2})
JOIN {0} o ON {3} FOR UPDATE OF o)"""
_AFTER_OLD = " AND (SELECT count(*) FROM old_{}) >= 0"
_LESS = f"(%s + {TALLY_MASK + 1} - (SELECT {SUM} FROM old_{{}})) & {TALLY_MASK}"  # noqa: S608
_TALLIES = """, tallied AS (INSERT INTO tallies AS t SELECT %s, {}, {}, {}, {} FROM moved
ON CONFLICT (session) DO UPDATE SET marks = (t.marks + excluded.marks) & {mask},
operations = (t.operations + excluded.operations) & {mask},
tombs = (t.tombs + excluded.tombs) & {mask}, lease = coalesce(excluded.lease, t.lease))"""
_END = " SELECT 1 FROM moved"
# All or nothing: if a blob is missing, a division by zero undoes the statement.
_END_SHARED = " SELECT 1 / ((SELECT count(*) FROM shared) = %s)::int FROM moved"

_TALLIED = ("marks", "operations", "tombs")
_COLUMNS = {name: table.columns for name, table in TABLES.items()} | {
    "keys": ("session", "hash", "seq"),
    "marks": ("pos", "kind", "hash", "value", "body"),
    "facets": ("kind", "hash", "id"),
}
"""The columns of the tables here. Long values are found by their hash."""
_LARGEST = 10**9
"""The most bytes of data in one change. A PostgreSQL message has less than 2**30 bytes."""


def ints(numbers: Iterable[int]) -> list[Int8]:
    return [Int8(n) for n in numbers]


def _stored(table: str, row: Row) -> Row:
    """Return a row, or its key, with the columns that the table has here."""
    if table == "marks":
        pos, kind, value, *body = row
        return (pos, kind, hash_of(value), value, *body) if body else (pos, kind, hash_of(value))
    if table in ("keys", "facets"):
        return row[0], hash_of(row[1]), *row[2:]
    return row


def _key(table: str, row: Row) -> Key:
    return row[: TABLES[table].key]


class Statement:
    """The text and the values of one batch.

    There are few texts, because the server plans each once.
    """

    def __init__(self, batch: Batch) -> None:
        self._text: list[str] = []
        self._values: list[Any] = []
        self._end, self._count = _END, 0
        self._inserted: dict[str, dict[Key, Row]] = {}
        self._put: dict[str, dict[Key, Row]] = {}
        self._deleted: dict[str, dict[Key, None]] = {}
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._shares: list[Share] = []
        self._renames: list[Rename] = []
        for write in batch.writes:
            self._collect(write)
        self._begin(batch.swap)
        for table, rows in self._inserted.items():
            self._insert(table, [*rows.values()])
        self._remove_and_replace()
        self._share()
        for session, name, body, _ in self._renames:
            self._add(_RENAME, hash_of(name), name, body, session)
        self._span()
        self._tally()
        self.text = "".join([*self._text, self._end])
        self.values = [*self._values, self._count] if self._count else self._values

    def _add(self, text: str, *values: Any) -> None:
        self._text.append(text)
        self._values += values

    # -- sorting the writes by table -----------------------------------------------------------

    def _collect(self, write: Any) -> None:
        """Note a write. A later one to the same key takes the place of an earlier one."""
        if isinstance(write, Insert):
            row = _stored(write.table, write.row)
            key = _key(write.table, row)
            deleted = self._deleted.get(write.table, {})
            if key in deleted:  # a statement cannot remove a row and insert it again
                del deleted[key]
                self._put.setdefault(write.table, {})[key] = row
            else:
                self._inserted.setdefault(write.table, {})[key] = row
        elif isinstance(write, Put):
            row = _stored(write.table, write.row)
            key = _key(write.table, row)
            for rows in (self._inserted, self._deleted):
                rows.get(write.table, {}).pop(key, None)
            self._put.setdefault(write.table, {})[key] = row
        elif isinstance(write, Delete):
            self._delete(write.table, _stored(write.table, write.key))
        elif isinstance(write, DeleteRange) and write.table == "items":
            for pos in range(write.low, write.high):
                self._delete("items", (pos,))
        elif isinstance(write, DeleteRange):
            self._ranges.setdefault(write.table, []).append((write.low, write.high))
        elif isinstance(write, Share):
            self._shares.append(write)
        else:
            self._renames.append(write)

    def _delete(self, table: str, key: Key) -> None:
        for rows in (self._inserted, self._put):
            rows.get(table, {}).pop(key, None)
        self._deleted.setdefault(table, {})[key] = None

    # -- parts of the text ---------------------------------------------------------------------

    def _begin(self, swap: Swap | None) -> None:
        created = self._inserted.pop("sessions", {})
        if created:
            [(number, name, origin, body)] = created.values()
            self._add(_CREATE, number, hash_of(name), name, origin, body)
        elif swap is None:
            self._add(_ALWAYS)
        elif swap.expect and swap.parent is not None:
            self._add(_SWAP_ON, swap.body, swap.session, swap.expect, *swap.parent)
        elif swap.expect:
            self._add(_SWAP, swap.body, swap.session, swap.expect)
        else:  # the head was lost
            self._add(_HEAD, swap.session, swap.body)

    def _rows(self, rows: list[Row]) -> tuple[str, list[Any]]:
        """Return SQL for some rows, and their values: of one row, or as arrays."""
        if len(rows) == 1:
            return f"SELECT {_placeholders(rows[0])} FROM moved", [*rows[0]]  # noqa: S608
        columns = [[*column] for column in zip(*sorted(rows), strict=True)]
        return f"SELECT t.* FROM moved, unnest({_placeholders(columns)}) t", columns  # noqa: S608

    def _insert(self, table: str, rows: list[Row]) -> None:
        if rows:
            text, values = self._rows(rows)
            self._add(f", new_{table} AS (INSERT INTO {table} {text})", *values)

    def _remove_and_replace(self) -> None:
        for table in _TALLIED:
            self._old(table)
        for table, rows in self._put.items():
            self._replace(table, [*rows.values()])
        for table, keys in self._deleted.items():
            columns = _COLUMNS[table][: TABLES[table].key]
            self._remove(
                table,
                [*keys],
                [f"k{n}" for n, _ in enumerate(columns)],
                " AND ".join([f"o.{column} = t.k{n}" for n, column in enumerate(columns)]),
            )
        for table, ranges in self._ranges.items():
            self._remove(table, ranges, ["low", "high"], "o.pos >= t.low AND o.pos < t.high")

    def _replace(self, table: str, rows: list[Row]) -> None:
        if table == "leases":
            [row] = rows
            self._add(_LEASED, *row)
        elif table == "counters":
            [(space, body)] = rows
            self._add(_COUNTER, space.encode(), body)
        elif rows:
            text, values = self._rows(rows)
            key, columns = _COLUMNS[table][: TABLES[table].key], _COLUMNS[table]
            new = ", ".join([f"{c} = excluded.{c}" for c in columns[len(key) :]])
            where = " WHERE TRUE" + _AFTER_OLD.format(table) if table in _TALLIED else ""
            self._add(
                f", put_{table} AS (INSERT INTO {table} {text}{where} "
                f"ON CONFLICT ({', '.join(key)}) DO {f'UPDATE SET {new}' if new else 'NOTHING'})",
                *values,
            )

    def _remove(self, table: str, rows: Sequence[Row], names: list[str], where: str) -> None:
        """Remove the rows that a list of keys, or of ranges, refers to."""
        if rows:
            columns = [[*column] for column in zip(*sorted(rows), strict=True)]
            where += _AFTER_OLD.format(table) if table in _TALLIED else ""
            self._add(
                f", gone_{table}_{names[0]} AS (DELETE FROM {table} o USING moved, "  # noqa: S608
                f"unnest({_placeholders(columns)}) t ({', '.join(names)}) WHERE {where})",
                *columns,
            )

    def _old(self, table: str) -> None:
        """Read the rows of a table that the batch removes or replaces."""
        keys = sorted([*self._put.get(table, {}), *self._deleted.get(table, {})])
        ranges = sorted(self._ranges.get(table, []))
        if not keys and not ranges:
            return
        columns = [[*column] for column in zip(*(keys or ranges), strict=True)]
        if keys:
            names = [f"k{n}" for n, _ in enumerate(columns)]
            pairs = zip(_COLUMNS[table], names, strict=False)
            where = " AND ".join([f"o.{column} = t.{name}" for column, name in pairs])
        else:
            names, where = ["low", "high"], "o.pos >= t.low AND o.pos < t.high"
        self._add(_OLD.format(table, _placeholders(columns), ", ".join(names), where), *columns)

    def _share(self) -> None:
        """Write and use blobs in the order of their digests, so that no two commits wait for each
        other.
        """
        for text, rewrite in ((_BLOBS, False), (_REWRITES, True)):
            some = {
                s.digest: s.body
                for s in self._shares
                if s.body is not None and s.rewrite is rewrite
            }
            if some:
                digests = sorted(some)
                bodies = [some[digest] for digest in digests]
                self._add(text, random.getrandbits(32), digests, bodies)
        used = sorted({share.digest for share in self._shares if share.body is None})
        if used:
            self._add(_SHARES, used)
            self._end, self._count = _END_SHARED, len(used)

    def _span(self) -> None:
        """Note which entries a journal has, unless it is removed."""
        new, freed = self._inserted.get("journal"), self._ranges.get("journal")
        if (new or freed) and "spans" not in self._deleted:
            low, high = (freed or [(0, 0)])[0]
            first = max(1, high - low)
            last = max([pos for pos, _ in new.values()], default=0) if new else 0
            session = (last or low) >> SEQ_BITS
            self._add(_SPAN, session, first, max(first, (last & MAX_SEQ) + 1))

    def _tally(self) -> None:
        """Update the sums over rows, unless the session is removed."""
        new = [
            [*self._inserted.get(table, {}).values(), *self._put.get(table, {}).values()]
            for table in _TALLIED
        ]
        old = [
            table in self._ranges or bool(self._put.get(table) or self._deleted.get(table))
            for table in _TALLIED
        ]
        leases = [*self._put.get("leases", {}).values()]
        if not (any(new) or any(old) or leases) or "tallies" in self._deleted:
            return
        texts = [
            _LESS.format(table) if less else "%s" for table, less in zip(_TALLIED, old, strict=True)
        ]
        values: list[Any] = [self._session(), *[Tally.total([r[-1] for r in rows]) for rows in new]]
        for session, token, body in leases:
            values = [session, *values[1:], Tally.of_lease(token, body)]
        self._add(_TALLIES.format(*texts, "%s" if leases else "NULL", mask=TALLY_MASK), *values)

    def _session(self) -> int:
        """Return the session whose summed rows the batch writes. A batch has those of one only."""
        for table in _TALLIED:
            for rows in (self._inserted, self._put, self._deleted):
                for key in rows.get(table, ()):
                    return int(key[0]) >> SEQ_BITS
            for low, _ in self._ranges.get(table, ()):
                return low >> SEQ_BITS
        return 0


def _placeholders(columns: Sequence[Any]) -> str:
    return ", ".join(["%s"] * len(columns))


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
    key = lock_key(link.target.schema, "gc")
    link.execute("SELECT pg_advisory_xact_lock_shared(hashtextextended(%s, 0))", (key,))


def write(link: Link, batch: Batch) -> None:
    """Write all of a batch, or nothing. It is durable when this returns."""
    if _write_entries(link, batch):
        return
    # The index of names refuses a second one.
    guards = [guard for guard in batch.guards if guard.by is not SESSIONS_BY_NAME]
    if not guards:
        execute(link, batch)
        return
    with link.transaction():
        if any(guard.by is COUNTERS for guard in guards):  # no gc may run
            exclude_gc(link)
        _lock(link, batch)
        check(link, guards)
        execute(link, batch)


def execute(link: Link, batch: Batch) -> None:
    """Write a batch whose guards hold."""
    statement = Statement(batch)
    try:
        moved = link.ask(statement.text, statement.values).ntuples
    except pg.UniqueViolation as e:
        raise _refused(batch, e.diag.table_name or "") from e
    except pg.DivisionByZero:
        raise MissingReference from None
    if not moved and batch.swap is not None:
        raise batch.swap.refusal()


def _refused(batch: Batch, table: str) -> Exception:
    """Return the error of the write that found a row of its key."""
    for write in batch.writes:
        if isinstance(write, Insert) and write.table == table:
            return write.refusal()
        if isinstance(write, Rename) and table == "sessions":
            return write.refusal()
    return StaleHead()  # two batches put back a head that was lost


# The lock prevents a takeover of the lease until this ends.
_OURS = "WITH held AS (SELECT 1 FROM leases WHERE session = %s AND token = %s FOR SHARE)"
_THERE_IS = "WITH held AS (SELECT 1 FROM heads WHERE session = %s FOR SHARE)"
_ENTRIES = """, counted AS (INSERT INTO spans AS s SELECT %s, 1, %s FROM held
WHERE %s = 1 OR EXISTS (SELECT 1 FROM spans WHERE session = %s)
ON CONFLICT (session) DO UPDATE SET next = excluded.next WHERE s.next = %s RETURNING 1),
written AS (INSERT INTO journal SELECT t.* FROM counted, unnest(%s, %s) t RETURNING 1)
SELECT 1 FROM written"""


def _write_entries(link: Link, batch: Batch) -> bool:
    """Write entries of a journal. Return False, and write nothing, if the batch has more."""
    writes: list[Any] = batch.writes
    if len(batch.guards) != 1 or {(type(w), w[0]) for w in writes} != {(Insert, "journal")}:
        return False
    [guard] = batch.guards
    if isinstance(guard, Equals) and guard.by is LEASES:
        text, values = _OURS, [*guard.key, guard.value]
    elif isinstance(guard, Present) and guard.by is SESSIONS:
        text, values = _THERE_IS, [*guard.key]
    else:
        return False
    places, bodies = [w.row[0] for w in writes], [w.row[1] for w in writes]
    session, first = places[0] >> SEQ_BITS, places[0] & MAX_SEQ
    values += [session, first + len(places), first, session, first]
    try:
        written = link.ask(text + _ENTRIES, [*values, places, bodies]).ntuples
    except pg.UniqueViolation:
        raise guard.refusal() from None
    if not written:
        raise guard.refusal()
    return True


def renew(link: Link, session: int, token: bytes) -> bool:
    return bool(
        link.ask(
            "UPDATE leases SET since = clock_timestamp() WHERE session = %s AND token = %s "
            "RETURNING 1",
            (session, token),
        ).ntuples
    )


_HELD = "SELECT body FROM heads WHERE session = %s"


def _lock(link: Link, batch: Batch) -> None:
    """Lock the heads in the order of their numbers, so that no two commits wait for each other.

    A commit that deletes or frees a checkpoint locks its session's head. So a checkpoint that
    exists after this exists until the end of the transaction.
    """
    swap = batch.swap
    own = [] if swap is None else [swap.session]
    for number in sorted({*own, *batch.shared}):
        ours = swap is not None and number == swap.session
        how = " FOR UPDATE" if ours else " FOR SHARE"
        found: Any = link.execute(_HELD + how, (Int8(number),)).fetchone()
        if ours and swap is not None and (found[0] if found else b"") != swap.expect:
            raise swap.refusal()


def check(link: Link, guards: Sequence[Guard]) -> None:
    """Raise the error of a guard that does not hold. Those of one kind take one statement."""
    view = PostgresView(link, link.target)
    for guard in guards:
        if isinstance(guard, Unchanged):
            if view.scan(guard.by, guard.low, guard.high) != [*guard.rows]:
                raise guard.refusal()
        elif isinstance(guard, Equals):
            text = f"SELECT {guard.column} FROM {guard.by.table} WHERE {guard.by.by[0]} = %s"  # noqa: S608
            key = [Int8(part) if isinstance(part, int) else part for part in guard.key]
            row: Any = link.execute(text, key).fetchone()
            found = None if row is None else row[0]
            if found != guard.value and (guard.value is not None or found):
                raise guard.refusal()
    for kind in (Present, Absent):
        same: dict[Any, list[Present | Absent]] = {}
        for guard in guards:
            if isinstance(guard, kind):
                same.setdefault(guard.by, []).append(guard)
        for index, some in same.items():
            keys = {guard.key[0] for guard in some}
            count = f"SELECT count(*) FROM {index.table} WHERE {index.by[0]} = ANY(%s)"  # noqa: S608
            [(there,)] = link.execute(count, (ints(keys),)).fetchall()
            if there != (len(keys) if kind is Present else 0):
                raise some[0].refusal()


# A server that is stopped while it waits for its standby later shows a change that the standby
# lacks. This statement writes a little, so it waits until everything before it is on the standby.
_SEEN = "SELECT pg_logical_emit_message(true, 'holdfast', '') FROM "


def landed(link: Link, batch: Batch) -> bool | None:
    """Return whether a batch of unknown outcome was written and is durable; None if unknown.

    Must not be called within a transaction.
    """

    def is_there(where: str, *values: Any) -> bool:
        return bool(link.ask(_SEEN + where, values).ntuples)

    copied = any(guard.by is COUNTERS for guard in batch.guards)  # others may bring the same rows
    inserts = [write for write in batch.writes if isinstance(write, Insert) and not copied]
    new = {write.table: write.row for write in inserts}
    if "sessions" in new:  # no other process has the number
        return is_there("sessions WHERE num = %s", new["sessions"][0])
    if "checkpoints" in new:
        return is_there("checkpoints WHERE pos = %s AND id = %s", *new["checkpoints"][:2])
    for table in ("operations", "journal"):
        if table in new:
            return is_there(f"{table} WHERE pos = %s AND body = %s", *new[table])
    swap = batch.swap
    if swap is not None and is_there(
        "heads WHERE session = %s AND body = %s", swap.session, swap.body
    ):
        return True
    return None


_LARGE = 1 << 16
"""Changes of this many bytes are written alone, so that no other change waits for them."""

_BEGIN = """WITH held AS (SELECT t.* FROM unnest({}) t
(session, expect, head, pos, id, body, parent, parent_id, {})
JOIN heads h ON h.session = t.session AND h.body = t.expect
WHERE EXISTS (SELECT 1 FROM checkpoints c WHERE c.pos = t.parent AND c.id = t.parent_id)
FOR UPDATE OF h SKIP LOCKED),
moved AS (UPDATE heads h SET body = held.head FROM held WHERE h.session = held.session
RETURNING held.*),
checkpoint AS (INSERT INTO checkpoints SELECT pos, id, body FROM moved),
item AS (INSERT INTO items SELECT item, row FROM moved WHERE item IS NOT NULL)"""
_MANY_PACKS = """, pack AS (INSERT INTO items SELECT pack, row FROM moved WHERE pack IS NOT NULL
ON CONFLICT (pos) DO UPDATE SET body = excluded.body),
packed AS (DELETE FROM items i USING moved WHERE i.pos > pack AND i.pos < stop)"""
_MANY_END = " SELECT session FROM moved"


def _text(columns: str) -> str:
    marks = ["%s"] * (8 + len(columns.split()))
    return _BEGIN.format(", ".join(marks), columns)


_PLAIN = _text("item, row") + _MANY_END
_PACKING = _text("item, row, pack, stop") + _MANY_PACKS + _MANY_END


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
    order = sorted(batches, key=session_of)
    packing = any(len(batch.writes) > len(_APPEND) for batch in order)
    lines = [_line(batch, packing=packing) for batch in order]
    columns = [list(column) for column in zip(*lines, strict=True)]
    answer = link.ask(_PACKING if packing else _PLAIN, columns)
    moved = [answer.get_value(n, 0) for n in range(answer.ntuples)]
    return {int.from_bytes(session, "big") for session in moved if session is not None}


def session_of(batch: Batch) -> int:
    """Return the session whose head a batch replaces."""
    return 0 if batch.swap is None else batch.swap.session


def _line(batch: Batch, *, packing: bool) -> Row:
    """Return the columns of a batch that `fits`."""
    writes: list[Any] = batch.writes
    *gone, item, checkpoint = writes
    swap: Any = batch.swap
    known = (swap.session, swap.expect, swap.body, *checkpoint.row, *swap.parent)
    pos, row = item.row
    if not packing:
        return (*known, pos, row)
    if gone:
        return (*known, None, row, gone[0].low, gone[0].high)
    return (*known, pos, row, None, None)


_UNCHANGED = """SELECT i.pos FROM items i JOIN unnest(%s, %s) t (pos, begins) ON i.pos = t.pos
WHERE substring(i.body FOR length(t.begins)) = t.begins ORDER BY i.pos FOR UPDATE OF i"""
_DEAD_BLOBS = """DELETE FROM blobs b USING unnest(%s, %s) t (digest, uses)
WHERE b.digest = t.digest AND b.uses = t.uses RETURNING b.digest"""


def is_trim(batch: Batch) -> bool:
    """Return whether a batch only removes unchanged rows of items, or one unchanged blob."""
    first: Any = batch.writes[0] if batch.writes else None
    if batch.guards or not isinstance(first, DeleteIf):
        return False
    return first.by is ITEM_SIZES or len(batch.writes) == 1


def trim(link: Link, batches: Sequence[Batch]) -> list[bool]:
    """Write batches for which `is_trim` holds, all of them with a few statements."""
    removals = [[w for w in batch.writes if isinstance(w, DeleteIf)] for batch in batches]
    known = {(w.by, w.key[0]): w.value for group in removals for w in group}
    there: set[tuple[Any, Any]] = {(ITEM_SIZES, pos) for pos in _lock_items(link, known)}
    there |= {(BLOB_VERSIONS, digest) for digest in _drop_blobs(link, known)}
    done, going, instead = [], list[int](), dict[int, bytes]()
    for batch, group in zip(batches, removals, strict=True):
        keys = {(w.by, w.key[0]): w.value for w in group}
        done.append(all(key in there and known[key] == value for key, value in keys.items()))
        if done[-1]:
            there -= keys.keys()
            going += [key for by, key in keys if by is ITEM_SIZES]
            instead |= dict([w.row for w in batch.writes if isinstance(w, Insert)])
    link.execute("DELETE FROM items WHERE pos = ANY(%s)", (ints(going),))
    if instead:
        link.execute(
            "INSERT INTO items SELECT * FROM unnest(%s, %s)", (ints(instead), [*instead.values()])
        )
    return done


def _lock_items(link: Link, known: Mapping[Any, Any]) -> list[int]:
    """Lock the rows of items that still begin as known. Return their positions."""
    begins = {pos: begin for (by, pos), begin in known.items() if by is ITEM_SIZES}
    if not begins:
        return []
    rows = link.execute(_UNCHANGED, (ints(begins), [*begins.values()])).fetchall()
    return [pos for (pos,) in rows]


def _drop_blobs(link: Link, known: Mapping[Any, Any]) -> list[bytes]:
    """Remove the blobs whose uses are as known. Return their digests."""
    uses = {digest: count for (by, digest), count in known.items() if by is BLOB_VERSIONS}
    if not uses:
        return []
    rows = link.execute(_DEAD_BLOBS, ([*uses], ints(uses.values()))).fetchall()
    return [digest for (digest,) in rows]
