"""Several small changes in one statement: one question, one wait for the disk.

Each has its own comparison of its own session's head. Where another transaction holds a head,
nobody waits for it here: that change is left to be made by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.codec.records import SEQ_BITS
from holdfast.codec.streams import STREAM_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.backends.base import Change
    from holdfast.backends.postgres_link import Link

_LARGE = 1 << 16
"""Bytes; whoever writes more makes nobody else wait for that."""

_BEGIN = """WITH held AS (SELECT t.* FROM unnest({}) t
(session, expect, head, pos, id, body, parent, parent_id, {})
JOIN heads h ON h.session = t.session AND h.body = t.expect
WHERE EXISTS (SELECT 1 FROM checkpoints c WHERE c.pos = t.parent AND c.id = t.parent_id)
FOR UPDATE OF h SKIP LOCKED),
moved AS (UPDATE heads h SET body = held.head FROM held WHERE h.session = held.session
RETURNING held.*),
checkpoint AS (INSERT INTO checkpoints SELECT pos, id, body FROM moved),
item AS (INSERT INTO items SELECT item, row FROM moved WHERE item IS NOT NULL)"""
_PACKS = """, pack AS (INSERT INTO items SELECT pack, row FROM moved WHERE pack IS NOT NULL
ON CONFLICT (pos) DO UPDATE SET body = excluded.body),
packed AS (DELETE FROM items i USING moved WHERE i.pos > pack AND i.pos < stop)"""
_END = " SELECT session FROM moved"


def _text(columns: str) -> str:
    marks = ["%s"] * (8 + len(columns.split()))
    return _BEGIN.format(", ".join(marks), columns)


_PLAIN = _text("item, row") + _END
_PACKING = _text("item, row, pack, stop") + _PACKS + _END


def fits(change: Change) -> bool:
    """Whether it is what most are: a small checkpoint with one row, on a head that is there."""
    return (
        change.notes is None
        and change.create is None
        and change.expect != b""
        and change.checkpoint is not None
        and change.parent is not None
        and not change.blobs
        and len(change.rows) == 1
        and len(change.rows[0].body) + len(change.checkpoint[2]) < _LARGE
    )


def write(link: Link, changes: Sequence[Change]) -> set[int]:
    """Write changes that fit, of different sessions, and return the sessions of those written.

    Of the others nothing is: their heads are not what they expect, or are held by somebody.
    """
    order = sorted(changes, key=lambda change: change.session)
    packing = any(change.rows[0].replaces for change in order)
    lines = [_line(c, packing=packing) for c in order]
    columns = [list(column) for column in zip(*lines, strict=True)]
    answer = link.ask(_PACKING if packing else _PLAIN, columns)
    moved = [answer.get_value(n, 0) for n in range(answer.ntuples)]
    return {int.from_bytes(session, "big") for session in moved if session is not None}


def _line(change: Change, *, packing: bool) -> tuple[int | bytes | None, ...]:
    [(stream, first, replaces, row)] = change.rows
    session, pos = change.session, stream << STREAM_BITS | first
    seq, id, body = change.checkpoint or (0, b"", b"")
    parent_seq, parent = change.parent or (0, b"")
    base = session << SEQ_BITS
    known = (session, change.expect, change.head, base | seq, id, body, base | parent_seq, parent)
    if not packing:
        return (*known, pos, row)
    if replaces:
        return (*known, None, row, pos, pos + replaces)
    return (*known, pos, row, None, None)
