"""Read checkpoints: by address, along the line of ancestors, and in lists.

Lists show a record that cannot be read as damaged, so that damage hides nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import chain, starmap
from typing import TYPE_CHECKING, NamedTuple

from holdfast import ids
from holdfast.errors import UNREADABLE, CheckpointNotFound, Corrupt, SessionNotFound
from holdfast.format import records
from holdfast.format.records import TAG, Graft, Head, Row
from holdfast.history.checkpoint import Checkpoint, Gap
from holdfast.intervals import IntervalSet
from holdfast.model import DAMAGED, Operation, Record
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import PAGE, Address, CheckpointRow, JournalRow, SessionRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository


HISTORY_PAGE = 256
"""How many checkpoints one query reads for a list. A row has the root of its state."""


def newest(reader: Reader, session: int) -> int:
    """Return the seq of the newest checkpoint, even if the head's row is damaged."""
    try:
        return read_head(reader, session)[1].last
    except UNREADABLE:
        last = 0
        while rows := reader.checkpoints(session, last + 1, records.MAX_SEQ, HISTORY_PAGE):
            last = rows[-1].seq
        return last


def count(reader: Reader, session: int) -> int:
    """Return how many checkpoints of a session are not deleted."""
    gone = sum([high - low for low, high in freed(reader, session).all()])
    return newest(reader, session) - gone - len(reader.tombstones(session, 0, records.MAX_SEQ))


def read_row(reader: Reader, place: Address) -> Row:
    """Return the row of a checkpoint that must exist. Raises Corrupt if it is missing."""
    found = reader.checkpoint(*place)
    if found is None:
        raise Corrupt(f"the record of checkpoint {place.seq} is missing")
    return records.unseal_checkpoint(place.session, *found)


class Parent(NamedTuple):
    """The checkpoint that the next one will have as its parent."""

    place: Address
    id: bytes
    hash: bytes
    step: int
    created_us: int
    line: int
    root: bytes
    parent_seq: int | None
    """The seq of its parent, if that is in the same session."""

    @classmethod
    def read(cls, reader: Reader, place: Address) -> Parent:
        row = read_row(reader, place)
        r = row.record
        return cls(place, r.id, r.hash, r.step, r.created_us, row.line, row.root, r.own_parent)


def session_name(reader: Reader, session: int) -> str:
    found = reader.session_by_number(session)
    if found is None:
        raise Corrupt("a checkpoint belongs to a session whose record is missing")
    try:
        records.unseal_session(*found)  # its digest covers the name
    except UNREADABLE:
        named = reader.session(found.name)
        if named is None or named.number != session:  # nor does the index confirm it
            raise Corrupt("the name of a session is damaged") from None
    return records.decode_name(found.plain_name)


def hash_prefix(row: SessionRow) -> bytes:
    """Return what the hashes of a session's records begin with. It stays the same for good."""
    name = row.plain_name
    with suppress(*UNREADABLE):
        name = records.hashed_name(name, records.unseal_session(*row))
    return records.hash_prefix(name)


def names(reader: Reader, session: int) -> list[bytes]:
    """Return the name of a session, and its former names that no other session has now."""
    row = reader.session_by_number(session)
    if row is None:
        return []
    former: list[bytes] = []
    with suppress(*UNREADABLE):
        former = [*map(records.encode_name, records.unseal_session(*row).former)]
    return [row.plain_name, *[name for name in former if reader.session(name) is None]]


def forks_below(reader: Reader, session: int, seq: int | None = None) -> tuple[str, ...]:
    """Return the names of the sessions that were forked from a session, or from a checkpoint of it.

    Forks of forks are included, also if gc has removed a session between them and this one.
    """
    low, high = (1, records.MAX_SEQ) if seq is None else (seq, seq)
    found = {fork.session for fork in reader.forks(session, low, high)}
    if seq is None:
        found |= {graft.session for graft in reader.grafts_below(session)}
    queue = [*found]
    while queue:
        forks = reader.forks(queue.pop(), 1, records.MAX_SEQ)
        more = {fork.session for fork in forks} - found
        found |= more
        queue += more
    names = []
    for fork in sorted(found - {session}):
        with suppress(*UNREADABLE):
            if not is_deleted(reader, fork):
                names.append(session_name(reader, fork))
    return tuple(names)


