"""Reading checkpoints: by place, along a line of descent, and by revision."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast import ids
from holdfast.codec import records
from holdfast.codec.records import LABEL, TAG, Head, Row
from holdfast.errors import (
    UNREADABLE,
    AmbiguousRevision,
    CheckpointNotFound,
    Corrupt,
    InvalidRequest,
    SessionNotFound,
)
from holdfast.model import Checkpoint, Operation, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Reader

PAGE = 256
_MAX_MATCHES = 10_000


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
    return records.decode_name(found[0])


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
    """Marks by seq. A damaged one is told of, and does not hide the others."""
    out: dict[int, Marks] = {}
    for seq, kind, value, body in reader.marks(session, low, high):
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


def _dressed(name: str, record: Record, marks: Marks) -> Checkpoint:
    if marks.damaged and not record.damaged:
        record = record._replace(damaged=marks.damaged)
    return Checkpoint(name, record, marks.label, marks.tags)


def dress(reader: Reader, place: Place, record: Record) -> Checkpoint:
    """A record as a caller sees it, with its session's name, its label and tags."""
    name = session_name(reader, place.session)
    marks = marks_of(reader, place.session, place.seq, place.seq)
    return _dressed(name, record, marks.get(place.seq, Marks()))


def origin(reader: Reader, record: Record) -> Place | None:
    """Where the parent of a fork's first checkpoint lies."""
    name = record.extra.get("origin")
    if name is None or record.parent_seq is None:
        return None
    found = reader.session(records.encode_name(name))
    return Place(found[0], record.parent_seq) if found else None


def parent_of(reader: Reader, place: Place, record: Record) -> Place | None:
    if record.parent_seq is None:
        return None
    if "origin" in record.extra:
        return origin(reader, record)
    return Place(place.session, record.parent_seq)


def ancestors(
    reader: Reader, start: Place | None, parent: int | None = None
) -> Iterator[tuple[Place, Record]]:
    """`start` and its ancestors, newest first, across forks.

    A record that cannot be read is listed as damaged, and stepped over: its child knows its parent
    (and the head's row that of the head, given as `parent`). Two damaged ones in a row end the line
    with a record that has no parent.
    """
    page: dict[int, tuple[bytes, bytes]] = {}
    low = high = 0
    at = start
    session = -1
    child: Record | None = None
    while at is not None:
        if at.session != session or not low <= at.seq <= high:
            session, high, low = at.session, at.seq, max(at.seq - PAGE + 1, 1)
            rows = reader.checkpoints(session, low, high, PAGE)
            page = {seq: (id, body) for seq, id, body in rows}
        found = page.get(at.seq)
        try:
            if found is None:
                raise Corrupt(f"the record of checkpoint {at.seq} is missing")
            record = records.unseal_checkpoint(session, at.seq, *found).record
            if child is not None and child.parent not in (None, record.id):
                raise Corrupt(f"checkpoint {at.seq} is not the parent that its child names")
            if child is not None and child.step and record.step != child.step - 1:
                raise Corrupt(f"checkpoint {at.seq} has not the step before its child's")
        except UNREADABLE as e:
            if child is not None:
                step = max(child.step - 1, 0)
                parent = child.skip if step else None  # steps go down, so every line ends
            else:
                step = 0
            id = child.parent if child is not None else found[0] if found else None
            record = damaged(at.seq, id, e.message, step=step, parent=parent)
        yield at, record
        at = parent_of(reader, at, record)
        child = record


def family(reader: Reader, session: int) -> Iterator[int]:
    """The session, the one it was forked from, and so on."""
    seen: set[int] = set()
    at: Place | None = Place(session, 1)
    while at is not None and at.session not in seen:
        seen.add(at.session)
        yield at.session
        first = reader.checkpoint(at.session, 1)
        try:
            row = records.unseal_checkpoint(at.session, 1, *first) if first else None
        except UNREADABLE:
            row = None
        at = origin(reader, row.record) if row else None


