"""Maintain a store in PostgreSQL: gc, and the repair of sums and hashes."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from psycopg.types.numeric import Int8

from holdfast.errors import UNREADABLE
from holdfast.format import records
from holdfast.format.records import (
    COPIED,
    FREED,
    MAX_SEQ,
    SEQ_BITS,
    position,
    seal_counter,
    unseal_counter,
)
from holdfast.storage.changes import of_sweep
from holdfast.storage.contract import MissingReference
from holdfast.storage.postgres.schema import lock_key
from holdfast.storage.postgres.writer import Statement, execute, ints
from holdfast.storage.tally import Tally, Turnover

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.storage.contract import Sweep, Trim
    from holdfast.storage.postgres.connection import Link
    from holdfast.storage.reader import Reader


@contextmanager
def alone(link: Link, schema: str) -> Iterator[None]:
    """Open a transaction of gc. There is one at a time."""
    with link.transaction():
        key = lock_key(schema, "gc")
        link.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
        yield


# gc and copies exclude each other by an advisory lock. So these numbers do not change under it.

PUT_COUNTER = """INSERT INTO counters VALUES (%s, %s)
ON CONFLICT (space) DO UPDATE SET body = excluded.body"""


def _turn(link: Link, space: str) -> None:
    """Store a new random number, which says that something was freed or copied."""
    link.execute(PUT_COUNTER, (space, seal_counter(space, Turnover.new())))


def _check_turn(link: Link, space: str, expected: int) -> None:
    found: Any = link.execute("SELECT body FROM counters WHERE space = %s", (space,)).fetchall()
    if expected != (unseal_counter(space, found[0][0]) if found else 0):
        raise MissingReference


def begin_sweeps(link: Link, sweeps: Sequence[Sweep]) -> None:
    """Lock all sessions that the sweeps read or write."""
    _turn(link, FREED)
    sessions = {s.session for s in sweeps}
    for sweep in sweeps:
        for graft in sweep.grafts:
            sessions.add(graft.session)
            if graft.ancestor is not None:
                sessions.add(graft.ancestor >> SEQ_BITS)
    link.execute(
        "SELECT 1 FROM heads WHERE session = ANY(%s) ORDER BY session FOR UPDATE",
        (ints(sorted(sessions)),),
    )


def sweep(link: Link, sweep: Sweep) -> None:
    batch = of_sweep(sweep)
    execute(link, Statement(batch), batch)


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
    sums = ints(Tally.sums(reader, session).values())
    link.execute(_TALLY, (number, *sums, number))
    low, high = Int8(position(session, 0)), Int8(position(session, MAX_SEQ))
    first = Int8(position(session, reader.span(session).first))
    link.execute("DELETE FROM journal WHERE pos >= %s AND pos < %s", (low, first))
    link.execute(_SPAN_LEFT, (low, high))
    return True


_UNCHANGED = """SELECT i.pos FROM items i JOIN unnest(%s, %s) t (pos, begins) ON i.pos = t.pos
WHERE substring(i.body FOR length(t.begins)) = t.begins ORDER BY i.pos FOR UPDATE OF i"""
_DEAD_BLOBS = """DELETE FROM blobs b USING unnest(%s, %s) t (digest, uses)
WHERE b.digest = t.digest AND b.uses = t.uses"""


def trim(link: Link, trim: Trim) -> int:
    """Remove each group of rows if all of its rows are unchanged. They are locked until then."""
    _check_turn(link, COPIED, trim.copied)
    _turn(link, FREED)
    known = dict(row for group in trim.items for row in group.remove)
    gone = 0
    if known:
        found = link.execute(_UNCHANGED, (ints(known), [*known.values()])).fetchall()
        there = {pos for (pos,) in found}
        going: list[int] = []
        instead: dict[int, bytes] = {}
        for group in trim.items:
            if all(pos in there and known[pos] == begin for pos, begin in group.remove):
                going += [row.position for row in group.remove]
                there.difference_update([row.position for row in group.remove])
                instead.update(group.replace)
        gone += link.execute("DELETE FROM items WHERE pos = ANY(%s)", (ints(going),)).rowcount
        if instead:
            link.execute(
                "INSERT INTO items SELECT * FROM unnest(%s, %s)",
                (ints(instead), [*instead.values()]),
            )
    if trim.blobs:
        digests, uses = zip(*trim.blobs, strict=True)
        gone += link.execute(_DEAD_BLOBS, ([*digests], ints(uses))).rowcount
    return gone


_INDEX_NAMES = "SELECT num, name, body FROM sessions WHERE hash <> sha256(name)"
_TAKEN = "SELECT 1 FROM sessions WHERE hash = sha256(%s)"
_RENAME_INDEX = (
    "UPDATE sessions SET hash = sha256(%s), name = %s, body = %s WHERE num = %s AND name = %s"
)
_MARKS_INDEX = "SELECT pos, kind, value, body FROM marks WHERE hash <> sha256(value)"


def rehash(link: Link) -> None:
    """Rebuild the hashes of sound rows.

    The hash of a damaged name stays, so that the name stays taken: otherwise a save under this name
    would start a new session. If another session has the same name, the one with the wrong hash
    gets a new name that ends with its number. Its states load; `verify` reports that its hashes do
    not match, because they cover the name.
    """
    sessions: list[Any] = link.execute(_INDEX_NAMES).fetchall()
    for number, name, body in sessions:
        with suppress(*UNREADABLE):
            info = records.unseal_session(number, name, body)
            new = name
            if link.execute(_TAKEN, (name,)).fetchall():
                new = name + b" (session %d)" % number
                body = records.seal_session(number, new, info)
            link.execute(_RENAME_INDEX, (new, new, body, Int8(number), name))
    marks: list[Any] = link.execute(_MARKS_INDEX).fetchall()
    for pos, kind, value, body in marks:
        with suppress(*UNREADABLE):
            records.unseal_mark(pos, kind, value, body)
            change = (
                "UPDATE marks SET hash = sha256(value) WHERE pos = %s AND kind = %s AND value = %s"
            )
            link.execute(change, (Int8(pos), kind, value))