def all_forks(reader: Reader, session: int) -> set[int]:
    """Return the sessions that were forked from a session, or from one of its forks, and so on."""
    found: set[int] = set()
    queue = {session}
    while queue:
        at = queue.pop()
        forks = {fork.session for fork in reader.forks(at, 1, records.MAX_SEQ)}
        forks |= {graft.session for graft in reader.grafts_below(at)}
        queue |= forks - found
        found |= forks
    return found - {session}


def find_id(reader: Reader, id: bytes) -> Address:
    """Return the address of a checkpoint. Raises CheckpointNotFound if there is none."""
    found = reader.find_ids(id, id, 1)
    if not found:
        raise CheckpointNotFound(f"checkpoint {ids.to_text(id)} is gone")
    return found[0].address


def is_deleted(reader: Reader, session: int) -> bool:
    """Return whether a whole session is deleted, and not yet freed by gc."""
    found = reader.session_by_number(session)
    return found is not None and found.is_deleted


def is_checkpoint_deleted(reader: Reader, place: Address) -> bool:
    """Return whether a checkpoint is deleted. It cannot be loaded, but gc has not freed it yet."""
    return bool(reader.tombstones(*place, place.seq)) or is_deleted(reader, place.session)


def freed(reader: Reader, session: int) -> IntervalSet:
    """Return the seqs of the checkpoints that gc has freed."""
    rows = reader.grafts(session, 0, 0)
    return IntervalSet(records.unseal_freed(session, rows[0].body) if rows else ())


def graft_before(reader: Reader, place: Address) -> Graft | None:
    rows = reader.grafts(place.session, place.seq, place.seq)
    return records.unseal_graft(*place, rows[0].body) if rows else None


def address_at(position: int) -> Address:
    return Address(position >> records.SEQ_BITS, position & records.MAX_SEQ)


def damaged(
    seq: int, id: bytes | None, why: str, *, step: int = 0, parent: int | None = None
) -> Record:
    """Return a placeholder for a record that cannot be read, so that lists still show it."""
    id = id if type(id) is bytes and len(id) == ids.BYTES else bytes(ids.BYTES)
    return Record(seq, id, step, 0, "unknown", None, parent, {}, b"", lambda: b"", 0, 0, None, why)


class Marks(NamedTuple):
    """Label and tags of a checkpoint, which are stored beside its record."""

    label: str | None = None
    tags: tuple[str, ...] = ()
    damaged: str | None = None
    order: int = -1


def marks_of(reader: Reader, session: int, low: int, high: int) -> dict[int, Marks]:
    """Return marks by seq. Damage is noted in `damaged`; the other marks are still returned."""
    out: dict[int, Marks] = {}
    try:
        marks = reader.marks(session, low, high)
    except UNREADABLE as e:
        return dict.fromkeys(range(low, high + 1), Marks(damaged=e.message))
    for seq, kind, value, body in marks:
        if type(seq) is not int:
            continue  # the key is damaged and names no checkpoint; verify() reports it
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


def _now_named(reader: Reader, session: int, record: Record) -> Record:
    """Return a record; that of a fork with the name that its origin has now."""
    if record.is_fork and not record.damaged:
        with suppress(*UNREADABLE):
            place = forked_at(reader, session)
            row = None if place is None else reader.session_by_number(place.session)
            if row is not None and not row.is_deleted:
                extra = record.extra | {"origin": records.decode_name(row.name)}
                return record._replace(extra=extra)
    return record


def _with_marks(name: str, record: Record, marks: Marks, gap: Gap | None = None) -> Checkpoint:
    if marks.damaged and not record.damaged:
        record = record._replace(damaged=marks.damaged)
    return Checkpoint(name, record, marks.label, marks.tags, gap)


def to_checkpoint(reader: Reader, place: Address, record: Record) -> Checkpoint:
    """Return a record as a public Checkpoint, with its session's name, its label and its tags."""
    name = session_name(reader, place.session)
    marks = marks_of(reader, place.session, place.seq, place.seq)
    gap = gap_above(reader, place, record)
    record = _now_named(reader, place.session, record)
    return _with_marks(name, record, marks.get(place.seq, Marks()), gap)


