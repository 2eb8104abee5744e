"""The search index in tables of its own, beside those of the store, without an extension.

It has the text of a checkpoint as a set of numbers: hashes of its groups of three characters. So it
holds no text, and some candidates do not have what is searched.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import psycopg

from holdfast.errors import Unavailable
from holdfast.format.records import MAX_SEQ, SEQ_BITS
from holdfast.storage.postgres.connection import is_worth_another_try
from holdfast.storage.rows import IdRow
from holdfast.storage.search_index import Change, IndexBusy, IndexUnusable, Mark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.postgres.backend import PostgresBackend
    from holdfast.storage.postgres.connection import Link

VERSION = 1
TABLES = {
    "search_format": "(version INTEGER NOT NULL)",
    "search_tip": "(id BYTEA NOT NULL)",
    "search_marks": "(session BIGINT PRIMARY KEY, head BYTEA NOT NULL, gone BYTEA NOT NULL, "
    "last BIGINT NOT NULL, id BYTEA NOT NULL)",
    "search_documents": "(pos BIGINT PRIMARY KEY, id BYTEA NOT NULL UNIQUE, "
    "ancestor BIGINT NOT NULL, groups INTEGER[] NOT NULL)",
}
_INDEXES = (
    "CREATE INDEX search_groups ON search_documents USING gin (groups)",
    "CREATE INDEX search_unknown ON search_documents (pos) WHERE ancestor = -2",
)
# Materialized, or else the planner may read all documents in the order of their ids.
# -2 is UNKNOWN.
_CANDIDATES = """WITH found AS MATERIALIZED (
SELECT pos, id FROM search_documents WHERE groups @> %s::integer[]
UNION SELECT pos, id FROM search_documents WHERE ancestor = -2)
SELECT pos, id FROM found WHERE id < %s ORDER BY id DESC LIMIT %s"""
_OF_SESSION = """SELECT pos, id FROM search_documents WHERE pos BETWEEN %s AND %s
AND (groups @> %s::integer[] OR ancestor = -2 OR (ancestor >= 0 AND ancestor >> 32 <> %s))
ORDER BY pos DESC"""


def open_tables(backend: PostgresBackend, *, create: bool) -> PostgresSearchIndex | None:
    """Open the index of a store; see storage.url.open_search_index."""
    stack = ExitStack()
    with stack:
        link = stack.enter_context(backend.separate())
        with _usable():
            version = _version(link)
            if version is None and not create:
                return None
            if version not in (None, VERSION) and not create:
                raise IndexUnusable("its tables have another version")
            if version != VERSION:
                with link.transaction():
                    _drop(link)
                    for name, columns in TABLES.items():
                        link.execute(f"CREATE TABLE {name} {columns}".encode())
                    for statement in _INDEXES:
                        link.execute(statement.encode())
                    link.execute("INSERT INTO search_format VALUES (%s)", (VERSION,))
        if create:
            link.take_your_time()
        return PostgresSearchIndex(link, stack.pop_all())
    raise AssertionError  # the stack never suppresses an error


def drop_tables(backend: PostgresBackend) -> bool:
    """Remove the tables of an index. Return whether there were any."""
    with backend.separate() as link:
        try:
            there = _version(link) is not None
            with link.transaction():
                _drop(link)
        except psycopg.Error as e:
            raise Unavailable(f"the search index cannot be removed: {e}") from e
    return there


def _drop(link: Link) -> None:
    for name in TABLES:
        link.execute(f"DROP TABLE IF EXISTS {name}".encode())


def _version(link: Link) -> int | None:
    """Return the version of the index; None if there is none."""
    [(there,)] = link.execute("SELECT to_regclass('search_format') IS NOT NULL")
    rows = list(link.execute("SELECT max(version) FROM search_format")) if there else [(None,)]
    return rows[0][0]


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as e:
        kind = IndexBusy if is_worth_another_try(e) else IndexUnusable
        raise kind(" ".join(str(e).split())) from e


def _groups(text: str) -> list[int]:
    """Return the hashes of the groups of three characters in a text, as 32-bit numbers."""
    groups = {text[n : n + 3] for n in range(len(text) - 2)}
    return sorted({crc32(group.encode("utf-8", "surrogatepass")) - (1 << 31) for group in groups})


class PostgresSearchIndex:
    """An index in tables; see storage.search_index.SearchIndex."""

    def __init__(self, link: Link, stack: ExitStack) -> None:
        self._link, self._stack = link, stack

    def _all(self, sql: str, *bindings: Any) -> list[Any]:
        with _usable():
            return self._link.execute(sql.encode(), bindings).fetchall()

    def version(self) -> object | None:
        return None

    def marks(self) -> dict[int, Mark]:
        return {session: Mark(*mark) for session, *mark in self._all("SELECT * FROM search_marks")}

    def tip(self) -> bytes:
        return max((id for (id,) in self._all("SELECT id FROM search_tip")), default=b"")

    def set_tip(self, id: bytes) -> None:
        with _usable(), self._link.transaction():
            self._link.execute("DELETE FROM search_tip")
            self._link.execute("INSERT INTO search_tip VALUES (%s)", (id,))

    def known(self, session: int) -> dict[int, tuple[bytes, int]]:
        rows = self._all(
            "SELECT pos, id, ancestor FROM search_documents WHERE pos BETWEEN %s AND %s",
            *_range(session),
        )
        return {pos & MAX_SEQ: (id, ancestor) for pos, id, ancestor in rows}

    def write(self, change: Change) -> bool:
        session, expect, mark, documents, remove, stale = change
        run = self._link.execute
        with _usable(), self._link.transaction():
            run("LOCK TABLE search_marks IN SHARE ROW EXCLUSIVE MODE")
            found = self._all(
                "SELECT head, gone, last, id FROM search_marks WHERE session = %s", session
            )
            if (Mark(*found[0]) if found else None) != expect:
                return False
            gone = [session << SEQ_BITS | seq for seq in (*remove, *(d.seq for d in documents))]
            run("DELETE FROM search_documents WHERE pos = ANY(%s::bigint[])", (gone,))
            rows = [
                (session << SEQ_BITS | d.seq, d.id, d.ancestor, _groups(d.text or ""))
                for d in documents
            ]
            with self._link.cursor() as cursor:
                cursor.executemany(
                    "INSERT INTO search_documents VALUES (%s, %s, %s, %s::integer[])", rows
                )
            run("DELETE FROM search_marks WHERE session = %s", (session,))
            if mark is not None:
                run("INSERT INTO search_marks VALUES (%s, %s, %s, %s, %s)", (session, *mark))
            run(
                "UPDATE search_marks SET head = '', gone = '' WHERE session = ANY(%s::bigint[])",
                ([*stale],),
            )
        return True

    def find(self, text: str, below: bytes, limit: int) -> tuple[list[IdRow], bool]:
        rows = self._all(_CANDIDATES, _groups(text), below, limit)
        return [IdRow(pos >> SEQ_BITS, pos & MAX_SEQ, id) for pos, id in rows], len(rows) == limit

    def find_in(self, text: str, session: int) -> list[IdRow]:
        rows = self._all(_OF_SESSION, *_range(session), _groups(text), session)
        return [IdRow(session, pos & MAX_SEQ, id) for pos, id in rows]

    def compact(self, *, erase: bool = False) -> None:
        with _usable():
            self._link.execute(f"{'VACUUM' if erase else 'ANALYZE'} search_documents".encode())

    def close(self) -> None:
        self._stack.close()


def _range(session: int) -> tuple[int, int]:
    return session << SEQ_BITS, (session + 1 << SEQ_BITS) - 1
