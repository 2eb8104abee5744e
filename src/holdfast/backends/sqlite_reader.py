"""Reading from SQLite, suspiciously: what a damaged file hands out is refused, not passed on."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import apsw
from xxhash import xxh3_64_intdigest

from holdfast import clock
from holdfast.backends import sqlite_file as files
from holdfast.backends.base import Lease, Reader, Turnover
from holdfast.codec.records import COPIED, FREED, MAX_SEQ, position, unseal_counter
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def name_hash(name: bytes) -> int:
    return xxh3_64_intdigest(name) >> 1


def _check_order(keys: list[Any]) -> None:
    """A damaged tree can hand out keys in any order, for ever."""
    try:
        if all(a < b for a, b in pairwise(keys)):
            return
    except TypeError:
        pass
    raise Corrupt("a table is damaged: its keys are out of order")


def _as_id(id: Any) -> bytes:
    """A column whose type is damaged is no id; the row's digest then tells so."""
    return id if type(id) is bytes else b""


_COUNTED = (
    "items", "blobs", "checkpoints", "sessions", "operations", "marks", "tombs", "gaps", "journal",
)  # fmt: skip
_LEASE = "SELECT session, token, body, boot, since FROM leases WHERE "


def _lease(session: int, token: bytes, body: bytes, boot: str, since: float) -> Lease:
    if type(since) is not float:
        raise Corrupt("the time of a lease is damaged")
    return Lease(session, token, body, clock.since(boot, since))