def checkpoint_at(reader: Reader, place: Address) -> Checkpoint:
    """Return the checkpoint at an address; a damaged one as a placeholder that says so."""
    try:
        record = read_row(reader, place).record
    except UNREADABLE as e:
        found = reader.checkpoint(*place)
        record = damaged(place.seq, found.id if found else None, e.message)
    return to_checkpoint(reader, place, record)


def gap_above(reader: Reader, place: Address, record: Record) -> Gap | None:
    """Return the gap above a checkpoint: its nearest ancestors that are deleted or freed.

    Returns None if the parent exists, or if it is missing because of damage.
    """
    parent = parent_of(reader, place, record)
    if parent is None:
        return None
    there = reader.checkpoint(*parent) is not None
    if there and not is_checkpoint_deleted(reader, parent):
        return None
    if not there and graft_before(reader, place) is None:
        return None
    above = next((r for p, r in ancestors(reader, place, deleted=False) if p != place), None)
    return _gap(record, above)


def _gap(record: Record, above: Record | None) -> Gap:
    """Return the gap between a checkpoint and its nearest ancestor, or its beginning."""
    return Gap(record.step - (above.step if above else 0) - 1, above.id if above else None)


def forked_at(reader: Reader, session: int) -> Address | None:
    """Return the checkpoint that a session was forked from, by the session's row; None if none."""
    found = reader.session_by_number(session) or SessionRow(session, b"", b"")
    where = records.unseal_session(*found).origin
    return None if where is None else address_at(where)


def origin(reader: Reader, place: Address, record: Record) -> Address | None:
    """Return the address of the parent of a fork's first checkpoint."""
    name = record.extra.get("origin")
    if name is None or record.parent_seq is None:
        return None
    with suppress(*UNREADABLE):  # then try the name, which fails for a deleted session
        return forked_at(reader, place.session)
    named = reader.session(records.encode_name(name))
    return Address(named.number, record.parent_seq) if named else None


def parent_of(reader: Reader, place: Address, record: Record) -> Address | None:
    if record.damaged and place.seq == 1:
        with suppress(*UNREADABLE):
            return forked_at(reader, place.session)
    if record.parent_seq is None:
        return None
    if record.is_fork:
        return origin(reader, place, record)
    return Address(place.session, record.parent_seq)


