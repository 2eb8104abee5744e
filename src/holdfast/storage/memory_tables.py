"""Tables in memory: rows in the order of an index, and the rows that a batch leaves.

A backend needs none of this. It spares a simple one most of the work: such a backend only keeps
rows under their keys, and writes the changes of a `Plan` together.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from copy import copy
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.format.records import MAX_SEQ, SEQ_BITS
from holdfast.storage.contract import (
    Delete,
    DeleteIf,
    DeleteRange,
    Insert,
    Put,
    Rename,
    Share,
    check,
)
from holdfast.storage.tables import HEADS, MEASURED, TABLES, Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.storage.contract import Batch, Key, View, Write
    from holdfast.storage.tables import Row

_ADDED = {"leases": ("boot", "since"), "blobs": ("num", "uses")}
"""The columns that the storage itself adds to a table."""
COLUMNS = {name: (*table.columns, *_ADDED.get(name, ())) for name, table in TABLES.items()}
"""The columns of the stored rows of each table. The first ones are the key."""


class _Last:
    """Comes after every value."""

    def __gt__(self, _: object) -> bool:
        return True

    def __lt__(self, _: object) -> bool:
        return False


_LAST = _Last()


class OrderedRows:
    """Rows in the order of the columns `by`, which are unique together.

    With `only`, rows in which that column is None are left out. Every change can be repeated
    without harm.
    """

    __slots__ = ("_key_of", "_only", "keys", "rows")

    def __init__(self, columns: Sequence[str], by: Sequence[str], only: str | None = None) -> None:
        at = [columns.index(column) for column in by]
        self._key_of: Callable[[Row], Key] = (
            itemgetter(*at) if len(at) > 1 else lambda row: (row[at[0]],)
        )
        self._only = None if only is None else columns.index(only)
        self.keys: list[Key] = []
        self.rows: dict[Key, Row] = {}

    def key(self, row: Row | None) -> Key | None:
        """Return the key of a row; None if the row is not in this order."""
        if row is None or (self._only is not None and row[self._only] is None):
            return None
        return self._key_of(row)

    def fill(self, rows: Iterable[Row]) -> None:
        """Take these rows in place of those that are there."""
        key_of, only = self._key_of, self._only
        self.rows = {key_of(row): row for row in rows if only is None or row[only] is not None}
        self.keys = sorted(self.rows)

    def replace(self, old: Row | None, new: Row | None) -> None:
        """Remove one row and add another one."""
        before, after = self.key(old), self.key(new)
        if before is not None and before != after:
            self.remove(before)
        if new is not None:
            self.put(new)

    def put(self, row: Row) -> None:
        """Add a row, or replace the one with its key."""
        key = self.key(row)
        if key is None:
            return
        if key not in self.rows:
            if not self.keys or key > self.keys[-1]:  # most rows come in order
                self.keys.append(key)
            else:  # it may be there already, if this is repeated
                self.keys[self._places(key)] = [key]
        self.rows[key] = row

    def remove(self, key: Key) -> None:
        """Remove the row with this key, if there is one."""
        self.rows.pop(key, None)
        del self.keys[self._places(key)]

    def copy(self) -> OrderedRows:
        new = copy(self)
        new.keys, new.rows = self.keys.copy(), self.rows.copy()
        return new

    def _places(self, key: Key) -> slice:
        return slice(bisect_left(self.keys, key), bisect_right(self.keys, key))

    def between(
        self, low: Any = None, high: Any = None, *, prefix: Key = (), floor: Any = None
    ) -> list[Key]:
        """Return the keys that a `View.scan` with these bounds finds, lowest first."""
        first = prefix if low is None else (*prefix, low)
        start = bisect_left(self.keys, first)
        stop = bisect_left(self.keys, (*prefix, _LAST if high is None else high))
        at_low = start < len(self.keys) and self.keys[start] == first
        if floor is not None and start > 0 and not at_low:
            start -= self.keys[start - 1] >= (*prefix, floor)
        return self.keys[start:stop]

    def scan(
        self,
        low: Any = None,
        high: Any = None,
        *,
        prefix: Key = (),
        limit: int | None = None,
        reverse: bool = False,
        floor: Any = None,
    ) -> list[Row]:
        """Return the stored rows that such a `View.scan` finds."""
        keys = self.between(low, high, prefix=prefix, floor=floor)
        return [self.rows[key] for key in (keys[::-1] if reverse else keys)[:limit]]


def key_of(table: str, row: Row) -> Key:
    """Return the key of a row."""
    return row[: TABLES[table].key]


@cache
def column(index: Index, name: str) -> Callable[[Row], Any]:
    """Return a function that takes a stored row, and returns this column of the index."""
    at = {column: n for n, column in enumerate(COLUMNS[index.table])}
    if name == "size":
        return lambda row: len(row[at["body"]])
    if name == "begin":
        return lambda row: row[at["body"]][:9]
    if name == "age":
        return lambda row: clock.since(row[at["boot"]], row[at["since"]])
    return itemgetter(at[name])


@cache
def _columns(index: Index) -> list[Callable[[Row], Any]]:
    return [column(index, name) for name in index.columns]


def looked_up(index: Index, row: Row) -> Row:
    """Return the columns of an index, of a stored row."""
    return tuple([part(row) for part in _columns(index)])


def in_order(index: Index, rows: Iterable[Row] = ()) -> OrderedRows:
    """Return stored rows of a table in the order of an index."""
    order = OrderedRows(COLUMNS[index.table], index.by, index.only)
    order.fill(rows)
    return order


def lease_now(session: int, token: bytes, body: bytes) -> Row:
    """Return the stored row of a lease whose time starts now."""
    return session, token, body, clock.boot_id(), clock.elapsed()


def sizes(tables: Mapping[str, Mapping[Key, Row]]) -> dict[str, tuple[int, int]]:
    """Return what `View.sizes` returns for tables with these rows."""
    found = {}
    for name in MEASURED:
        body = COLUMNS[name].index("body")
        bodies = [row[body] for row in tables[name].values()]
        found[name] = len(bodies), sum(map(len, bodies))
    return found


def check_all(batch: Batch, view: View) -> None:
    """Raise the refusal of the swap or of a guard of a batch that does not hold in this view."""
    swap = batch.swap
    if swap is not None:
        row = view.get(HEADS, swap.session)
        if (b"" if row is None else row[1]) != swap.expect:
            raise swap.refusal()
    for guard in batch.guards:
        check(guard, view)


class Plan:
    """The stored rows that a batch leaves, by table and key. A row to be removed is None."""

    def __init__(
        self,
        tables: Mapping[str, Mapping[Key, Row]],
        between: Callable[[str, Any, Any], Iterable[Key]] | None = None,
        newest_blob: int | None = None,
    ) -> None:
        """Plan for tables with these rows.

        `between` returns the keys of a table with low <= first column < high. Without it, and
        without the number of the newest blob, all rows of the table are looked at.
        """
        self._tables = tables
        self._between = between or self._look_between
        if newest_blob is None:
            newest_blob = max([row[2] for row in tables["blobs"].values()], default=0)
        self.newest_blob = newest_blob
        self.rows: dict[tuple[str, Key], Row | None] = {}

    def _look_between(self, table: str, low: Any, high: Any) -> list[Key]:
        return [key for key in self._tables[table] if low <= key[0] < high]

    def _get(self, table: str, key: Key) -> Row | None:
        planned = self.rows.get((table, key), _NOT_PLANNED)
        return self._tables[table].get(key) if planned is _NOT_PLANNED else planned

    def _put(self, table: str, row: Row) -> None:
        self.rows[table, key_of(table, row)] = lease_now(*row) if table == "leases" else row

    def add_all(self, batch: Batch) -> None:
        """Add the writes of a batch whose guards hold. Raise the error of one that is refused."""
        if batch.swap is not None:
            self.add(Put("heads", (batch.swap.session, batch.swap.body)))
        for write in batch.writes:
            self.add(write)

    def add(self, write: Write) -> None:
        """Add a write. Raise its error if it is refused."""
        match write:
            case Put(table, row):
                self._put(table, row)
            case Insert(table, row, refusal):
                if self._get(table, key_of(table, row)) is not None:
                    raise refusal()
                self._put(table, row)
                if table == "journal":
                    self._count(row[0] >> SEQ_BITS, 1, (row[0] & MAX_SEQ) + 1)
            case Rename(session, name, body):
                old = self._get("sessions", (session,))
                if old is not None:
                    self._put("sessions", (session, name, old[2], body))
            case Delete(table, key):
                self.rows[table, key] = None
            case DeleteRange(table, low, high):
                planned = [key for at, key in self.rows if at == table and low <= key[0] < high]
                for key in [*self._between(table, low, high), *planned]:
                    self.rows[table, key] = None
                if table == "journal":
                    self._count(low >> SEQ_BITS, high - low, high - low)
            case DeleteIf(by, key, name, value, refusal):
                old = self._get(by.table, key)
                if old is None or column(by, name)(old) != value:
                    raise refusal()
                self.rows[by.table, key] = None
            case Share():
                self._share(write)

    def _count(self, session: int, first: int, after: int) -> None:
        """Note which entries a journal has. Numbers of entries that are removed stay used."""
        _, known_first, known_after = self._get("spans", (session,)) or (session, 1, 1)
        self._put("spans", (session, max(first, known_first), max(after, known_after)))

    def _share(self, share: Share) -> None:
        digest, body, rewrite, refusal = share
        old = self._get("blobs", (digest,))
        if old is not None:
            _, known, number, uses = old
            kept = body if rewrite and body is not None else known
            self.rows["blobs", (digest,)] = (digest, kept, number, uses + 1)
        elif body is None:
            raise refusal()
        else:
            self.newest_blob += 1
            # A blob that is removed and written again must not look to gc like the one before.
            uses = random.getrandbits(32)
            self.rows["blobs", (digest,)] = (digest, body, self.newest_blob, uses)


_NOT_PLANNED: Any = object()