class SqliteReader(Reader):
    """Everything bound as parameters; the constants in the text are our own."""

    def __init__(self, connection: apsw.Connection, path: Path) -> None:
        self._connection, self._path = connection, path

    def _one(self, sql: str, *bindings: Any) -> Any:
        try:
            return self._connection.execute(sql, bindings).get
        except (apsw.Error, UnicodeDecodeError, OverflowError):
            self._forget()
            with files.translated(self._path):
                raise

    def _all(self, sql: str, *bindings: Any) -> list[Any]:
        try:
            return self._connection.execute(sql, bindings).fetchall()
        except (apsw.Error, UnicodeDecodeError, OverflowError):
            self._forget()
            with files.translated(self._path):
                raise

    def _forget(self) -> None:
        """Read pages again: SQLite keeps one that it has refused, and would let it pass then."""
        self._connection.release_memory()

    def session(self, name: bytes) -> tuple[int, bytes] | None:
        """Found two ways, so that a damaged index cannot make a session look new."""
        number: int | None = self._one("SELECT num FROM names WHERE hash = ?", name_hash(name))
        found: tuple[int, bytes] | None = self._one(
            "SELECT num, body FROM sessions WHERE name = ?", name
        )
        if number != (found[0] if found else None):
            raise Corrupt("an index of the sessions' names is damaged")
        return found

    def session_by_number(self, session: int) -> tuple[bytes, bytes] | None:
        found: tuple[bytes, bytes] | None = self._one(
            "SELECT name, body FROM sessions WHERE num = ?", session
        )
        if found is not None and type(found[0]) is not bytes:
            raise Corrupt("the name of a session is damaged")
        return found

    def sessions(self, after: bytes | None, limit: int) -> list[tuple[int, bytes, bytes]]:
        sql = "SELECT num, name, body FROM sessions WHERE name > ? ORDER BY name LIMIT ?"
        rows = self._all(sql, after or b"", limit)
        _check_order([after or b"", *[name for _, name, _ in rows]])
        return rows

    def head(self, session: int) -> bytes | None:
        found: bytes | None = self._one("SELECT body FROM heads WHERE session = ?", session)
        return found

    def checkpoint(self, session: int, seq: int) -> tuple[bytes, bytes] | None:
        found: tuple[bytes, bytes] | None = self._one(
            "SELECT id, body FROM checkpoints WHERE pos = ?", position(session, seq)
        )
        return found and (_as_id(found[0]), found[1])

    def checkpoints(
        self, session: int, low: int, high: int, limit: int
    ) -> list[tuple[int, bytes, bytes]]:
        rows = self._all(
            "SELECT pos & 0xffffffff, id, body FROM checkpoints WHERE pos BETWEEN ? AND ? "
            "ORDER BY pos LIMIT ?",
            position(session, low),
            position(session, high),
            limit,
        )
        _check_order([low - 1, *[seq for seq, _, _ in rows], high + 1])
        return [(seq, _as_id(id), body) for seq, id, body in rows]

    def find_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        rows = self._all(
            "SELECT pos >> 32, pos & 0xffffffff, id FROM checkpoints "
            "WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
            low,
            high,
            limit,
        )
        for row in rows:
            if (*map(type, row),) != (int, int, bytes):
                raise Corrupt("the index of checkpoints' ids is damaged")
        return rows

    def find_key(self, session: int, key: bytes) -> int | None:
        found: int | None = self._one(
            "SELECT seq FROM keys WHERE session = ? AND key = ?", session, key
        )
        if found is not None and type(found) is not int:
            raise Corrupt("the index of keys is damaged")
        return found

    def items(self, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos - ?1, body FROM items WHERE pos >= coalesce("
            "(SELECT max(pos) FROM items WHERE pos BETWEEN ?1 AND ?1 + ?2), ?1 + ?2) "
            "AND pos < ?1 + ?3 ORDER BY pos",
            stream << STREAM_BITS,
            start,
            stop,
        )

    def blob(self, digest: bytes) -> bytes | None:
        found: bytes | None = self._one("SELECT body FROM blobs WHERE digest = ?", digest)
        return found

    def marks(self, session: int, low: int, high: int) -> list[tuple[int, int, bytes, bytes]]:
        return self._all(
            "SELECT pos & 0xffffffff, kind, value, body FROM marks WHERE pos BETWEEN ? AND ? "
            "ORDER BY pos, kind, value",
            position(session, low),
            position(session, high),
        )

    def find_marks(self, session: int, kind: int, value: bytes) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos & 0xffffffff, body FROM marks INDEXED BY marks_by_value "
            "WHERE kind = ? AND value = ? AND pos BETWEEN ? AND ? ORDER BY pos DESC",
            kind,
            value,
            position(session, 0),
            position(session, MAX_SEQ),
        )

    def operations(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos & 0xffffffff, body FROM operations WHERE pos BETWEEN ? AND ? ORDER BY pos",
            position(session, low),
            position(session, high),
        )

    def lease(self, session: int) -> Lease | None:
        found = self._all(_LEASE + "session = ?", session)
        return _lease(*found[0]) if found else None

    def leases(self, after: int, limit: int) -> list[Lease]:
        rows = self._all(_LEASE + "session > ? ORDER BY session LIMIT ?", after, limit)
        _check_order([after, *[row[0] for row in rows]])
        return [_lease(*row) for row in rows]

    def journal(self, session: int, low: int, limit: int) -> list[tuple[int, bytes]]:
        rows = self._all(
            "SELECT pos & 0xffffffff, body FROM journal WHERE pos BETWEEN ? AND ? "
            "ORDER BY pos LIMIT ?",
            position(session, low),
            position(session, MAX_SEQ),
            limit,
        )
        _check_order([low - 1, *[n for n, _ in rows]])
        return rows

    def last_entry(self, session: int) -> int:
        low = position(session, 0)
        newest = self._one(
            "SELECT max(pos) FROM journal WHERE pos BETWEEN ? AND ?", low, low | MAX_SEQ
        )
        return 0 if newest is None else newest - low

    def tombs(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos & 0xffffffff, body FROM tombs WHERE pos BETWEEN ? AND ? ORDER BY pos",
            position(session, low),
            position(session, high),
        )

    def buried(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        rows = self._all(
            "SELECT pos, body FROM tombs WHERE pos > ? ORDER BY pos LIMIT ?", after, limit
        )
        _check_order([after, *[pos for pos, _ in rows]])
        return rows

    def count_buried(self) -> int:
        [(count,)] = self._all("SELECT count(*) FROM tombs")
        return int(count)

    def count_checkpoints(self) -> int:
        [(count,)] = self._all("SELECT count(*) FROM checkpoints")
        return int(count)

    def gaps(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return self._all(
            "SELECT pos & 0xffffffff, body FROM gaps WHERE pos BETWEEN ? AND ? ORDER BY pos",
            position(session, low),
            position(session, high),
        )

    def gaps_below(self, session: int) -> list[tuple[int, int]]:
        rows = self._all(
            "SELECT pos >> 32, pos & 0xffffffff FROM gaps WHERE ancestor BETWEEN ? AND ? "
            "ORDER BY pos",
            position(session, 0),
            position(session, MAX_SEQ),
        )
        for row in rows:
            if (*map(type, row),) != (int, int):
                raise Corrupt("the index of gaps is damaged")
        return rows

    def forks(self, session: int, low: int, high: int) -> list[tuple[int, int]]:
        rows = self._all(
            "SELECT origin & 0xffffffff, num FROM sessions WHERE origin BETWEEN ? AND ? "
            "ORDER BY origin, num",
            position(session, low),
            position(session, high),
        )
        for row in rows:
            if (*map(type, row),) != (int, int):
                raise Corrupt("the index of forks is damaged")
        return rows

    def find_facets(
        self, kind: int, value: bytes, low: bytes, high: bytes, limit: int
    ) -> list[bytes]:
        rows = self._all(
            "SELECT id FROM facets WHERE kind = ? AND value = ? AND id >= ? AND id < ? "
            "ORDER BY id DESC LIMIT ?",
            kind,
            value,
            low,
            high,
            limit,
        )
        ids = [id for (id,) in rows]
        _check_order([*ids[::-1], high])
        return ids

    def newest_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        rows = self._all(
            "SELECT pos >> 32, pos & 0xffffffff, id FROM checkpoints WHERE id >= ? AND id < ? "
            "ORDER BY id DESC LIMIT ?",
            low,
            high,
            limit,
        )
        _check_order([*[id for _, _, id in rows[::-1]], high])
        return rows

    def item_rows(self, after: int, limit: int) -> list[tuple[int, int, bytes]]:
        rows = self._all(
            "SELECT pos, length(body), substr(body, 1, 9) FROM items WHERE pos > ? "
            "ORDER BY pos LIMIT ?",
            after,
            limit,
        )
        _check_order([after, *[pos for pos, _, _ in rows]])
        return rows

    def blob_rows(self, after: int, limit: int) -> list[tuple[int, bytes, int, int]]:
        rows = self._all(
            "SELECT num, digest, length(body), uses FROM blobs WHERE num > ? ORDER BY num LIMIT ?",
            after,
            limit,
        )
        _check_order([after, *[num for num, _, _, _ in rows]])
        return rows

    def turnover(self) -> Turnover:
        found = {
            space: unseal_counter(space, body)
            for space, body in self._all("SELECT space, body FROM counters")
            if space in (FREED, COPIED)
        }
        return Turnover(found.get(FREED, 0), found.get(COPIED, 0))

    def sizes(self) -> dict[str, tuple[int, int]]:
        count = "SELECT count(*), ifnull(sum(length(body)), 0) FROM "
        return {table: self._all(count + table)[0] for table in _COUNTED}

    def check(self) -> Iterator[str]:
        told = self._all("PRAGMA integrity_check")
        self._forget()
        yield from [line for (line,) in told if line != "ok"]
        for (number,) in self._all("SELECT num FROM names EXCEPT SELECT num FROM sessions"):
            yield f"the row of session {number} is missing"
