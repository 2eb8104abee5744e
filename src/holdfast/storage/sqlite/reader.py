"""Read from SQLite. Damaged data raises Corrupt; it is never returned."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
from xxhash import xxh3_64_intdigest

from holdfast import clock
from holdfast.errors import Corrupt
from holdfast.storage.contract import View
from holdfast.storage.sql import Queries
from holdfast.storage.sqlite import schema
from holdfast.storage.tables import (
    COUNTERS,
    INTEGERS,
    LEASES,
    MARKS_BY_VALUE,
    MEASURED,
    SESSIONS_BY_NAME,
    SPANS,
    Index,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.tables import Row


def name_hash(name: bytes) -> int:
    return xxh3_64_intdigest(name) >> 1


COMPUTED = {"size": "length(body)", "begin": "substr(body, 1, 9)", "age": "boot, since"}
"""SQL for the columns that are computed."""
_QUERIES = Queries(
    "?",
    COMPUTED,
    sources={MARKS_BY_VALUE: "marks INDEXED BY marks_by_value"},
)
_SPAN_OF_ENTRIES = schema.SPANS_OF_ROWS.format(
    "WHERE pos BETWEEN ?1 << 32 AND ?1 << 32 | 0xffffffff"
)


@cache
def _places(index: Index, fixed: int) -> tuple[list[int], list[int]]:
    """Return the places of the columns that order the rows, and of those that must be integers.

    SQLite ensures that the key of most tables is an integer.
    """
    order = [index.columns.index(name) for name in index.by[fixed:] if name in index.columns]
    if len(index.by) == 1 and index.by[0] in INTEGERS:
        return order, []
    return order, [i for i, name in enumerate(index.columns) if name in INTEGERS]


def _check_keys(
    index: Index, fixed: int, rows: list[Row], low: Any, high: Any, *, reverse: bool
) -> None:
    """Raise Corrupt unless the keys are in order. A damaged tree may return any keys, endlessly."""
    order, numbers = _places(index, fixed)
    at = order[0]
    first, last = (rows[-1], rows[0]) if reverse else (rows[0], rows[-1])
    try:
        sound = (low is None or low <= first[at]) and (high is None or last[at] < high)
        if len(rows) > 1:
            keys = [row[at] if len(order) == 1 else tuple([row[i] for i in order]) for row in rows]
            sound = sound and sorted(keys, reverse=reverse) == keys and len({*keys}) == len(keys)
        if numbers:
            sound = sound and {type(row[i]) for row in rows for i in numbers} == {int}
    except TypeError:
        sound = False
    if not sound:
        raise Corrupt(f"the table {index.table} is damaged: its keys are out of order")


class SqliteView(View):
    """Reads one snapshot. All values are bound as parameters; the texts contain only constants."""

    def __init__(self, connection: apsw.Connection, *, tallied: bool = True) -> None:
        self._connection = connection
        self.tallied = tallied
        """False for a store of version 1 that is opened read-only."""

    def _all(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, bindings).fetchall()
        except (apsw.Error, UnicodeDecodeError, OverflowError):
            self._forget()
            with schema.translated(Path(self._connection.filename)):
                raise

    def _forget(self) -> None:
        """Drop cached pages.

        SQLite keeps a page that it found damaged, and accepts it the next time.
        """
        self._connection.release_memory()

    def get(self, index: Index, *key: Any) -> Row | None:
        if index is SPANS and not self.tallied:
            found = self._all(_SPAN_OF_ENTRIES, key)
        else:
            found = self._all(_QUERIES.get(index), key)
        if index is SESSIONS_BY_NAME:
            self._check_name(key[0], found)
        if index is LEASES:
            found = _with_age(found)
        return found[0] if found else None

    def _check_name(self, name: bytes, found: list[Row]) -> None:
        """Compare with a second index, so that damage to one cannot make a session look new."""
        numbers = self._all("SELECT num FROM names WHERE hash = ?", (name_hash(name),))
        if numbers != [row[:1] for row in found]:
            raise Corrupt("an index of the sessions' names is damaged")

    def scan(
        self,
        index: Index,
        low: Any = None,
        high: Any = None,
        *,
        prefix: tuple[Any, ...] = (),
        limit: int | None = None,
        reverse: bool = False,
        floor: Any = None,
    ) -> list[Row]:
        sql, bindings = _QUERIES.scan(
            index, low, high, prefix=prefix, limit=limit, reverse=reverse, floor=floor
        )
        rows = self._all(sql, bindings)
        if rows and index is not COUNTERS:  # whose damage has a check of its own
            least = low if floor is None else None
            _check_keys(index, len(prefix), rows, least, high, reverse=reverse)
        return _with_age(rows) if index is LEASES else rows

    def count(self, table: str) -> int:
        [(count,)] = self._all(f"SELECT count(*) FROM {table}")  # noqa: S608 - our own names
        return int(count)

    def sizes(self) -> dict[str, tuple[int, int]]:
        sql = "SELECT count(*), ifnull(sum(length(body)), 0) FROM "
        return {table: self._all(sql + table)[0] for table in MEASURED}

    def problems(self, session: int | None = None) -> Iterator[str]:
        if session is not None:
            return
        told = self._all("PRAGMA integrity_check")
        self._forget()
        lines = [line for (text,) in told for line in text.splitlines()]
        yield from [line for line in lines if line != "ok" and not line.startswith("***")]
        for (number,) in self._all("SELECT num FROM names EXCEPT SELECT num FROM sessions"):
            yield f"the row of session {number} is missing"


def _with_age(rows: list[Row]) -> list[Row]:
    """Return rows of leases with their age in place of the time and the boot that it belongs to."""
    if any(type(row[4]) is not float for row in rows):
        raise Corrupt("the time of a lease is damaged")
    return [(*row[:3], clock.since(row[3], row[4])) for row in rows]
