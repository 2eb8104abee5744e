"""Create, find, check and upgrade the tables of a store in PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import errors as pg
from psycopg import sql

from holdfast.errors import Corrupt, InvalidRequest, StoreNotFound, UnsupportedFormat
from holdfast.format.records import SPACES, seal_counter
from holdfast.storage.tally import TALLY_MASK

if TYPE_CHECKING:
    from holdfast.storage.postgres.connection import Link, Target

FORMAT = 2

# Names of sessions, keys, labels and tags may be longer than an index key allows. So they are found
# by their SHA-256. Bodies are compressed already.
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
    "tallies": "(session bigint PRIMARY KEY, marks bigint NOT NULL, operations bigint NOT NULL, "
    "tombs bigint NOT NULL, lease bytea) WITH (fillfactor = 50)",
    "spans": "(session bigint PRIMARY KEY, first bigint NOT NULL, next bigint NOT NULL) "
    "WITH (fillfactor = 50)",
}
_SINCE_2 = ("tallies", "spans")
_DIGEST = f"(('x' || encode(substring(body FOR 8), 'hex'))::bit(64)::bigint & {TALLY_MASK})"
SUM = f"mod(coalesce(sum({_DIGEST}), 0), {TALLY_MASK + 1})::bigint"
"""SQL for the sum over rows; see `Tally.total`."""
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


def lock(link: Link, purpose: str, *, shared: bool = False) -> None:
    """Wait for a lock of the schema, and hold it until the end of the transaction."""
    how = "_shared" if shared else ""
    key = f"holdfast {purpose} {link.target.schema}"
    link.ask(f"SELECT pg_advisory_xact_lock{how}(hashtextextended(%s, 0))", (key,))


def refuse_shared(link: Link, target: Target) -> None:
    """Refuse a pooler that gives each transaction another connection of the server.

    Settings of a connection (schema, durability) would belong to another client. With any pooler,
    the process number of the server is not the one reported at first. With such a pooler, two idle
    connections have the same number.
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


def prepare(link: Link, target: Target, *, create: bool) -> int:
    """Check that a store exists and is complete, or create it, in one of many processes.

    Upgrade an older store unless it is opened read-only. Return its version.
    """
    refuse_shared(link, target)
    found = _version(link, target)
    if found == FORMAT or (found and target.read_only):
        return found
    if not found and not create:
        raise StoreNotFound(
            f"there is no store at {target.shown}", hint="open it once with create=True to make it"
        )
    with link.transaction():
        lock(link, "creation")
        found = _version(link, target)
        if not found:
            _create(link, target)
        elif found < FORMAT:
            _upgrade(link, target)
    return FORMAT


_TALLY = """INSERT INTO tallies
SELECT s.num, (SELECT {sum} FROM marks WHERE {own}), (SELECT {sum} FROM operations WHERE {own}),
(SELECT {sum} FROM tombs WHERE {own}), substring(l.body FOR 8) || l.token
FROM sessions s LEFT JOIN leases l ON l.session = s.num"""
_SPANS = """INSERT INTO spans SELECT pos >> 32, min(pos) & 4294967295, (max(pos) & 4294967295) + 1
FROM journal GROUP BY pos >> 32"""


def _upgrade(link: Link, target: Target) -> None:
    """Upgrade from version 1: add the tables of version 2 and fill them from the existing rows."""
    link.take_your_time()
    link.execute("LOCK TABLE heads, leases, journal IN EXCLUSIVE MODE")  # no other writer
    for name in _SINCE_2:
        schema = sql.Identifier(target.schema)
        link.execute(sql.SQL(f"CREATE TABLE {{}}.{name} {TABLES[name]}").format(schema))
    own = "pos BETWEEN s.num << 32 AND s.num << 32 | 4294967295"
    link.execute(_TALLY.format(sum=SUM, own=own))
    link.execute(_SPANS)
    link.execute("UPDATE format SET version = %s", (FORMAT,))


def _version(link: Link, target: Target) -> int:
    """Return the format version of the store; 0 if there is none."""
    ours = [*TABLES, *INDEXES]  # other tables may have names in an unknown encoding
    found = {name for (name,) in link.execute(_FOUND, (target.schema, ours))}
    if "format" not in found:
        if found & TABLES.keys():
            lost = "; its table format is missing, or these are tables of something else"
            raise Corrupt(f"the store {target.shown} is damaged{lost}", hint="choose a schema=…")
        return 0
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
    later = _SINCE_2 if version < FORMAT else ()
    missing = sorted((TABLES.keys() | INDEXES.keys()) - found - {*later})
    if missing:
        raise Corrupt(f"the store {target.shown} has lost its table or index {missing[0]!r}")
    return int(version)


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