class _Window:
    """Reads older and older checkpoints in batches: 1 row, then 4 times as many, up to a page."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._session, self._low, self._high = -1, 0, 0
        self._size = 1
        self._rows: dict[int, CheckpointRow] = {}
        self._tombstones: set[int] = set()
        self._deleted = False

    def row(self, place: Address) -> CheckpointRow | None:
        session, seq = place
        reader = self._reader
        if session != self._session or not self._low <= seq <= self._high:
            if session != self._session:
                self._deleted = is_deleted(reader, session)
            self._session, self._high, self._low = session, seq, max(seq - self._size + 1, 1)
            self._size = min(4 * self._size, HISTORY_PAGE)
            rows = reader.checkpoints(session, self._low, seq, HISTORY_PAGE)
            self._rows = {row.seq: row for row in rows}
            self._tombstones = {row.seq for row in reader.tombstones(session, self._low, seq)}
        return self._rows.get(seq)

    def is_deleted(self, place: Address) -> bool:
        """Return whether the checkpoint that row() was last called for is deleted."""
        return self._deleted or place.seq in self._tombstones


def ancestors(
    reader: Reader, start: Address | None, parent: int | None = None, *, deleted: bool = False
) -> Iterator[tuple[Address, Record]]:
    """Yield `start` and its ancestors, newest first, across forks.

    Deleted ones are left out, unless `deleted` is True.
    A record that cannot be read is yielded as damaged. The walk steps over it, because each child
    also stores the seq of its grandparent. `parent` is the seq of the parent of `start`, in case
    `start` is damaged; for the head, the head's row stores it. Two damaged records in a row end the
    walk with a record that has no parent. A graft leads over the checkpoints that gc has freed.
    """
    window = _Window(reader)
    at, below = start, None
    id: bytes | None = None
    step = 0
    while at is not None:
        found = window.row(at)
        if found is None and below is not None:
            graft = graft_before(reader, below)
            below = None
            if graft is not None:
                at = None if graft.ancestor is None else address_at(graft.ancestor)
                id, step, parent = None, max(step - graft.freed, 0), None
                continue
        try:
            if found is None:
                raise Corrupt(f"the record of checkpoint {at.seq} is missing")
            record = records.unseal_checkpoint(at.session, *found).record
            if id not in (None, record.id):
                raise Corrupt(f"checkpoint {at.seq} is not the parent that its child names")
            if step and record.step != step:
                raise Corrupt(f"checkpoint {at.seq} has not the step before its child's")
        except UNREADABLE as e:
            id = id or (found.id if found else None)
            parent = None if step == 1 else parent  # steps decrease, so every walk ends
            record = damaged(at.seq, id, e.message, step=step, parent=parent)
        if deleted or not window.is_deleted(at):
            yield at, record
        below, at = at, parent_of(reader, at, record)
        id, step = record.parent, max(record.step - 1, 0)
        parent = record.skip


class Ancestor(NamedTuple):
    """The nearest ancestor of a checkpoint that is there and can be read."""

    place: Address | None
    """Its address; None if there is none."""
    row: Row | None
    sure: bool
    """False if damage hides a nearer one."""


def nearest_ancestor(reader: Reader, place: Address, record: Record) -> Ancestor:
    """Return the nearest ancestor that is neither deleted nor freed nor damaged."""
    with suppress(*UNREADABLE):
        parent = parent_of(reader, place, record)
        found = reader.checkpoint(*parent) if parent is not None else None
        if parent is None and record.parent is None:
            return Ancestor(None, None, sure=True)
        is_there = parent and found and found.id == record.parent
        if parent and found and is_there and not is_checkpoint_deleted(reader, parent):
            row = records.unseal_checkpoint(parent.session, *found)
            return Ancestor(parent, row, sure=True)
    sure = True
    for at, above in ancestors(reader, place):
        if at == place:
            continue
        if above.damaged is None:
            return Ancestor(at, read_row(reader, at), sure)
        sure = False
    return Ancestor(None, None, sure)


def family(reader: Reader, session: int) -> Iterator[int]:
    """Yield the session, the session that it was forked from, and so on."""
    seen: set[int] = set()
    at: Address | None = Address(session, 0)
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
    return found.number


def read_head(reader: Reader, session: int) -> tuple[bytes, Head]:
    """Return the head's row and its content. The row is the token of the next compare-and-swap."""
    row = reader.head(session)
    if row is None:
        raise Corrupt("a session has lost its head")
    return row, records.unseal_head(session, row)


def session_agent(reader: Reader, session: int) -> str | None:
    """Return the agent that a session was made for; None also if its row is damaged."""
    found = reader.session_by_number(session)
    try:
        return records.unseal_session(*found).agent if found else None
    except UNREADABLE:
        return None


def read_operation(
    session: int, name: str, number: int, body: bytes
) -> tuple[int | None, Operation]:
    """Return the seq of the newest checkpoint when an operation was made, and the operation.

    A damaged operation has the kind DAMAGED, and None as that seq.
    """
    try:
        kind, created, last, details = records.unseal_operation(session, number, body)
    except UNREADABLE as e:
        return None, Operation(name, number, DAMAGED, 0, {"damage": e.message})
    return last, Operation(name, number, kind, created, details)


def operations(reader: Reader, session: int, name: str, last: int) -> list[Operation]:
    rows = reader.operations(session, 1, last)
    return [read_operation(session, name, number, body)[1] for number, body in rows]


def page(
    reader: Reader, start: Address, parent: int | None = None, limit: int = HISTORY_PAGE
) -> tuple[list[Checkpoint], Address | None, int | None]:
    """Return at most `limit` ancestors within one session, and the start of the next page.

    The start is an address, and the `parent` to give with it, which a damaged record cannot supply.
    """
    out: list[tuple[Address, Record]] = []
    after: Address | None = None
    last: Record | None = None
    session = start.session
    for place, record in ancestors(reader, start, parent):
        if not out:
            session = place.session
        if len(out) == limit or place.session != session:
            after, last = place, record
            break
        out.append((place, record))
    if not out:
        return [], None, None
    name, wrong = f"session {session}", None
    try:
        name = session_name(reader, session)
    except UNREADABLE as e:  # the checkpoints are found by number, so they are still listed
        wrong = e.message
    marks = marks_of(reader, session, out[-1][0].seq, out[0][0].seq)
    checkpoints = []
    for (place, record), above in zip(out, [*[r for _, r in out[1:]], last], strict=True):
        gap = None
        if record.parent != (above.id if above else None) and not record.damaged:
            gap = _gap(record, above)
        record = _now_named(reader, place.session, record)
        record = record._replace(damaged=record.damaged or wrong)
        checkpoints.append(_with_marks(name, record, marks.get(place.seq, Marks()), gap))
    return checkpoints, after, last.parent_seq if last is not None and last.damaged else None


