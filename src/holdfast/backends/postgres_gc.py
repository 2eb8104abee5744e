"""gc in PostgreSQL, and what keeps it and copies apart."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psycopg.types.numeric import Int8

from holdfast.backends.base import Gone, Turnover
from holdfast.backends.postgres_reader import hash_of
from holdfast.backends.postgres_schema import lock_key
from holdfast.backends.postgres_writer import facet_hashes, ints, write
from holdfast.codec.records import (
    COPIED,
    FREED,
    SEQ_BITS,
    position,
    seal_counter,
    unseal_counter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.backends.base import Change, Copied, Sweep, Trim
    from holdfast.backends.postgres_link import Link


def _exclude(link: Link, schema: str, how: str) -> None:
    link.execute(f"SELECT {how}(hashtextextended(%s, 0))", (lock_key(schema, "gc"),))


@contextmanager
def alone(link: Link, schema: str) -> Iterator[None]:
    """A transaction of gc, one at a time."""
    with link.transaction():
        _exclude(link, schema, "pg_advisory_xact_lock")
        yield


def write_copied(link: Link, schema: str, change: Change, copied: Copied) -> None:
    """A change of a copy, while no gc is at work."""
    with link.transaction():
        _exclude(link, schema, "pg_advisory_xact_lock_shared")
        _check_turn(link, FREED, copied.freed)
        _turn(link, COPIED)
        write(link, change)


# gc and copies keep each other off by an advisory lock, so what these find stays until they end.

_TURN = """INSERT INTO counters VALUES (%s, %s)
ON CONFLICT (space) DO UPDATE SET body = excluded.body"""


def _turn(link: Link, space: str) -> None:
    """Say that something was freed or copied."""
    link.execute(_TURN, (space, seal_counter(space, Turnover.new())))


def _check_turn(link: Link, space: str, expected: int) -> None:
    found: Any = link.execute("SELECT body FROM counters WHERE space = %s", (space,)).fetchall()
    if expected != (unseal_counter(space, found[0][0]) if found else 0):
        raise Gone


def begin_sweeps(link: Link, sweeps: Sequence[Sweep]) -> None:
    """Lock all sessions that several sweeps look at or write to."""
    _turn(link, FREED)
    sessions = {s.session for s in sweeps}
    for sweep in sweeps:
        for session, _, ancestor, _ in sweep.gaps:
            sessions.add(session)
            if ancestor is not None:
                sessions.add(ancestor >> SEQ_BITS)
    link.execute(
        "SELECT 1 FROM heads WHERE session = ANY(%s) ORDER BY session FOR UPDATE",
        (ints(sorted(sessions)),),
    )


def sweep(link: Link, sweep: Sweep) -> None:
    session = sweep.session
    if sweep.checkpoints:
        going = ints(position(session, seq) for seq, _ in sweep.checkpoints)
        for table in ("checkpoints", "tombs", "gaps", "marks"):
            link.execute(f"DELETE FROM {table} WHERE pos = ANY(%s)", (going,))  # noqa: S608
    if sweep.keys:
        link.execute(
            "DELETE FROM keys WHERE session = %s AND hash = ANY(%s)",
            (Int8(session), [hash_of(key) for key in sweep.keys]),
        )
    if sweep.facets:
        facets = sorted(facet_hashes(sweep.facets))
        link.execute(
            "DELETE FROM facets f USING unnest(%s, %s, %s) t (k, h, i) "
            "WHERE f.kind = t.k AND f.hash = t.h AND f.id = t.i",
            (ints(k for k, _, _ in facets), [h for _, h, _ in facets], [i for _, _, i in facets]),
        )
    for other, seq, ancestor, body in sweep.gaps:
        link.execute(
            "INSERT INTO gaps VALUES (%s, %s, %s) ON CONFLICT (pos) "
            "DO UPDATE SET ancestor = excluded.ancestor, body = excluded.body",
            (Int8(position(other, seq)), None if ancestor is None else Int8(ancestor), body),
        )
    if sweep.journal:
        low, high = Int8(position(session, 0)), Int8(position(session, sweep.journal))
        link.execute("DELETE FROM journal WHERE pos >= %s AND pos < %s", (low, high))
    if sweep.remove is not None:
        low, high = Int8(position(session, 0)), Int8(position(session + 1, 0))
        link.execute("DELETE FROM journal WHERE pos >= %s AND pos < %s", (low, high))
        link.execute("DELETE FROM leases WHERE session = %s", (Int8(session),))
        link.execute("DELETE FROM sessions WHERE num = %s", (Int8(session),))
        link.execute("DELETE FROM heads WHERE session = %s", (Int8(session),))
        link.execute("DELETE FROM operations WHERE pos >= %s AND pos < %s", (low, high))
        link.execute("DELETE FROM gaps WHERE pos = %s", (low,))


_UNCHANGED = """SELECT i.pos FROM items i JOIN unnest(%s, %s) t (pos, begins) ON i.pos = t.pos
WHERE substring(i.body FOR length(t.begins)) = t.begins ORDER BY i.pos FOR UPDATE OF i"""
_DEAD_BLOBS = """DELETE FROM blobs b USING unnest(%s, %s) t (digest, uses)
WHERE b.digest = t.digest AND b.uses = t.uses"""


def trim(link: Link, trim: Trim) -> int:
    """Rows that go together go only if all are what they were, and are locked until they went."""
    _check_turn(link, COPIED, trim.copied)
    _turn(link, FREED)
    known = {pos: begin for rows, _ in trim.items for pos, begin in rows}
    gone = 0
    if known:
        found = link.execute(_UNCHANGED, (ints(known), [*known.values()])).fetchall()
        there = {pos for (pos,) in found}
        going: list[int] = []
        instead: dict[int, bytes] = {}
        for rows, new in trim.items:
            if all(pos in there and known[pos] == begin for pos, begin in rows):
                going += [pos for pos, _ in rows]
                there.difference_update([pos for pos, _ in rows])
                instead.update(new)
        gone += link.execute("DELETE FROM items WHERE pos = ANY(%s)", (ints(going),)).rowcount
        if instead:
            link.execute(
                "INSERT INTO items SELECT * FROM unnest(%s, %s)",
                (ints(instead), [*instead.values()]),
            )
    if trim.blobs:
        digests, uses = [d for d, _ in trim.blobs], ints(u for _, u in trim.blobs)
        gone += link.execute(_DEAD_BLOBS, (digests, uses)).rowcount
    return gone