class Resolver:
    """Finds the checkpoint that a revision names, for one session."""

    def __init__(self, reader: Reader, session: int, name: str) -> None:
        self._reader, self._session, self._name = reader, session, name

    def find(self, revision: str) -> Place:
        if not isinstance(revision, str) or not revision:
            raise InvalidRequest(f"not a revision: {revision!r}", hint="see docs: Revisions")
        full = ids.from_text(revision)
        if full is not None and (place := self._by_id(full)) is not None:
            return place
        if revision.startswith("@"):
            return self._relative(revision)
        kind, colon, rest = revision.partition(":")
        if colon and kind in ("label", "tag", "key", "step"):
            place = getattr(self, f"_by_{kind}")(rest)
            if place is None:
                raise CheckpointNotFound(
                    f"no checkpoint with {kind} {rest!r} among the ancestors of the head of "
                    f"session {self._name!r}"
                )
            return place  # type: ignore[no-any-return]
        if (place := self._by_label(revision)) is not None:
            return place
        return self._by_prefix(revision)

    def _line(self) -> Iterator[tuple[Place, Record]]:
        """The head's ancestors, to the last that is certain."""
        _, head = read_head(self._reader, self._session)
        start = Place(self._session, head.seq) if head.seq else None
        for place, record in ancestors(self._reader, start, head.parent):
            yield place, record
            if record.damaged and record.parent_seq is None and place.seq > 1:
                raise Corrupt(
                    f"what lies behind checkpoint {place.seq} is unknown: {record.damaged}"
                )

    def _by_id(self, raw: bytes) -> Place | None:
        for session, seq, _ in self._reader.find_ids(raw, raw, 1):
            place = Place(session, seq)
            if session == self._session or any(p == place for p, _ in self._line()):
                return place
            other = session_name(self._reader, session)
            raise CheckpointNotFound(
                f"checkpoint {ids.to_text(raw)} belongs to another session, {other!r}"
            )
        return None

    def _relative(self, revision: str) -> Place:
        back = revision[2:] if revision.startswith("@~") else "0" if revision == "@" else ""
        if not back.isdecimal():
            raise InvalidRequest(f"not a revision: {revision!r}", hint="use @ or @~3")
        for n, (place, _) in enumerate(self._line()):
            if n == int(back):
                return place
        raise CheckpointNotFound(f"session {self._name!r} has no checkpoint {revision}")

    def _marked(self, kind: int, value: str) -> Place | None:
        raw = records.encode_name(value)
        marked = {
            Place(session, seq): body
            for session in family(self._reader, self._session)
            for seq, body in self._reader.find_marks(session, kind, raw)
        }
        if not marked:
            return None
        for place, _ in self._line():
            if place in marked:
                records.unseal_mark(records.position(*place), kind, raw, marked[place])
                return place
        return None

    def _by_label(self, value: str) -> Place | None:
        return self._marked(LABEL, value)

    def _by_tag(self, value: str) -> Place | None:
        return self._marked(TAG, value)

    def _by_key(self, value: str) -> Place | None:
        seq = self._reader.find_key(self._session, records.encode_name(value))
        if seq is None:
            return None
        place = Place(self._session, seq)
        if read_row(self._reader, place).record.extra.get("key") != value:
            raise Corrupt(f"the index of keys names the wrong checkpoint for {value!r}")
        return place

    def _by_step(self, value: str) -> Place | None:
        if not value.isdecimal():
            raise InvalidRequest(f"not a step: {value!r}", hint="use step:12")
        wanted = int(value)
        return next((p for p, r in self._line() if r.step == wanted and not r.damaged), None)

    def _by_prefix(self, prefix: str) -> Place:
        bounds = ids.prefix_range(prefix)
        found = self._reader.find_ids(*bounds, _MAX_MATCHES) if bounds else []
        mine = [(s, seq, id) for s, seq, id in found if s == self._session]
        if len(mine) > 1:
            raise AmbiguousRevision(
                f"{prefix!r} begins {len(mine)} ids in session {self._name!r}, "
                f"such as {ids.to_text(mine[0][2])} and {ids.to_text(mine[1][2])}"
            )
        if mine:
            return Place(mine[0][0], mine[0][1])
        raise CheckpointNotFound(f"session {self._name!r} has no checkpoint {prefix!r}")


def find_in_store(reader: Reader, revision: str) -> Place:
    """A checkpoint of any session, by id or prefix."""
    bounds = ids.prefix_range(revision) if isinstance(revision, str) else None
    found = reader.find_ids(*bounds, 2) if bounds else []
    if not found:
        raise CheckpointNotFound(f"the store has no checkpoint {revision!r}")
    if len(found) > 1:
        raise AmbiguousRevision(
            f"{revision!r} begins more than one id, "
            f"such as {ids.to_text(found[0][2])} and {ids.to_text(found[1][2])}"
        )
    return Place(found[0][0], found[0][1])


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
        return records.unseal_session(session, *found)[1] if found else None
    except UNREADABLE:
        return None


def operations(reader: Reader, session: int, name: str, last: int) -> list[Operation]:
    out = []
    for number, body in reader.operations(session, 1, last):
        kind, created, _, details = records.unseal_operation(session, number, body)
        out.append(Operation(name, number, kind, created, details))
    return out


def page(
    reader: Reader, start: Place, parent: int | None = None
) -> tuple[list[Checkpoint], Place | None]:
    """A stretch of ancestors within one session, and where they go on."""
    out: list[tuple[Place, Record]] = []
    after: Place | None = None
    for place, record in ancestors(reader, start, parent):
        if len(out) == PAGE or place.session != start.session:
            after = place
            break
        out.append((place, record))
    name = session_name(reader, start.session)
    marks = marks_of(reader, start.session, out[-1][0].seq, start.seq)
    dressed = [_dressed(name, r, marks.get(p.seq, Marks())) for p, r in out]
    return dressed, after


def listing(reader: Reader, session: int, name: str, low: int, high: int) -> list[Checkpoint]:
    """A page of all checkpoints from `low` on; what cannot be read is listed as damaged."""
    high = min(high, low + PAGE - 1)
    found = {seq: (id, body) for seq, id, body in reader.checkpoints(session, low, high, PAGE)}
    marks = marks_of(reader, session, low, high)
    out = []
    for seq in range(low, high + 1):
        id, body = found.get(seq, (None, b""))
        try:
            if id is None:
                raise Corrupt(f"the record of checkpoint {seq} is missing")
            record = records.unseal_checkpoint(session, seq, id, body).record
        except UNREADABLE as e:
            record = damaged(seq, id, e.message)
        out.append(_dressed(name, record, marks.get(seq, Marks())))
    return out