def line(
    reader: Reader, start: Address | None, parent: int | None, limit: int = HISTORY_PAGE
) -> Iterator[Checkpoint]:
    """Yield a checkpoint and its ancestors, newest first; `limit` is how many one page reads."""
    while start is not None:
        found, start, parent = page(reader, start, parent, limit)
        yield from found


def listing(
    reader: Reader, session: int, name: str, low: int, newest: int
) -> tuple[list[Checkpoint], int]:
    """Return a page of the checkpoints from `low` on, and the first seq of the next page.

    Unreadable checkpoints are listed as damaged. Deleted and freed ones are left out.
    """
    rows = reader.checkpoints(session, low, newest, HISTORY_PAGE)
    high = rows[-1].seq if len(rows) == HISTORY_PAGE else newest
    found = {row.seq: row for row in rows}
    marks = marks_of(reader, session, low, high)
    tombstones = {row.seq for row in reader.tombstones(session, low, high)}
    gone = freed(reader, session)
    grafts = dict(reader.grafts(session, low, high)) if gone.all() else {}
    listed: dict[int, Record] = {}
    out: list[Checkpoint] = []
    for seq in chain.from_iterable(starmap(range, gone.missing(low, high + 1))):
        if seq in tombstones:
            continue
        row = found.get(seq)
        gap = None
        try:
            if row is None:
                raise Corrupt(f"the record of checkpoint {seq} is missing")
            record = records.unseal_checkpoint(session, *row).record
            near = record.parent_seq in found and record.parent_seq not in tombstones
            if not near or record.is_fork:
                if seq in grafts:
                    graft = records.unseal_graft(session, seq, grafts[seq])
                    gap = _known_gap(graft, record, listed, session)
                gap = gap or gap_above(reader, Address(session, seq), record)
            listed[seq] = record
            record = _now_named(reader, session, record)
        except UNREADABLE as e:
            record = damaged(seq, row.id if row else None, e.message)
        out.append(_with_marks(name, record, marks.get(seq, Marks()), gap))
        if len(out) == HISTORY_PAGE:
            return out, seq + 1
    return out, high + 1


def _known_gap(graft: Graft, record: Record, listed: dict[int, Record], session: int) -> Gap | None:
    """Return gap_above() without a lookup, if the graft's ancestor is in `listed`; else None."""
    if graft.ancestor is None:
        return _gap(record, None)
    home, seq = address_at(graft.ancestor)
    return _gap(record, listed[seq]) if home == session and seq in listed else None


def tree(
    backend: Backend,
    raw_name: bytes,
    name: str,
    *,
    newest_first: bool = False,
    high: int | None = None,
) -> Iterator[Checkpoint]:
    """Yield every checkpoint of a session, oldest first or newest first.

    Reads a page at a time, so that no view stays open between pages. `high` is the newest seq to
    list.
    """
    low = 1
    while True:
        with open_reader(backend) as reader:
            found = reader.session(raw_name)
            if found is None:
                return
            last = newest(reader, found.number)
            if high is not None:
                last = min(last, high)
            if low > last:
                return
            if newest_first:
                page, _ = listing(reader, found.number, name, max(last - HISTORY_PAGE + 1, 1), last)
                page.reverse()
                high = last - HISTORY_PAGE
            else:
                page, low = listing(reader, found.number, name, low, last)
        yield from page


def forks(backend: Backend, raw_name: bytes) -> dict[int, list[str]]:
    """Return the names of the sessions forked from each checkpoint of a session, by seq."""
    found: dict[int, list[str]] = {}
    with open_reader(backend) as reader:
        session = reader.session(raw_name)
        for fork in reader.forks(session.number, 1, records.MAX_SEQ) if session else ():
            row = reader.session_by_number(fork.session)
            if row is not None and not row.is_deleted:
                found.setdefault(fork.seq, []).append(records.shown_name(row.name))
    return found


