"""Writing to PostgreSQL: the statements of a commit.

A commit is one statement. Its first part compares and swaps the head; the others write only if that
did. Under READ COMMITTED the swap waits for whoever holds the head's row, then looks at it again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from psycopg import errors as pg
from psycopg.types.numeric import Int8

from holdfast.backends.base import Gone, Jot, Moved
from holdfast.backends.postgres_reader import hash_of
from holdfast.codec.records import SEQ_BITS, position
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import Corrupt, InvalidRequest, KeyTaken, SessionExists

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.backends.base import Change, Copied, Notes
    from holdfast.backends.postgres_link import Link
    from holdfast.codec.streams import RowWrite

_SWAP = """WITH moved AS (UPDATE heads SET body = %s WHERE session = %s AND body = %s
RETURNING session)"""
# A server that crashed may have forgotten the checkpoint that was built on, and have been given
# another one of its number since: then the head is what was expected, and what it means is not.
_SWAP_ON = """WITH moved AS (UPDATE heads SET body = %s WHERE session = %s AND body = %s
AND EXISTS (SELECT 1 FROM checkpoints WHERE pos = %s AND id = %s) RETURNING session)"""
_HEAD = """WITH moved AS (INSERT INTO heads AS h VALUES (%s, %s)
ON CONFLICT (session) DO UPDATE SET body = excluded.body WHERE h.body = '' RETURNING session)"""
_CREATE = """WITH moved AS (INSERT INTO sessions VALUES (%s, %s, %s, %s, %s) RETURNING num),
head AS (INSERT INTO heads SELECT num, %s FROM moved)"""
_CHECKPOINT = ", checkpoint AS (INSERT INTO checkpoints SELECT %s, %s, %s FROM moved)"
_ITEM = ", item AS (INSERT INTO items SELECT %s, %s FROM moved)"
_ITEMS = ", items_ AS (INSERT INTO items SELECT t.* FROM moved, unnest(%s, %s) t)"
_PACK = """, pack AS (INSERT INTO items SELECT %s, %s FROM moved
ON CONFLICT (pos) DO UPDATE SET body = excluded.body)"""
_PACKS = """, packs AS (INSERT INTO items SELECT t.* FROM moved, unnest(%s, %s) t
ON CONFLICT (pos) DO UPDATE SET body = excluded.body)"""
_PACKED = ", packed AS (DELETE FROM items USING moved WHERE pos = ANY(%s))"
# A blob that goes and comes back must not look to gc like the one that was there before.
_BLOBS = """, blobs_ AS (INSERT INTO blobs AS b (digest, uses, body)
SELECT t.digest, %s, t.body FROM moved, unnest(%s, %s) t (digest, body)
ON CONFLICT (digest) DO UPDATE SET uses = b.uses + 1)"""
_REWRITES = """, rewritten AS (INSERT INTO blobs AS b (digest, uses, body)
SELECT t.digest, %s, t.body FROM moved, unnest(%s, %s) t (digest, body)
ON CONFLICT (digest) DO UPDATE SET uses = b.uses + 1, body = excluded.body)"""
_SHARES = """, shared AS (UPDATE blobs SET uses = uses + 1 FROM moved WHERE digest = ANY(%s)
RETURNING digest)"""
_RENAME = """, renamed AS (UPDATE sessions SET hash = %s, name = %s, body = %s FROM moved
WHERE num = %s)"""
_KEY = ", key_ AS (INSERT INTO keys SELECT %s, %s, %s FROM moved)"
_KEYS = """, keys_ AS (INSERT INTO keys SELECT %s, t.* FROM moved, unnest(%s, %s) t
ON CONFLICT (session, hash) DO UPDATE SET seq = excluded.seq)"""
_UNMARKS = """, unmarked AS (DELETE FROM marks USING moved, unnest(%s, %s, %s) t (p, k, h)
WHERE pos = t.p AND kind = t.k AND hash = t.h)"""
_MARKS = """, marked AS (INSERT INTO marks SELECT t.* FROM moved, unnest(%s, %s, %s, %s, %s) t
ON CONFLICT (pos, kind, hash) DO UPDATE SET value = excluded.value, body = excluded.body)"""
_OPERATION = ", operation AS (INSERT INTO operations SELECT %s, %s FROM moved)"
_TOMBS = """, buried AS (INSERT INTO tombs SELECT t.* FROM moved, unnest(%s, %s) t
ON CONFLICT (pos) DO UPDATE SET body = excluded.body)"""
_UNTOMBS = ", unburied AS (DELETE FROM tombs USING moved WHERE pos = ANY(%s))"
_UNFACETS = """, unfaceted AS (DELETE FROM facets f USING moved, unnest(%s, %s, %s) t (k, h, i)
WHERE f.kind = t.k AND f.hash = t.h AND f.id = t.i)"""
_FACETS = """, faceted AS (INSERT INTO facets SELECT t.* FROM moved, unnest(%s, %s, %s) t
ON CONFLICT DO NOTHING)"""
_LEASED = """, leased AS (INSERT INTO leases SELECT %s, %s, clock_timestamp(), %s FROM moved
ON CONFLICT (session) DO UPDATE
SET token = excluded.token, since = excluded.since, body = excluded.body)"""
_JOURNAL = """, journal_ AS (INSERT INTO journal SELECT t.* FROM moved, unnest(%s, %s) t
ON CONFLICT (pos) DO UPDATE SET body = excluded.body)"""
_UNJOURNAL = ", unjournal AS (DELETE FROM journal USING moved WHERE pos >= %s AND pos < %s)"
_COPIED = ", copied AS (INSERT INTO checkpoints SELECT t.* FROM moved, unnest(%s, %s, %s) t)"
_OPERATIONS = """, operations_ AS (INSERT INTO operations SELECT t.* FROM moved, unnest(%s, %s) t
ON CONFLICT (pos) DO UPDATE SET body = excluded.body)"""
_GAPS = """, gaps_ AS (INSERT INTO gaps SELECT t.pos, NULLIF(t.far, -1), t.body
FROM moved, unnest(%s, %s, %s) t (pos, far, body)
ON CONFLICT (pos) DO UPDATE SET ancestor = excluded.ancestor, body = excluded.body)"""
_END = " SELECT 1 FROM moved"
# All or nothing: where a blob is missing, dividing by zero undoes the statement.
_END_SHARED = " SELECT 1 / ((SELECT count(*) FROM shared) = %s)::int FROM moved"

_LARGEST = 10**9
"""Bytes of data in one change. A message has less than 2**30 of all kinds."""
_NAMES = {"sessions_pkey", "sessions_hash_key", "heads_pkey"}


def ints(numbers: Iterable[int]) -> list[Int8]:
    return [Int8(n) for n in numbers]


class Statement:
    """The text and the bindings of one commit. Few texts: the server plans each once."""

    def __init__(self, change: Change) -> None:
        self._text: list[str] = []
        self._values: list[Any] = []
        self._end, self._count = _END, 0
        self._head(change)
        if change.checkpoint is not None:
            seq, id, body = change.checkpoint
            self._add(_CHECKPOINT, change.session << SEQ_BITS | seq, id, body)
        if len(change.rows) == 1 and not change.rows[0].replaces:
            [(stream, first, _, body)] = change.rows
            self._add(_ITEM, stream << STREAM_BITS | first, body)
        elif change.rows:
            self._rows(change.rows)
        if change.blobs:
            self._blobs(change.blobs)
        if change.notes is not None:
            self._notes(change.notes, change.session, change.checkpoint)
        self.text = "".join([*self._text, self._end])
        self.values = [*self._values, self._count] if self._count else self._values

    def _add(self, text: str, *values: Any) -> None:
        self._text.append(text)
        self._values += values

    def _head(self, change: Change) -> None:
        session = change.session
        if change.create is not None:
            name, row = change.create
            origin = change.notes.origin if change.notes else None
            where = None if origin is None else position(*origin)
            self._add(_CREATE, session, hash_of(name), name, where, row, change.head)
        elif change.expect and change.parent is not None:
            seq, id = change.parent
            where = session << SEQ_BITS | seq
            self._add(_SWAP_ON, change.head, session, change.expect, where, id)
        elif change.expect:
            self._add(_SWAP, change.head, session, change.expect)
        else:  # a head that was lost
            self._add(_HEAD, session, change.head)

    def _rows(self, rows: Sequence[RowWrite]) -> None:
        new: dict[int, bytes] = {}
        packed: set[int] = set()
        for stream, first, replaces, body in rows:
            pos = stream << STREAM_BITS | first
            if replaces:
                gone = range(pos, pos + replaces)
                packed.update(gone)
                for n in [n for n in new if n in gone]:
                    del new[n]
            new[pos] = body
        packs = {pos: body for pos, body in new.items() if pos in packed}
        for some, one, many in ((new.keys() - packs, _ITEM, _ITEMS), (packs.keys(), _PACK, _PACKS)):
            order = sorted(some)
            if len(order) == 1:
                self._add(one, order[0], new[order[0]])
            elif order:
                self._add(many, order, [new[pos] for pos in order])
        if gone_for_good := sorted(packed - packs.keys()):
            self._add(_PACKED, gone_for_good)

    def _blobs(self, blobs: Sequence[tuple[bytes, bytes, bool]]) -> None:
        """In the order of their digests, as everybody, so that no two wait for each other."""
        for text, wanted in ((_BLOBS, False), (_REWRITES, True)):
            some = sorted({d: body for d, body, rewrite in blobs if rewrite is wanted}.items())
            if some:
                digests, bodies = [d for d, _ in some], [body for _, body in some]
                self._add(text, random.getrandbits(32), digests, bodies)

    def _notes(
        self, notes: Notes, session: int, checkpoint: tuple[int, bytes, bytes] | None
    ) -> None:
        if notes.rename is not None:
            name, row = notes.rename
            self._add(_RENAME, hash_of(name), name, row, session)
        if notes.key is not None and checkpoint is not None:
            self._add(_KEY, session, hash_of(notes.key), checkpoint[0])
        if notes.keys:
            keys = {hash_of(key): seq for key, seq in notes.keys}
            self._add(_KEYS, session, [*keys], [*keys.values()])
        if notes.marks or notes.unmarks:
            self._marks(notes, session)
        if notes.operation is not None:
            self._add(_OPERATION, position(session, notes.operation[0]), notes.operation[1])
        if notes.tombs or notes.untombs:
            tombs = {seq: row for seq, row in notes.tombs if seq not in notes.untombs}
            if tombs:
                self._add(_TOMBS, [position(session, q) for q in tombs], [*tombs.values()])
            if notes.untombs:
                self._add(_UNTOMBS, [position(session, q) for q in notes.untombs])
        if notes.facets or notes.unfacets:
            facets = facet_hashes(notes.facets)
            self._facets(_UNFACETS, facet_hashes(notes.unfacets) - facets)
            self._facets(_FACETS, facets)
        if notes.lease is not None:
            self._add(_LEASED, session, *notes.lease)
        if notes.copied is not None:
            self._copied(notes.copied, session)
        if notes.shares:
            digests = sorted(set(notes.shares))
            self._add(_SHARES, digests)
            self._end, self._count = _END_SHARED, len(digests)

    def _copied(self, copied: Copied, session: int) -> None:
        if copied.checkpoints:
            seqs, ids, bodies = zip(*copied.checkpoints, strict=True)
            self._add(_COPIED, [position(session, seq) for seq in seqs], [*ids], [*bodies])
        if copied.operations:
            numbers, bodies = zip(*copied.operations, strict=True)
            self._add(_OPERATIONS, [position(session, n) for n in numbers], [*bodies])
        if copied.gaps:
            seqs, far, bodies = zip(*copied.gaps, strict=True)
            places = [position(session, seq) for seq in seqs]
            self._add(_GAPS, places, [-1 if at is None else at for at in far], [*bodies])
        if copied.journal_from:
            low, high = position(session, 0), position(session, copied.journal_from)
            self._add(_UNJOURNAL, Int8(low), Int8(high))
        if copied.journal:
            numbers, bodies = zip(*copied.journal, strict=True)
            self._add(_JOURNAL, [position(session, n) for n in numbers], [*bodies])

    def _marks(self, notes: Notes, session: int) -> None:
        marks = {(q, kind, hash_of(v)): (v, row) for q, kind, v, row in notes.marks}
        gone = {(q, kind, hash_of(v)) for q, kind, v in notes.unmarks} - marks.keys()
        for text, some, more in ((_UNMARKS, [*gone], ()), (_MARKS, [*marks], marks.values())):
            if some:
                self._add(
                    text,
                    [position(session, q) for q, _, _ in some],
                    [kind for _, kind, _ in some],
                    [digest for _, _, digest in some],
                    *([list(column) for column in zip(*more, strict=True)] if more else ()),
                )

    def _facets(self, text: str, facets: set[tuple[int, bytes, bytes]]) -> None:
        if facets:
            order = sorted(facets)
            self._add(text, [k for k, _, _ in order], [h for _, h, _ in order],
                      [i for _, _, i in order])  # fmt: skip


def facet_hashes(facets: Sequence[tuple[int, bytes, bytes]]) -> set[tuple[int, bytes, bytes]]:
    return {(kind, hash_of(value), id) for kind, value, id in facets}


def seconds(change: Change | Jot) -> float:
    """How long sending a change may take on a slow line."""
    return change.size() / 1e6


def check_size(change: Change | Jot) -> None:
    """Refuse what does not fit into a message: the server would end the connection in the midst."""
    size = change.size()
    if size > _LARGEST:
        raise InvalidRequest(
            f"{size:,} bytes of new data are too many for one save to PostgreSQL",
            hint=f"save it in parts of less than {_LARGEST:,} bytes",
        )


def write(link: Link, change: Change | Jot) -> None:
    """Write all of a change, or nothing; durable when this returns."""
    if isinstance(change, Jot):
        _jot(link, change)
        return
    statement = Statement(change)
    if change.notes is None or not change.notes.needs:
        _execute(link, statement)
        return
    with link.transaction():
        _lock(link, change, change.notes)
        _check_there(link, change, change.notes)
        _execute(link, statement)


def _execute(link: Link, statement: Statement) -> None:
    try:
        moved = link.ask(statement.text, statement.values).ntuples
    except pg.UniqueViolation as e:
        taken = e.diag.constraint_name
        if taken in _NAMES:
            raise SessionExists("a session of this name exists already") from None
        if taken == "keys_pkey":
            raise KeyTaken("the key names another checkpoint of this session") from None
        raise Corrupt("a row that is about to be written exists already") from e
    except pg.DivisionByZero:
        raise Gone from None
    if not moved:
        raise Moved


# The lock lets nobody take the lease over before this ends.
_OURS = "WITH held AS (SELECT 1 FROM leases WHERE session = %s AND token = %s FOR SHARE)"
_THERE_IS = "WITH held AS (SELECT 1 FROM heads WHERE session = %s FOR SHARE)"
_ENTRIES = """, written AS (INSERT INTO journal SELECT t.* FROM held, unnest(%s, %s) t RETURNING 1)
SELECT 1 FROM written"""


def _jot(link: Link, jot: Jot) -> None:
    who = (_THERE_IS, [jot.session]) if jot.token is None else (_OURS, [jot.session, jot.token])
    text, values = who
    first = position(jot.session, jot.first)
    places = [first + n for n in range(len(jot.entries))]
    try:
        written = link.ask(text + _ENTRIES, [*values, places, [*jot.entries]]).ntuples
    except pg.UniqueViolation:
        raise Moved from None
    if not written:
        raise Moved


def renew(link: Link, session: int, token: bytes) -> bool:
    return bool(
        link.ask(
            "UPDATE leases SET since = clock_timestamp() WHERE session = %s AND token = %s "
            "RETURNING 1",
            (session, token),
        ).ntuples
    )


_HELD = "SELECT body FROM heads WHERE session = %s"


def _lock(link: Link, change: Change, notes: Notes) -> None:
    """Heads in the order of their numbers, so that no two wait for each other.

    Whoever deletes or frees a checkpoint needs its session's head: so what is found there after
    this stays until the end of the transaction.
    """
    for number in sorted({change.session, *[s for s, _ in notes.needs]}):
        ours = number == change.session
        how = " FOR UPDATE" if ours else " FOR SHARE"
        found: Any = link.execute(_HELD + how, (Int8(number),)).fetchone()
        if ours and (found[0] if found else b"") != change.expect:
            raise Moved


_THERE = "SELECT count(*) FROM checkpoints WHERE pos = ANY(%s)"
_BURIED = "SELECT count(*) FROM tombs WHERE pos = ANY(%s)"


def _check_there(link: Link, change: Change, notes: Notes) -> None:
    places = {position(*place) for place in notes.needs}
    alive = {position(s, seq) for s, seq in notes.needs if seq not in notes.untombs}
    [(there,)] = link.execute(_THERE, (ints(places),)).fetchall()
    [(buried,)] = link.execute(_BURIED, (ints(alive),)).fetchall()
    if there < len(places) or buried:
        raise Gone
    if change.parent is not None:
        seq, id = change.parent
        pos = Int8(position(notes.origin[0] if notes.origin else change.session, seq))
        if link.execute("SELECT id FROM checkpoints WHERE pos = %s", (pos,)).fetchall() != [(id,)]:
            raise Gone


# A server that is ended while it waits for its standby then shows a change that only it has. This
# writes a little, and so waits until that, and all before it, is where a commit has to be.
_SEEN = "SELECT pg_logical_emit_message(true, 'holdfast', '') FROM "


def landed(link: Link, change: Change | Jot) -> bool | None:
    """Whether a change, whose outcome was unknown, was made, and durably; None if nothing can tell.

    Not within a transaction.
    """

    def is_there(where: str, *values: Any) -> bool:
        return bool(link.ask(_SEEN + where, values).ntuples)

    session = change.session
    if isinstance(change, Jot):
        pos, body = position(session, change.first), change.entries[0]
        return is_there("journal WHERE pos = %s AND body = %s", pos, body)
    if change.create is not None:  # the number is ours alone
        return is_there("sessions WHERE num = %s", session)
    if change.checkpoint is not None:
        seq, id, _ = change.checkpoint
        return is_there("checkpoints WHERE pos = %s AND id = %s", position(session, seq), id)
    if change.notes is not None and change.notes.operation is not None:
        number, body = change.notes.operation
        pos = position(session, number)
        return is_there("operations WHERE pos = %s AND body = %s", pos, body)
    ours = is_there("heads WHERE session = %s AND body = %s", session, change.head)
    return True if ours else None
