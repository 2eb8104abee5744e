"""Reading checkpoints: by place, along a line of descent, and in lists."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast import ids
from holdfast.checkpoint import Checkpoint
from holdfast.codec import records
from holdfast.codec.records import TAG, Gap, Head, Row
from holdfast.errors import UNREADABLE, Corrupt, SessionNotFound
from holdfast.model import DAMAGED, Operation, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Backend, Reader

PAGE = 256


class Place(NamedTuple):
    """Where a checkpoint lies: the number of its session, and its seq."""

    session: int
    seq: int


def newest(reader: Reader, session: int) -> int:
    """The seq of the newest checkpoint, even if the head's row is damaged."""
    try:
        return read_head(reader, session)[1].last
    except UNREADABLE:
        last = 0
        while rows := reader.checkpoints(session, last + 1, records.MAX_SEQ, PAGE):
            last = rows[-1][0]
        return last


def count(reader: Reader, session: int) -> int:
    """How many checkpoints a session has that are not deleted."""
    gone = sum([high - low for low, high in freed(reader, session)])
    return newest(reader, session) - gone - len(reader.tombs(session, 0, records.MAX_SEQ))


def read_row(reader: Reader, place: Place) -> Row:
    """A checkpoint that must be there: a missing row is damage."""
    found = reader.checkpoint(*place)
    if found is None:
        raise Corrupt(f"the record of checkpoint {place.seq} is missing")
    return records.unseal_checkpoint(*place, *found)


def session_name(reader: Reader, session: int) -> str:
    found = reader.session_by_number(session)
    if found is None:
        raise Corrupt("a checkpoint belongs to a session whose record is missing")
    try:
        records.unseal_session(session, *found)  # whose digest covers the name
    except UNREADABLE:
        if (reader.session(found[0]) or [None])[0] != session:  # and it is not found by it
            raise Corrupt("the name of a session is damaged") from None
    former = records.former_name(session, found[0])
    return records.decode_name(found[0] if former is None else former)


def is_deleted(reader: Reader, session: int) -> bool:
    """Whether a session was deleted as a whole, and waits for gc."""
    found = reader.session_by_number(session)
    return found is not None and records.former_name(session, found[0]) is not None


def is_buried(reader: Reader, place: Place) -> bool:
    """Whether a checkpoint is deleted; it loads no more, but gc has not freed it yet."""
    return bool(reader.tombs(*place, place.seq)) or is_deleted(reader, place.session)


def freed(reader: Reader, session: int) -> list[tuple[int, int]]:
    """The runs [low, high) of checkpoints that gc has freed."""
    rows = reader.gaps(session, 0, 0)
    return records.unseal_freed(session, rows[0][1]) if rows else []


def gap_before(reader: Reader, place: Place) -> Gap | None:
    rows = reader.gaps(place.session, place.seq, place.seq)
    return records.unseal_gap(*place, rows[0][1]) if rows else None


def place_at(position: int) -> Place:
    return Place(position >> records.SEQ_BITS, position & records.MAX_SEQ)


def damaged(
    seq: int, id: bytes | None, why: str, *, step: int = 0, parent: int | None = None
) -> Record:
    """Stands for a record that cannot be read, so that it does not vanish from lists."""
    id = id if type(id) is bytes and len(id) == ids.BYTES else bytes(ids.BYTES)
    return Record(seq, id, step, 0, "unknown", None, parent, {}, b"", lambda: b"", 0, 0, None, why)


class Marks(NamedTuple):
    """What people noted on a checkpoint, outside its record."""

    label: str | None = None
    tags: tuple[str, ...] = ()
    damaged: str | None = None
    order: int = -1


