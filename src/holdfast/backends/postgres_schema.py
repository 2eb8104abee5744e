"""The tables of a store in PostgreSQL: making them, and finding them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import errors as pg
from psycopg import sql

from holdfast.codec.records import SPACES, seal_counter
from holdfast.errors import Corrupt, InvalidRequest, StoreNotFound, UnsupportedFormat

if TYPE_CHECKING:
    from holdfast.backends.postgres_link import Link, Target

FORMAT = 1

# What people name (sessions, keys, labels, tags) may be longer than a key of an index, so it is
# found by its SHA-256. Bodies are compressed already.
TABLES = {
    "format": "(version integer NOT NULL)",
    "counters": "(space text PRIMARY KEY, body bytea NOT NULL)",
    "sessions": "(num bigint PRIMARY KEY, hash bytea NOT NULL UNIQUE, name bytea NOT NULL, "
    "origin bigint, body bytea NOT NULL)",
    "heads": "(session bigint PRIMARY KEY, body bytea NOT NULL) WITH (fillfactor = 50)",
    "checkpoints": "(pos bigint PRIMARY KEY, id bytea NOT NULL UNIQUE, body bytea NOT NULL)",
    "keys": "(session bigint, hash bytea, seq bigint NOT NULL, PRIMARY KEY (session, hash))",
    "items": "(pos bigint PRIMARY KEY, body bytea NOT NULL)",
    "blobs": "(num bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest bytea NOT NULL UNIQUE, "
    "uses bigint NOT NULL, body bytea NOT NULL)",
    "marks": "(pos bigint, kind integer, hash bytea, value bytea NOT NULL, body bytea NOT NULL, "
    "PRIMARY KEY (pos, kind, hash))",
    "operations": "(pos bigint PRIMARY KEY, body bytea NOT NULL)",
    "tombs": "(pos bigint PRIMARY KEY, body bytea NOT NULL)",
    "gaps": "(pos bigint PRIMARY KEY, ancestor bigint, body bytea NOT NULL)",
    "facets": "(kind integer, hash bytea, id bytea, PRIMARY KEY (kind, hash, id))",
    "leases": "(session bigint PRIMARY KEY, token bytea NOT NULL, since timestamptz NOT NULL, "
    "body bytea NOT NULL) WITH (fillfactor = 50)",
    "journal": "(pos bigint PRIMARY KEY, body bytea NOT NULL)",
}
INDEXES = {
    "sessions_by_name": "sessions (substring(name FOR 200))",
    "forks": "sessions (origin) WHERE origin IS NOT NULL",
    "marks_by_value": "marks (kind, hash, pos)",
    "gaps_by_ancestor": "gaps (ancestor) WHERE ancestor IS NOT NULL",
}
_COMPRESSED = ("items", "blobs", "checkpoints", "operations", "journal")

_FOUND = """SELECT c.relname FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = ANY(%s)"""


def lock_key(schema: str, purpose: str) -> str:
    """What to lock by pg_advisory_xact_lock(hashtextextended(…, 0))."""
    return f"holdfast {purpose} {schema}"


def refuse_shared(link: Link, target: Target) -> None:
    """Refuse a pooler that gives each transaction another connection of the server's.

    What is set on a connection (schema, durability) would be another client's. With any pooler the
    number of the server's process is not the one that was told at first; with such a one, two
    connections that rest have the same.
    """
    process = _process(link)
    if process == link.info.backend_pid:
        return
    other = target.connect()
    try:
        shared = _process(other) == process
    finally:
        other.close()
    if shared:
        raise InvalidRequest(
            f"{target.shown} is behind a pooler that shares connections between transactions",
            hint="set its pool_mode to session, or connect to the server itself",
        )


def _process(link: Link) -> int:
    [(process,)] = link.rows("SELECT pg_backend_pid()")
    return int(process)


def prepare(link: Link, target: Target, *, create: bool) -> None:
    """Check that a store is there and complete; or make it, one process of many."""
    refuse_shared(link, target)
    if _exists(link, target):
        return
    if not create:
        raise StoreNotFound(
            f"there is no store at {target.shown}", hint="open it once with create=True to make it"
        )
    with link.transaction():
        link.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))",
            (lock_key(target.schema, "creation"),),
        )
        if not _exists(link, target):
            _create(link, target)


def _exists(link: Link, target: Target) -> bool:
    ours = [*TABLES, *INDEXES]  # others' names may be of an encoding that nobody knows
    found = {name for (name,) in link.execute(_FOUND, (target.schema, ours))}
    if "format" not in found:
        if found & TABLES.keys():
            lost = "; its table format is missing, or these are tables of something else"
            raise Corrupt(f"the store {target.shown} is damaged{lost}", hint="choose a schema=…")
        return False
    rows: list[Any] = link.execute("SELECT version FROM format").fetchall()
    if len(rows) != 1:
        raise Corrupt(f"the store {target.shown} does not say which format it has")
    [(version,)] = rows
    if version > FORMAT:
        raise UnsupportedFormat(
            f"the store {target.shown} has format {version}; this version knows up to {FORMAT}",
            hint="use a newer holdfast",
        )
    if version < 1:
        raise Corrupt(f"the store {target.shown} declares an impossible format {version}")
    missing = sorted((TABLES.keys() | INDEXES.keys()) - found)
    if missing:
        raise Corrupt(f"the store {target.shown} has lost its table or index {missing[0]!r}")
    return True


def _create(link: Link, target: Target) -> None:
    schema = sql.Identifier(target.schema)
    known = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s"
    try:
        if not link.execute(known, (target.schema,)).fetchall():
            link.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
        for name, columns in TABLES.items():
            link.execute(sql.SQL(f"CREATE TABLE {{}}.{name} {columns}").format(schema))
        for name, what in INDEXES.items():
            table, rest = what.split(" ", 1)
            link.execute(sql.SQL(f"CREATE INDEX {name} ON {{}}.{table} {rest}").format(schema))
        for name in _COMPRESSED:
            link.execute(
                sql.SQL(f"ALTER TABLE {{}}.{name} ALTER body SET STORAGE EXTERNAL").format(schema)
            )
    except (pg.ReservedName, pg.DuplicateTable, pg.WrongObjectType) as e:
        raise InvalidRequest(
            f"cannot make a store at {target.shown}: {target.plain(e)}", hint="choose a schema=…"
        ) from e
    for space in SPACES:
        link.execute("INSERT INTO counters VALUES (%s, %s)", (space, seal_counter(space, 1)))
    link.execute("INSERT INTO format VALUES (%s)", (FORMAT,))
