"""Read from PostgreSQL, in one snapshot. All values are bound as parameters."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psycopg

from holdfast.errors import Corrupt
from holdfast.storage.contract import View
from holdfast.storage.postgres.connection import is_cut
from holdfast.storage.sql import Queries
from holdfast.storage.tables import (
    ITEM_SIZES,
    MEASURED,
    SESSIONS_BY_NAME,
    SPANS,
    Index,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.errors import HoldfastError
    from holdfast.storage.postgres.connection import Link, Target
    from holdfast.storage.tables import Row

_ENDED = "25P02"  # the transaction failed with an earlier statement
_HASHED = {("keys", "key"): "hash", ("marks", "value"): "hash", ("facets", "value"): "hash"}
"""Columns whose values may be longer than an index key allows. They are found by their hash."""
COMPUTED = {
    "size": "length(body)",
    "begin": "substring(body FOR 9)",
    "age": "greatest(extract(epoch FROM clock_timestamp() - since), 0)::float8",
}
_QUERIES = Queries("%s", COMPUTED, found_by=_HASHED)
_BY_NAME = """SELECT num, name, body, hash FROM sessions WHERE hash = %s
OR (substring(name FOR 200) = %s AND name = %s)"""
_NAMES = """SELECT num, name, body FROM sessions WHERE substring(name FOR 200) >= %s
AND name >= %s ORDER BY substring(name FOR 200), name LIMIT %s"""
_SPAN_OF_ENTRIES = """SELECT %s::bigint, min(pos) & 4294967295, (max(pos) & 4294967295) + 1
FROM journal WHERE pos BETWEEN %s AND %s HAVING count(*) > 0"""
_LONGER = 20
_PAGE = 10_000


def hash_of(name: bytes) -> bytes:
    """Return the hash by which a name, a key or a value is found."""
    return sha256(name).digest()


class PostgresView(View):
    """Reads within a transaction that the caller has begun.

    `renew` returns a new connection, with a transaction begun, if the first one breaks before it
    has answered anything.
    """

    def __init__(
        self,
        link: Link,
        target: Target,
        renew: Callable[[], Link] | None = None,
        *,
        tallied: bool = True,
    ) -> None:
        self._link, self._target, self._renew = link, target, renew
        self.tallied = tallied
        """False for a store of version 1 that is opened read-only."""
        self._failed: HoldfastError | None = None
        """The error that ended the transaction; later statements raise it again."""

    def _all(self, query: str, *bindings: Any) -> list[Any]:
        try:
            rows = self._link.rows(query, bindings)
        except psycopg.Error as e:
            renew, self._renew = self._renew, None
            if renew is None or not is_cut(e):
                if self._failed is None or e.sqlstate != _ENDED:
                    self._failed = self._target.error(e)
                raise self._failed from e
            self._link = renew()
            return self._all(query, *bindings)
        self._renew = None
        return rows

    def _patiently(self, query: str) -> list[Any]:
        """Run a statement that reads a whole table, with a longer timeout."""
        link, most = self._link, self._target.timeout * _LONGER
        self._all(f"SELECT set_config('statement_timeout', '{most * 1000:.0f}', true)")
        before, link.patience = link.patience, most + 1.0
        try:
            return self._all(query)
        finally:
            link.patience = before

    def get(self, index: Index, *key: Any) -> Row | None:
        if index is SESSIONS_BY_NAME:
            return self._session(*key)
        if index is SPANS and not self.tallied:
            low = key[0] << 32
            rows = self._all(_SPAN_OF_ENTRIES, key[0], low, low | 0xFFFF_FFFF)
        else:
            rows = self._all(_QUERIES.get(index), *_hashed(index, key))
        return rows[0] if rows else None

    def _session(self, name: bytes) -> Row | None:
        """Look for hash and name, so that damage to one of them cannot make a session look new."""
        rows = self._all(_BY_NAME, hash_of(name), name[:200], name)
        if not rows:
            return None
        number, found, body, hashed = rows[0]
        if (found, hashed) != (name, hash_of(name)) or len(rows) > 1:
            raise Corrupt(
                "a session's name is damaged, or the index of names is",
                hint="repair() rebuilds the index",
            )
        return number, name, body

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
        if index is SESSIONS_BY_NAME:
            low = low or b""
            return self._all(_NAMES, low[:200], low, limit)
        if index is ITEM_SIZES and limit is not None and limit > _PAGE:
            return self._in_pages(index, low, high, limit)
        prefix = _hashed(index, prefix)
        sql, bindings = _QUERIES.scan(
            index, low, high, prefix=prefix, limit=limit, reverse=reverse, floor=floor
        )
        return self._all(sql, *bindings)

    def _in_pages(self, index: Index, low: Any, high: Any, limit: int) -> list[Row]:
        """Read in pages, so that no statement takes longer than a page does."""
        found: list[Row] = []
        while len(found) < limit:
            page = self.scan(index, low, high, limit=min(limit - len(found), _PAGE))
            found += page
            if len(page) < _PAGE:
                break
            low = page[-1][0] + 1
        return found

    def count(self, table: str) -> int:
        [(count,)] = self._patiently(f"SELECT count(*) FROM {table}")  # noqa: S608 - our own names
        return int(count)

    def sizes(self) -> dict[str, tuple[int, int]]:
        count = "SELECT count(*), coalesce(sum(length(body)), 0)::bigint FROM "
        return {table: self._patiently(count + table)[0] for table in MEASURED}

    def problems(self, session: int | None = None) -> Iterator[str]:
        """Check that names and values match the hashes that they are found by."""
        if session is not None:
            return
        for table, column, what in (("sessions", "name", "session"), ("marks", "value", "mark")):
            [(count,)] = self._patiently(
                f"SELECT count(*) FROM {table} WHERE hash <> sha256({column})"  # noqa: S608
            )
            if count:
                yield f"{count} of the table {table} cannot be found by their {what}'s {column}"


def _hashed(index: Index, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of the first columns of an index, with hashes where it has hashes."""
    named = zip(index.by, values, strict=False)
    return tuple([hash_of(v) if (index.table, name) in _HASHED else v for name, v in named])