def marks_of(reader: Reader, session: int, low: int, high: int) -> dict[int, Marks]:
    """Marks by seq. A damaged one is told of, and hides neither the others nor what is marked."""
    out: dict[int, Marks] = {}
    try:
        marks = reader.marks(session, low, high)
    except UNREADABLE as e:
        return dict.fromkeys(range(low, high + 1), Marks(damaged=e.message))
    for seq, kind, value, body in marks:
        if type(seq) is not int:
            continue  # belongs to no checkpoint any more; verify() tells of it
        found = out.get(seq, Marks())
        try:
            rank = records.unseal_mark(records.position(session, seq), kind, value, body)
            text = records.decode_name(value)
        except UNREADABLE as e:
            out[seq] = found._replace(damaged=e.message)
            continue
        if kind == TAG:
            found = found._replace(tags=(*found.tags, text))
        elif rank >= found.order:
            found = found._replace(label=text, order=rank)
        out[seq] = found
    return out


def _dressed(
    name: str, record: Record, marks: Marks, gap: tuple[int, bytes | None] | None = None
) -> Checkpoint:
    if marks.damaged and not record.damaged:
        record = record._replace(damaged=marks.damaged)
    return Checkpoint(name, record, marks.label, marks.tags, gap)


def dress(reader: Reader, place: Place, record: Record) -> Checkpoint:
    """A record as a caller sees it, with its session's name, its label and tags."""
    name = session_name(reader, place.session)
    marks = marks_of(reader, place.session, place.seq, place.seq)
    return _dressed(name, record, marks.get(place.seq, Marks()), missing(reader, place, record))


def missing(reader: Reader, place: Place, record: Record) -> tuple[int, bytes | None] | None:
    """How many ancestors next to a checkpoint are deleted or freed, and the id of the one before.

    None where the parent is there, or is missing by damage.
    """
    parent = parent_of(reader, place, record)
    if parent is None:
        return None
    there = reader.checkpoint(*parent) is not None
    if there and not is_buried(reader, parent):
        return None
    if not there and gap_before(reader, place) is None:
        return None
    above = next((r for p, r in ancestors(reader, place, buried=False) if p != place), None)
    return record.step - (above.step if above else 0) - 1, above.id if above else None


def forked_at(reader: Reader, session: int) -> Place | None:
    """Where a fork begins: the parent of its first checkpoint, as the session's row tells."""
    found = reader.session_by_number(session) or (b"", b"")
    where = records.unseal_session(session, *found).origin
    return None if where is None else place_at(where)


def origin(reader: Reader, place: Place, record: Record) -> Place | None:
    """Where the parent of a fork's first checkpoint lies."""
    name = record.extra.get("origin")
    if name is None or record.parent_seq is None:
        return None
    with suppress(*UNREADABLE):  # then the name tells as well, unless the session was deleted
        return forked_at(reader, place.session)
    named = reader.session(records.encode_name(name))
    return Place(named[0], record.parent_seq) if named else None


def parent_of(reader: Reader, place: Place, record: Record) -> Place | None:
    if record.damaged and place.seq == 1:
        with suppress(*UNREADABLE):
            return forked_at(reader, place.session)
    if record.parent_seq is None:
        return None
    if "origin" in record.extra:
        return origin(reader, place, record)
    return Place(place.session, record.parent_seq)