_LOOKED_UP = 1 << 17
"""Limit on lookups in one hole of a listing. A damaged number could make the hole huge."""


def all_rows(
    reader: Reader, session: int, tell: Callable[[Corrupt], object] = lambda _: None
) -> Iterator[CheckpointRow]:
    """Yield all checkpoints of a session.

    One damaged key can end a listing early, or with an error that the callback gets.
    Checkpoints that the listing leaves out are looked up one by one, as a load does.
    """
    low = 1
    full = True
    gone = cache(lambda: _freed(reader, session))  # read once, and only if there is a hole
    try:
        while full:
            rows = reader.checkpoints(session, low, records.MAX_SEQ, PAGE)
            for row in rows:
                if row.seq > low:
                    yield from _unlisted(reader, session, gone().missing(low, row.seq))
                yield row
                low = row.seq + 1
            full = len(rows) == PAGE
    except Corrupt as e:
        tell(e)
    with suppress(*UNREADABLE):
        last = read_head(reader, session)[1].last
        if last >= low:
            yield from _unlisted(reader, session, gone().missing(low, last + 1))


def sound_rows(reader: Reader, session: int) -> Iterator[Row]:
    """Yield the checkpoints of a session that can be read; verify() reports the others."""
    for row in all_rows(reader, session):
        with suppress(*UNREADABLE):
            yield records.unseal_checkpoint(session, *row)


def _freed(reader: Reader, session: int) -> IntervalSet:
    """Return the checkpoints that gc has freed; none if that cannot be read."""
    with suppress(*UNREADABLE):
        return freed(reader, session)
    return IntervalSet()


def _unlisted(
    reader: Reader, session: int, holes: list[tuple[int, int]]
) -> Iterator[CheckpointRow]:
    """Yield the checkpoints that exist in the holes of a listing."""
    for start, stop in holes:
        for seq in range(start, min(stop, start + _LOOKED_UP)):
            with suppress(*UNREADABLE):
                if (found := reader.checkpoint(session, seq)) is not None:
                    yield found


def all_sessions(reader: Reader, after: bytes | None = None) -> Iterator[SessionRow]:
    """Yield all sessions in the order of their stored names, deleted ones included."""
    while page := reader.sessions(after, PAGE):
        yield from page
        after = page[-1].name


def deleted_sessions(reader: Reader) -> Iterator[SessionRow]:
    """Yield the sessions that are deleted and not yet freed."""
    for row in all_sessions(reader, records.deleted_name(0, b"")):
        if row.is_deleted:
            yield row


def session_names(repository: Repository) -> Iterator[str]:
    """Yield the names of all sessions that are not deleted, a page at a time."""
    after: bytes | None = None
    while True:
        with repository.reader() as reader:
            page = reader.sessions(after, PAGE)
        if not page:
            return
        for row in page:
            if not row.is_deleted:
                yield records.shown_name(row.name)
        after = page[-1].name


def journal_rows(
    reader: Reader, session: int, first: int = 0, end: int = records.MAX_SEQ
) -> Iterator[JournalRow]:
    """Yield the entries [first, end) of a journal. Damaged rows stand for missing ones."""
    while first < end and (page := reader.journal(session, first, min(PAGE, end - first))):
        for row in page:
            if row.number >= end:
                return
            yield row
        first = page[-1].number + 1


def has_term(reader: Reader, term: records.IndexTerm) -> bool:
    """Return whether an index term is in the index for searches."""
    kind, value, id = term
    return reader.find_terms(kind, value, id, id + b"\0", 1) == [id]


def strays(reader: Reader, listed: set[int]) -> list[int]:
    """Return the sessions that the index of ids names and that are not in `listed`."""
    found: set[int] = set()
    with suppress(*UNREADABLE):
        for session in sessions_of_ids(reader):
            found.add(session)
    return sorted(found - listed)


def sessions_of_ids(reader: Reader) -> Iterator[int]:
    high = b"\xff" * (ids.BYTES + 1)
    while page := reader.newest_ids(b"", high, PAGE):
        yield from {row.session for row in page}
        high = page[-1].id
