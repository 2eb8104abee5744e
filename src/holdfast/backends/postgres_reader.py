"""Reading from PostgreSQL: one snapshot, everything bound as a parameter."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psycopg

from holdfast.backends.base import Lease, Reader, Turnover
from holdfast.backends.postgres_link import is_cut
from holdfast.codec.records import COPIED, FREED, MAX_SEQ, position, unseal_counter
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.backends.postgres_link import Link, Target
    from holdfast.errors import HoldfastError

_ENDED = "25P02"  # of a transaction in which a statement has failed
COUNTED = (
    "items", "blobs", "checkpoints", "sessions", "operations", "marks", "tombs", "gaps", "journal",
)  # fmt: skip
# In whole microseconds: numbers are all that these answers are made of.
_LEASE = """SELECT session, token, body,
(extract(epoch FROM clock_timestamp() - since) * 1000000)::bigint FROM leases WHERE """
_LONGER = 20
_PAGE = 10_000


def hash_of(name: bytes) -> bytes:
    """What a name, key or value is found by."""
    return sha256(name).digest()


def _span(session: int, low: int, high: int) -> tuple[int, int]:
    return position(session, low), position(session, high)


def _lease(session: int, token: bytes, body: bytes, age: int) -> Lease:
    return Lease(session, token, body, max(age, 0) / 1e6)


class PostgresReader(Reader):
    """Within a transaction that the caller has begun.

    `renew` gives a new connection, with a transaction begun, for one that broke before it has
    answered anything.
    """

    def __init__(self, link: Link, target: Target, renew: Callable[[], Link] | None = None) -> None:
        self._link, self._target, self._renew = link, target, renew
        self._failed: HoldfastError | None = None
        """What has ended the transaction, and is why the next statements fail."""

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

    def _scan(self, query: str) -> list[Any]:
        """What takes the longer the more there is: it may."""
        link, most = self._link, self._target.timeout * _LONGER
        self._all(f"SELECT set_config('statement_timeout', '{most * 1000:.0f}', true)")
        before, link.patience = link.patience, most + 1.0
        try:
            return self._all(query)
        finally:
            link.patience = before

    def _one(self, query: str, *bindings: Any) -> Any:
        rows = self._all(query, *bindings)
        return rows[0] if rows else None

    def session(self, name: bytes) -> tuple[int, bytes] | None:
        found = self._one("SELECT num, body, name FROM sessions WHERE hash = %s", hash_of(name))
        if found is None:
            return None
        number, body, stored = found
        if stored != name:
            raise Corrupt("a session's name is damaged, or the index of names is")
        return number, body

    def session_by_number(self, session: int) -> tuple[bytes, bytes] | None:
        found: tuple[bytes, bytes] | None = self._one(
            "SELECT name, body FROM sessions WHERE num = %s", session
        )
        return found

    def sessions(self, after: bytes | None, limit: int) -> list[tuple[int, bytes, bytes]]:
        return self._all(
            "SELECT num, name, body FROM sessions WHERE substring(name FOR 200) >= %s "
            "AND name > %s ORDER BY substring(name FOR 200), name LIMIT %s",
            (after or b"")[:200],
            after or b"",
            limit,
        )

    def head(self, session: int) -> bytes | None:
        found = self._one("SELECT body FROM heads WHERE session = %s", session)
        return None if found is None else found[0]

    def checkpoint(self, session: int, seq: int) -> tuple[bytes, bytes] | None:
        found: tuple[bytes, bytes] | None = self._one(
            "SELECT id, body FROM checkpoints WHERE pos = %s", position(session, seq)
        )
        return found

    def checkpoints(
        self, session: int, low: int, high: int, limit: int
    ) -> list[tuple[int, bytes, bytes]]:
        return self._all(
            "SELECT pos & 4294967295, id, body FROM checkpoints WHERE pos BETWEEN %s AND %s "
            "ORDER BY pos LIMIT %s",
            *_span(session, low, high),
            limit,
        )

    def find_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        return self._all(
            "SELECT pos >> 32, pos & 4294967295, id FROM checkpoints "
            "WHERE id BETWEEN %s AND %s ORDER BY id LIMIT %s",
            low,
            high,
            limit,
        )

    def find_key(self, session: int, key: bytes) -> int | None:
        found = self._one(
            "SELECT seq FROM keys WHERE session = %s AND hash = %s", session, hash_of(key)
        )
        return None if found is None else found[0]

    def items(self, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
        base = stream << STREAM_BITS
        first, last = base + start, base + stop
        return self._all(
            "SELECT pos - %s, body FROM items WHERE pos >= coalesce((SELECT pos FROM items "
            "WHERE pos BETWEEN %s AND %s ORDER BY pos DESC LIMIT 1), %s) AND pos < %s "
            "ORDER BY pos",
            base,
            base,
            first,
            first,
            last,
        )

    def blob(self, digest: bytes) -> bytes | None:
        found = self._one("SELECT body FROM blobs WHERE digest = %s", digest)
        return None if found is None else found[0]

    def marks(self, session: int, low: int, high: int) -> list[tuple[int, int, bytes, bytes]]:
        return self._all(
            "SELECT pos & 4294967295, kind, value, body FROM marks WHERE pos BETWEEN %s AND %s "
            "ORDER BY pos, kind, value",
            *_span(session, low, high),
        )

    def find_marks(self, session: int, kind: int, value: bytes) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos & 4294967295, body FROM marks "
            "WHERE kind = %s AND hash = %s AND pos BETWEEN %s AND %s ORDER BY pos DESC",
            kind,
            hash_of(value),
            *_span(session, 0, MAX_SEQ),
        )

    def _range(self, table: str, session: int, low: int, high: int) -> list[Any]:
        return self._all(
            f"SELECT pos & 4294967295, body FROM {table} "  # noqa: S608 - our own names
            "WHERE pos BETWEEN %s AND %s ORDER BY pos",
            *_span(session, low, high),
        )

    def operations(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return self._range("operations", session, low, high)

    def lease(self, session: int) -> Lease | None:
        found = self._one(_LEASE + "session = %s", session)
        return None if found is None else _lease(*found)

    def leases(self, after: int, limit: int) -> list[Lease]:
        rows = self._all(_LEASE + "session > %s ORDER BY session LIMIT %s", after, limit)
        return [_lease(*row) for row in rows]

    def journal(self, session: int, low: int, limit: int) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos & 4294967295, body FROM journal WHERE pos BETWEEN %s AND %s "
            "ORDER BY pos LIMIT %s",
            *_span(session, low, MAX_SEQ),
            limit,
        )

    def last_entry(self, session: int) -> int:
        found = self._one(
            "SELECT pos & 4294967295 FROM journal WHERE pos BETWEEN %s AND %s "
            "ORDER BY pos DESC LIMIT 1",
            *_span(session, 0, MAX_SEQ),
        )
        return 0 if found is None else found[0]

    def tombs(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return self._range("tombs", session, low, high)

    def buried(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos, body FROM tombs WHERE pos > %s ORDER BY pos LIMIT %s",
            after,
            limit,
        )

    def count_buried(self) -> int:
        [(count,)] = self._scan("SELECT count(*) FROM tombs")
        return int(count)

    def count_checkpoints(self) -> int:
        [(count,)] = self._scan("SELECT count(*) FROM checkpoints")
        return int(count)

    def gaps(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return self._range("gaps", session, low, high)

    def gaps_below(self, session: int) -> list[tuple[int, int]]:
        return self._all(
            "SELECT pos >> 32, pos & 4294967295 FROM gaps WHERE ancestor BETWEEN %s AND %s "
            "ORDER BY pos",
            *_span(session, 0, MAX_SEQ),
        )

    def forks(self, session: int, low: int, high: int) -> list[tuple[int, int]]:
        return self._all(
            "SELECT origin & 4294967295, num FROM sessions WHERE origin BETWEEN %s AND %s "
            "ORDER BY origin, num",
            *_span(session, low, high),
        )

    def find_facets(
        self, kind: int, value: bytes, low: bytes, high: bytes, limit: int
    ) -> list[bytes]:
        rows = self._all(
            "SELECT id FROM facets WHERE kind = %s AND hash = %s AND id >= %s AND id < %s "
            "ORDER BY id DESC LIMIT %s",
            kind,
            hash_of(value),
            low,
            high,
            limit,
        )
        return [id for (id,) in rows]

    def newest_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        return self._all(
            "SELECT pos >> 32, pos & 4294967295, id FROM checkpoints WHERE id >= %s AND id < %s "
            "ORDER BY id DESC LIMIT %s",
            low,
            high,
            limit,
        )

    def item_rows(self, after: int, limit: int) -> list[tuple[int, int, bytes]]:
        """However many: no statement takes longer than a page does."""
        found: list[tuple[int, int, bytes]] = []
        while len(found) < limit:
            page = self._all(
                "SELECT pos, length(body), substring(body FOR 9) FROM items WHERE pos > %s "
                "ORDER BY pos LIMIT %s",
                after,
                min(limit - len(found), _PAGE),
            )
            if not page:
                break
            found += page
            after = page[-1][0]
        return found

    def blob_rows(self, after: int, limit: int) -> list[tuple[int, bytes, int, int]]:
        return self._all(
            "SELECT num, digest, length(body), uses FROM blobs WHERE num > %s "
            "ORDER BY num LIMIT %s",
            after,
            limit,
        )

    def turnover(self) -> Turnover:
        rows = self._scan("SELECT space, body FROM counters")
        found = {s: unseal_counter(s, body) for s, body in rows if s in (FREED, COPIED)}
        return Turnover(found.get(FREED, 0), found.get(COPIED, 0))

    def sizes(self) -> dict[str, tuple[int, int]]:
        count = "SELECT count(*), coalesce(sum(length(body)), 0)::bigint FROM "
        return {table: self._scan(count + table)[0] for table in COUNTED}

    def check(self) -> Iterator[str]:
        """What only the server can compare: that what things are found by is their own hash."""
        for table, column, what in (("sessions", "name", "session"), ("marks", "value", "mark")):
            [(count,)] = self._scan(
                f"SELECT count(*) FROM {table} WHERE hash <> sha256({column})"  # noqa: S608
            )
            if count:
                yield f"{count} of the table {table} cannot be found by their {what}'s {column}"