class _Window:
    """Records around the place that is looked at: few at first, then a page at a time."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._session, self._low, self._high = -1, 0, 0
        self._size = 1
        self._rows: dict[int, tuple[bytes, bytes]] = {}
        self._tombs: set[int] = set()
        self._deleted = False

    def row(self, place: Place) -> tuple[bytes, bytes] | None:
        session, seq = place
        reader = self._reader
        if session != self._session or not self._low <= seq <= self._high:
            if session != self._session:
                self._deleted = is_deleted(reader, session)
            self._session, self._high, self._low = session, seq, max(seq - self._size + 1, 1)
            self._size = min(4 * self._size, PAGE)
            rows = reader.checkpoints(session, self._low, seq, PAGE)
            self._rows = {seq: (id, body) for seq, id, body in rows}
            self._tombs = {seq for seq, _ in reader.tombs(session, self._low, seq)}
        return self._rows.get(seq)

    def buried(self, place: Place) -> bool:
        """Of the place that was asked for last."""
        return self._deleted or place.seq in self._tombs


def ancestors(
    reader: Reader, start: Place | None, parent: int | None = None, *, buried: bool = False
) -> Iterator[tuple[Place, Record]]:
    """`start` and its ancestors, newest first, across forks; `buried` says to list deleted ones.

    A record that cannot be read is listed as damaged, and stepped over: its child knows its parent
    (and the head's row that of the head, given as `parent`). Two damaged ones in a row end the line
    with a record that has no parent. Where gc has freed some, their child knows who came before.
    """
    window = _Window(reader)
    at, below = start, None
    id: bytes | None = None
    step = 0
    while at is not None:
        found = window.row(at)
        if found is None and below is not None:
            gap = gap_before(reader, below)
            below = None
            if gap is not None:
                at = None if gap.ancestor is None else place_at(gap.ancestor)
                id, step, parent = None, max(step - gap.freed, 0), None
                continue
        try:
            if found is None:
                raise Corrupt(f"the record of checkpoint {at.seq} is missing")
            record = records.unseal_checkpoint(*at, *found).record
            if id not in (None, record.id):
                raise Corrupt(f"checkpoint {at.seq} is not the parent that its child names")
            if step and record.step != step:
                raise Corrupt(f"checkpoint {at.seq} has not the step before its child's")
        except UNREADABLE as e:
            id = id or (found[0] if found else None)
            parent = None if step == 1 else parent  # steps go down, so every line ends
            record = damaged(at.seq, id, e.message, step=step, parent=parent)
        if buried or not window.buried(at):
            yield at, record
        below, at = at, parent_of(reader, at, record)
        id, step = record.parent, max(record.step - 1, 0)
        parent = record.skip


def family(reader: Reader, session: int) -> Iterator[int]:
    """The session, the one it was forked from, and so on."""
    seen: set[int] = set()
    at: Place | None = Place(session, 0)
    while at is not None and at.session not in seen:
        seen.add(at.session)
        yield at.session
        try:
            at = forked_at(reader, at.session)
        except UNREADABLE:
            return


def find_session(reader: Reader, name: str) -> int:
    found = reader.session(records.encode_name(name))
    if found is None:
        raise SessionNotFound(f"there is no session {name!r}")
    return found[0]


def read_head(reader: Reader, session: int) -> tuple[bytes, Head]:
    """The head's row, the token of the next compare-and-swap, and what it says."""
    row = reader.head(session)
    if row is None:
        raise Corrupt("a session has lost its head")
    return row, records.unseal_head(session, row)


def session_agent(reader: Reader, session: int) -> str | None:
    """The agent that a session was made for; None also if its row is damaged."""
    found = reader.session_by_number(session)
    try:
        return records.unseal_session(session, *found).agent if found else None
    except UNREADABLE:
        return None


def read_operation(
    session: int, name: str, number: int, body: bytes
) -> tuple[int | None, Operation]:
    """An operation, and the newest checkpoint of its time; a damaged one says so."""
    try:
        kind, created, last, details = records.unseal_operation(session, number, body)
    except UNREADABLE as e:
        return None, Operation(name, number, DAMAGED, 0, {"damage": e.message})
    return last, Operation(name, number, kind, created, details)


def operations(reader: Reader, session: int, name: str, last: int) -> list[Operation]:
    rows = reader.operations(session, 1, last)
    return [read_operation(session, name, number, body)[1] for number, body in rows]


def page(
    reader: Reader, start: Place, parent: int | None = None
) -> tuple[list[Checkpoint], Place | None]:
    """A stretch of ancestors within one session, and where they go on."""
    out: list[tuple[Place, Record]] = []
    after: Place | None = None
    last: Record | None = None
    session = start.session
    for place, record in ancestors(reader, start, parent):
        if not out:
            session = place.session
        if len(out) == PAGE or place.session != session:
            after, last = place, record
            break
        out.append((place, record))
    if not out:
        return [], None
    name, wrong = f"session {session}", None
    try:
        name = session_name(reader, session)
    except UNREADABLE as e:  # which numbers do not need
        wrong = e.message
    marks = marks_of(reader, session, out[-1][0].seq, out[0][0].seq)
    dressed = []
    for (place, record), above in zip(out, [*[r for _, r in out[1:]], last], strict=True):
        gap = None
        if record.parent != (above.id if above else None) and not record.damaged:
            gap = (record.step - (above.step if above else 0) - 1, above.id if above else None)
        record = record._replace(damaged=record.damaged or wrong)
        dressed.append(_dressed(name, record, marks.get(place.seq, Marks()), gap))
    return dressed, after


def listing(
    reader: Reader, session: int, name: str, low: int, newest: int
) -> tuple[list[Checkpoint], int]:
    """A page of all checkpoints from `low` on, and where the next one begins.

    What cannot be read is listed as damaged. Deleted and freed ones are left out.
    """
    rows = reader.checkpoints(session, low, newest, PAGE)
    high = rows[-1][0] if len(rows) == PAGE else newest
    found = {seq: (id, body) for seq, id, body in rows}
    marks = marks_of(reader, session, low, high)
    tombs = {seq for seq, _ in reader.tombs(session, low, high)}
    gone = freed(reader, session)
    gaps = dict(reader.gaps(session, low, high)) if gone else {}
    listed: dict[int, Record] = {}
    out: list[Checkpoint] = []
    for seq in _present(low, high + 1, gone):
        if seq in tombs:
            continue
        id, body = found.get(seq, (None, b""))
        gap = None
        try:
            if id is None:
                raise Corrupt(f"the record of checkpoint {seq} is missing")
            record = records.unseal_checkpoint(session, seq, id, body).record
            near = record.parent_seq in found and record.parent_seq not in tombs
            if not near or "origin" in record.extra:
                if seq in gaps:
                    gap = _gap(records.unseal_gap(session, seq, gaps[seq]), record, listed, session)
                gap = gap or missing(reader, Place(session, seq), record)
            listed[seq] = record
        except UNREADABLE as e:
            record = damaged(seq, id, e.message)
        out.append(_dressed(name, record, marks.get(seq, Marks()), gap))
        if len(out) == PAGE:
            return out, seq + 1
    return out, high + 1


def _gap(
    gap: Gap, record: Record, listed: dict[int, Record], session: int
) -> tuple[int, bytes | None] | None:
    """What `missing` tells, without looking anything up, if the gap's far end is listed."""
    if gap.ancestor is None:
        return record.step - 1, None
    home, seq = place_at(gap.ancestor)
    if home != session or seq not in listed:
        return None
    return record.step - listed[seq].step - 1, listed[seq].id


def _present(low: int, high: int, gone: list[tuple[int, int]]) -> Iterator[int]:
    """The numbers [low, high) without the runs that are gone."""
    for start, stop in gone:
        if stop > low:
            yield from range(low, min(start, high))
            low = max(low, stop)
    yield from range(low, high)


def tree(
    backend: Backend,
    raw_name: bytes,
    name: str,
    *,
    newest_first: bool = False,
    high: int | None = None,
) -> Iterator[Checkpoint]:
    """Every checkpoint of a session, a page at a time, so that no view stays open meanwhile.

    The newest first, beginning with number `high` if that is given; or the oldest.
    """
    low = 1
    while True:
        with backend.reader() as reader:
            found = reader.session(raw_name)
            last = newest(reader, found[0]) if found and high is None else high or 0
            if found is None or low > last:
                return
            if newest_first:
                page, _ = listing(reader, found[0], name, max(last - PAGE + 1, 1), last)
                page.reverse()
                high = last - PAGE
            else:
                page, low = listing(reader, found[0], name, low, last)
        yield from page


def forks(backend: Backend, raw_name: bytes) -> dict[int, list[str]]:
    """By the seq of a session's checkpoints: the sessions that were forked from it."""
    found: dict[int, list[str]] = {}
    with backend.reader() as reader:
        session = reader.session(raw_name)
        for seq, number in reader.forks(session[0], 1, records.MAX_SEQ) if session else ():
            row = reader.session_by_number(number)
            if row is not None and records.former_name(number, row[0]) is None:
                found.setdefault(seq, []).append(records.shown_name(row[0]))
    return found
