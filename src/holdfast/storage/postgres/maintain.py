"""Maintain a store in PostgreSQL: gc, and the repair of sums and hashes."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from psycopg.types.numeric import Int8

from holdfast.errors import UNREADABLE
from holdfast.format import records
from holdfast.format.records import MAX_SEQ, position
from holdfast.storage.contract import Batch, StaleHead
from holdfast.storage.postgres import schema as schemas
from holdfast.storage.postgres import writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.storage.postgres.connection import Link
    from holdfast.storage.reader import Reader


@contextmanager
def alone(link: Link) -> Iterator[None]:
    """Open a transaction of gc. There is one at a time."""
    with link.transaction():
        schemas.lock(link, "gc")
        yield


def write_all(link: Link, first: Batch, rest: Sequence[Batch]) -> list[bool]:
    """Write a batch, and all others that are not refused.

    All sessions are locked at once, in order, so that no two transactions wait for each other.
    Copies are excluded by an advisory lock, so the counters do not change. Batches that only remove
    unchanged rows share one statement: a statement for each makes gc of 4,000 blobs 5 times slower.
    """
    writer.check(link, first.guards)
    writer.execute(link, first)
    sessions = {number for batch in rest for number in (*batch.sessions, *batch.shared)}
    if sessions:
        link.ask(
            "SELECT 1 FROM heads WHERE session = ANY(%s) ORDER BY session FOR UPDATE",
            ([*sessions],),
        )
    done = writer.hold(link, rest)
    trims = [n for n, batch in enumerate(rest) if not batch.guards and writer.removed_if(batch)]
    writer.execute(link, Batch(writes=[w for n in trims if done[n] for w in rest[n].writes]))
    for n in {*range(len(rest))}.difference(trims):
        done[n] = False
        with suppress(StaleHead), link.transaction():
            writer.check(link, rest[n].guards)
            writer.execute(link, rest[n])
            done[n] = True
    return done


_TALLY = """INSERT INTO tallies VALUES (%s, %s, %s, %s, (SELECT substring(body FOR 8) || token
FROM leases WHERE session = %s)) ON CONFLICT (session) DO UPDATE SET marks = excluded.marks,
operations = excluded.operations, tombs = excluded.tombs,
lease = coalesce(tallies.lease, excluded.lease)"""
_SPAN_LEFT = """INSERT INTO spans
SELECT pos >> 32, min(pos) & 4294967295, (max(pos) & 4294967295) + 1 FROM journal
WHERE pos BETWEEN %s AND %s GROUP BY pos >> 32
ON CONFLICT (session) DO UPDATE SET next = greatest(spans.next, excluded.next)"""


def add_up_anew(link: Link, reader: Reader, session: int) -> bool:
    """Update the tally of a session to match its rows. Return whether it was different."""
    number = Int8(session)
    link.execute("SELECT 1 FROM heads WHERE session = %s FOR UPDATE", (number,))
    link.execute("SELECT 1 FROM spans WHERE session = %s FOR UPDATE", (number,))
    if reader.damage(session) is None:
        return False
    sums = map(Int8, reader.sums(session).values())
    link.execute(_TALLY, (number, *sums, number))
    low, high = Int8(position(session, 0)), Int8(position(session, MAX_SEQ))
    first = Int8(position(session, reader.span(session).first))
    link.execute("DELETE FROM journal WHERE pos >= %s AND pos < %s", (low, first))
    link.execute(_SPAN_LEFT, (low, high))
    return True


_INDEX_NAMES = "SELECT num, name, body FROM sessions WHERE hash <> sha256(name)"
_TAKEN = "SELECT 1 FROM sessions WHERE hash = sha256(%s)"
_RENAME_INDEX = (
    "UPDATE sessions SET hash = sha256(%s), name = %s, body = %s WHERE num = %s AND name = %s"
)
_MARKS_INDEX = "SELECT pos, kind, value, body FROM marks WHERE hash <> sha256(value)"


def rehash(link: Link) -> bool:
    """Rebuild the hashes of sound rows. Return whether any was wrong.

    The hash of a damaged name stays, so that the name stays taken: otherwise a save under this name
    would start a new session. If another session has the same name, the one with the wrong hash
    gets a new name that ends with its number. Its states load; `verify` reports that its hashes do
    not match, because they cover the name.
    """
    changed = False
    sessions: list[Any] = link.execute(_INDEX_NAMES).fetchall()
    for number, name, body in sessions:
        with suppress(*UNREADABLE):
            info = records.unseal_session(number, name, body)
            new = name
            if link.execute(_TAKEN, (name,)).fetchall():
                new = name + b" (session %d)" % number
                body = records.seal_session(number, new, info)
            link.execute(_RENAME_INDEX, (new, new, body, Int8(number), name))
            changed = True
    marks: list[Any] = link.execute(_MARKS_INDEX).fetchall()
    for pos, kind, value, body in marks:
        with suppress(*UNREADABLE):
            records.unseal_mark(pos, kind, value, body)
            change = (
                "UPDATE marks SET hash = sha256(value) WHERE pos = %s AND kind = %s AND value = %s"
            )
            link.execute(change, (Int8(pos), kind, value))
            changed = True
    return changed
