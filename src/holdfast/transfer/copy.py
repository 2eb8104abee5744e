"""Copies sessions to another store, with all of their history.

Checkpoints keep their ids, seqs and hashes. The target assigns its own numbers to sessions and
streams, and rows are sealed again because seals depend on these numbers. A session that the target
has already gets only the parts that it lacks. So an interrupted copy can be continued by copying
again, and a complete copy changes nothing.

Data of new streams is committed first. Rows that extend a stream of the target are committed only
together with the checkpoints that need them, so that a save in the target never finds items behind
the end that it knows. gc in the target may free data that the copy relies on. The commit then
raises MissingReference (see `Turnover`), and the copy starts again.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import UNREADABLE, Conflict, Corrupt, InvalidRequest, Unavailable
from holdfast.format import records
from holdfast.format.records import MAX_SEQ, Head, Info, position
from holdfast.history import lineage
from holdfast.history.lineage import all_rows
from holdfast.intervals import IntervalSet
from holdfast.storage.changes import Change, Copied, Notes
from holdfast.storage.contract import MissingReference, StaleHead
from holdfast.storage.memory import MemoryBackend
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import CheckpointRow, NameRow, SessionRow
from holdfast.transfer.items import CHUNK_BYTES, DataBatch, StreamMap, StreamMatcher
from holdfast.transfer.session_metadata import SessionMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.format.records import Row
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository
    from holdfast.transfer.items import Part

    Progress = Callable[[int, int], None]

_TRIES = 20


class CopyResult(NamedTuple):
    """The result of a copy."""

    sessions: int
    """Sessions that were created or extended in the target."""
    checkpoints: int
    """Checkpoints that were copied."""
    known: int
    """Checkpoints that the target had already."""
    skipped: tuple[tuple[str, str], ...]
    """Names of the sessions that were not copied, each with the reason."""


def transfer(
    source: Repository, target: Repository, names: Iterable[str] | None, progress: Progress | None
) -> CopyResult:
    """Copy sessions, and the sessions that they descend from. If `names` is None, copy all.

    Sessions that are damaged, or that differ in the target, are skipped and reported. Raise
    InvalidRequest if both stores are the same, SessionNotFound if a name does not exist, and
    Unavailable if gc in the target interrupts the copy 20 times. Everything that was committed
    before an error or a crash stays; another copy adds the rest.
    """
    if source.backend.identity() == target.backend.identity():
        raise InvalidRequest(
            "this is the same store: it cannot be copied to itself",
            hint="fork() copies a session within a store; backup() copies the store",
        )
    sessions: set[int] = set()
    checkpoints = 0
    with telling(progress) as tell, _read(source.backend, target.backend) as reader:
        wanted = listed(names)
        for _ in range(_TRIES):
            copy = _Copy(source, reader, target)
            numbers = _wanted(reader, wanted, copy.names)
            skipped: list[tuple[str, str]] = []
            try:
                for done, number in enumerate(numbers):
                    tell(done, len(numbers))
                    try:
                        copy.session(number)
                    except (*UNREADABLE, Conflict) as e:
                        skipped.append((_display_name(reader, number), e.message))
            except MissingReference:
                # gc has freed data in the target. Start again; it has the sessions copied so far.
                continue
            finally:
                known = copy.known - checkpoints
                sessions |= copy.sessions
                checkpoints += copy.checkpoints
            tell(len(numbers), len(numbers))
            return CopyResult(len(sessions), checkpoints, known, tuple(skipped))
    raise Unavailable("gc is still running in the other store", hint="copy again when it is done")


@contextmanager
def telling(progress: Progress | None) -> Iterator[Progress]:
    """Yield a wrapper of a progress callback. Errors of the callback are raised unchanged.

    They are raised at the end even if code in between has translated or suppressed them.
    """
    raised: list[BaseException] = []

    def tell(done: int, total: int) -> None:
        try:
            if progress is not None:
                progress(done, total)
        except BaseException as e:
            raised.append(e)
            raise

    try:
        yield tell
    except BaseException:
        if not raised:
            raise
    for error in raised:
        raise error


@contextmanager
def _read(source: Backend, target: Backend) -> Iterator[Reader]:
    """Open a reader of the source.

    A reader of a store in memory locks the store. Two copies between the same two stores, in
    opposite directions, would deadlock. So a copy takes both locks, always in the same order.
    """
    with ExitStack() as stack:
        if isinstance(source, MemoryBackend) and isinstance(target, MemoryBackend):
            for backend in sorted((source, target), key=id):
                stack.enter_context(open_reader(backend))
        yield stack.enter_context(open_reader(source))


def listed(names: Iterable[str] | None) -> list[str] | None:
    """Return the names as a list, or None. Raises InvalidRequest if `names` is a single string."""
    if isinstance(names, str):
        raise InvalidRequest("sessions must be a list of names, not a string")
    return None if names is None else [*names]


def _display_name(reader: Reader, number: int) -> str:
    row = reader.session_by_number(number)
    return records.shown_name(row.plain_name if row else b"")


def _wanted(reader: Reader, names: list[str] | None, there: set[bytes]) -> list[int]:
    """Return the sessions to copy, each after the sessions it descends from, which are included.

    Sessions whose names the target has come before others, so that the copy learns which data the
    target has already.
    """
    chosen: list[tuple[bool, int]] = []
    if names is not None:
        chosen = [
            (records.encode_name(name) not in there, lineage.find_session(reader, name))
            for name in names
        ]
    else:
        for row in lineage.all_sessions(reader):
            if not row.is_deleted:
                chosen.append((row.name not in there, row.number))
    order: dict[int, None] = {}
    seen: set[int] = set()  # a forged file may have a cycle
    stack = [n for _, n in sorted(chosen, key=lambda each: each[0])][::-1]
    while stack:
        above = set() if stack[-1] in seen else _above(reader, stack[-1]) - seen
        seen.add(stack[-1])
        stack += sorted(above)
        if not above:
            order[stack.pop()] = None
    return list(order)


def _above(reader: Reader, number: int) -> set[int]:
    """Return the existing sessions that a session descends from directly.

    If gc has freed the checkpoint that it was forked from, a graft names the session instead.
    """
    found = reader.session_by_number(number)
    places: list[int | None] = []
    with suppress(*UNREADABLE):
        if found is not None:
            places.append(records.unseal_session(*found).origin)
        for seq, body in reader.grafts(number, 1, MAX_SEQ):
            places.append(records.unseal_graft(number, seq, body).ancestor)
    sessions = {place >> records.SEQ_BITS for place in places if place is not None} - {number}
    return {session for session in sessions if reader.session_by_number(session)}


class _Source(NamedTuple):
    """A session in the source, with its checkpoints by seq."""

    number: int
    row: SessionRow
    info: Info
    head: Head
    """Its head without a lease."""
    checkpoints: dict[int, Row]


class _Copy:
    """Copies sessions, and remembers how numbers of the source map to numbers of the target."""

    def __init__(self, source: Repository, reader: Reader, target: Repository) -> None:
        self._reader, self._target = reader, target
        self._streams = StreamMap(source.backend, reader, target)
        self._places: dict[int, int] = {}
        self._failed: set[int] = set()
        with open_reader(target.backend) as there:
            self._freed = there.turnover().freed
            self.names = _names(there)
        self.sessions: set[int] = set()
        self.checkpoints = self.known = 0

    def session(self, number: int) -> None:
        """Copy a session, or the parts of it that the target lacks.

        Raises Corrupt or UnsupportedFormat if it cannot be read, and Conflict if it differs in the
        target, is being used there, or descends from a session that was not copied.
        """
        self._failed.add(number)  # until it is copied
        self._streams.begin()
        self._session(number)
        self._failed.discard(number)

    def _session(self, number: int) -> None:
        source = self._source(number)
        name, former = source.row.name, source.row.former_name
        found, head = source.checkpoints, source.head
        # If the target lacks the session, read from an empty store instead: each lookup on a
        # server takes time.
        names = {former or name, *map(records.encode_name, source.info.former)}
        other = MemoryBackend() if self.names.isdisjoint(names) else self._target.backend
        with open_reader(other) as there:
            known = _counterpart(there, name, former, found)
            here = known or self._places.get(number) or self._target.new_session()
            self._places[number] = here
            metadata = SessionMetadata(self._reader, there, self._place, number, here)
            kept = list(all_rows(there, here)) if known else []
            has = self._compare(source, there, here, kept, metadata) if known else set[int]()
            expect = there.head(here) if known else None
            new = [found[seq] for seq in sorted(found.keys() - has)]
            self.known += len(has)
            if former is not None and known and lineage.is_deleted(there, here) is False:
                # It was deleted in the source after an earlier copy. It stays in the target, and
                # gets the new checkpoints, because forks may need them.
                head = records.unseal_head(here, expect or b"")._replace(last=head.last)
            more = metadata.collect(found, [row.seq for row in kept], head, self._freed)
        create, origin = None, None
        if not known:
            if former is not None:
                name = records.deleted_name(here, former)
            origin = self._place(source.info.origin)
            body = records.seal_session(here, name, source.info._replace(origin=origin))
            create = NameRow(name, body)
        if new or more or _without_lease(here, expect) != head._replace(lease=None):
            self._write(_Target(here, create, origin, expect or b"", metadata), new, head)
            self.sessions.add(number)

    def _source(self, number: int) -> _Source:
        """Read a session of the source, and check that all of it is there."""
        row = self._reader.session_by_number(number) or SessionRow(number, b"", b"")
        info = records.unseal_session(*row)
        if not self._failed.isdisjoint(_above(self._reader, number)):
            raise Conflict("the session that it was forked from was not copied")
        _, head = lineage.read_head(self._reader, number)
        head = head._replace(lease=None)  # a run in the source does not run in the target
        found = {
            row.seq: records.unseal_checkpoint(number, *row)
            for row in all_rows(self._reader, number)
        }
        source = _Source(number, row, info, head, found)
        self._check_complete(source)
        self._check_origin(source)
        return source

    def _check_complete(self, source: _Source) -> None:
        """Raise Corrupt if a checkpoint is missing that gc has not freed, or if the head is."""
        number, _, _, head, found = source
        if damage := self._reader.damage(number):
            raise Corrupt(damage)
        there = IntervalSet.of(found)
        there.update(lineage.freed(self._reader, number))
        for low, _ in there.missing(1, head.last + 1):
            raise Corrupt(f"the record of checkpoint {low} is missing")
        if head.seq and head.seq not in found:
            raise Corrupt("the head points at no checkpoint")

    def _check_origin(self, source: _Source) -> None:
        """Raise Corrupt if a checkpoint that the session descends from is missing.

        A checkpoint that gc has freed does not count as missing, because a graft replaces it.
        """
        number, _, info, _, found = source
        grafts = dict(self._reader.grafts(number, 1, MAX_SEQ))
        above = [records.unseal_graft(number, seq, body).ancestor for seq, body in grafts.items()]
        if 1 in found and 1 not in grafts:
            above.append(info.origin)
        for place in [lineage.address_at(at) for at in above if at is not None]:
            own = place.session == number
            if not (place.seq in found if own else self._reader.checkpoint(*place)):
                raise Corrupt("a checkpoint that it descends from is missing")
        for seq in grafts.keys() - found.keys():
            raise Corrupt(f"there is a graft of checkpoint {seq}, but the checkpoint is missing")

    def _write(self, to: _Target, new: list[Row], head: Head) -> None:
        """Write checkpoints with the data they need, in parts of about 8 MB.

        The other metadata of the session comes with the last part. After each part, the session in
        the target can be loaded and saved to.
        """
        batch = DataBatch(self._streams)
        held: list[Row] = []
        for row in new:
            full = batch.size > CHUNK_BYTES
            try:
                batch.add(row, with_tails=full or row.record.seq == head.last)
            except Corrupt:
                if not full or row.record.seq == head.last:
                    raise
                batch.add(row, with_tails=False)
                full = False  # the part must not end here: a save could not continue from it
            held.append(row)
            if full and row is not new[-1]:
                self._write_part(to, to.interim_head(row), batch, held)
                batch, held = DataBatch(self._streams), []
        self._write_part(to, head, batch, held, last=True)

    def _write_part(
        self, to: _Target, head: Head, batch: DataBatch, rows: list[Row], *, last: bool = False
    ) -> None:
        """Commit one part: data of new streams first, then the checkpoints with the other data."""
        here = to.session
        *early, part = batch.parts()
        for each in early:
            so_far = to.at or Head(0, 0, 0, None).seal(here)
            self._commit(to.change(so_far, each, Notes(copied=Copied(self._freed))))
        checkpoints = [self._checkpoint(here, row, batch) for row in rows]
        metadata = to.metadata
        notes = metadata.rest(checkpoints) if last else metadata.part(checkpoints, rows)
        self._commit(to.change(head.seal(here), part, notes))
        batch.done()
        self.checkpoints += len(rows)

    def _commit(self, change: Change) -> None:
        try:
            self._target.backend.commit(change.batch())
        except StaleHead:
            raise Conflict("another process writes to the session in the other store") from None

    def _compare(
        self,
        source: _Source,
        there: Reader,
        here: int,
        rows: list[CheckpointRow],
        metadata: SessionMetadata,
    ) -> set[int]:
        """Return the seqs that both stores have, and match their streams.

        The session is `here` in the target, with the checkpoints `rows`. Raises Conflict if it was
        changed there, or if it has another checkpoint under the same seq.
        """
        deleted = source.row.former_name is None and lineage.is_deleted(there, here)
        if deleted and metadata.was_changed():
            raise Conflict("it was deleted in the other store: copy again after gc there")
        matcher = StreamMatcher(self._streams, self._target.data(there))
        found = source.checkpoints
        has = set()
        gone = lineage.freed(self._reader, source.number)
        kept: dict[int, bytes] = {}
        for seq, id, body in rows:
            row = found.get(seq)
            other = records.unseal_checkpoint(here, seq, id, body)
            if row is None and seq in gone:
                kept[seq] = id  # freed in the source since, and kept in the target
                continue
            if row is None or row.record.id != id or row.record.hash != other.record.hash:
                raise Conflict(f"the other store has another checkpoint {seq} of the session")
            matcher.roots(row, other)
            has.add(seq)
        if kept and not has:
            raise Conflict("the other store has another session of this name")
        for row in found.values():
            r = row.record
            if kept.get(r.own_parent or 0, r.parent) != r.parent:
                raise Conflict(f"the other store has another checkpoint {r.parent_seq}")
        metadata.check_unchanged()
        return has

    def _checkpoint(self, here: int, row: Row, batch: DataBatch) -> CheckpointRow:
        r = row.record
        line, root = self._streams.line(row.line), batch.remapped(row.root)
        body = records.seal_checkpoint(
            here, r.seq, r.id, row.meta, r.hash, line, r.size, r.added, root, r.skip
        )
        return CheckpointRow(r.seq, r.id, body)

    def _place(self, at: int | None) -> int | None:
        """Return the position in the target for a position in the source.

        A session that the target does not have is mapped to a new number. If the session is never
        copied, the number stays unused.
        """
        if at is None:
            return None
        session = at >> records.SEQ_BITS
        if session not in self._places:
            self._places[session] = self._target.new_session()
        return position(self._places[session], at & MAX_SEQ)


class _Target:
    """A session in the target while it is written: its head as last written, and its metadata."""

    def __init__(
        self,
        session: int,
        create: NameRow | None,
        origin: int | None,
        expect: bytes,
        metadata: SessionMetadata,
    ) -> None:
        self.session, self.at, self.metadata = session, expect, metadata
        self._create = create
        self._origin = None if origin is None else lineage.address_at(origin)

    def change(self, head: bytes, part: Part, notes: Notes) -> Change:
        """Return the next change. Changes after it expect that it was committed."""
        notes.origin = self._origin
        change = Change(self.session, self.at, head, self._create, None, *part, notes)
        self._create, self._origin, self.at = None, None, head
        return change

    def interim_head(self, row: Row) -> Head:
        """Return a head to use until the last part is written, as if `row` were the newest save."""
        r = row.record
        before = records.unseal_head(self.session, self.at) if self.at else Head(0, 0, 0, None)
        if before.seq:
            return before._replace(last=max(before.last, r.seq))
        return Head(r.seq, r.seq, before.operations, r.own_parent)


def _without_lease(session: int, row: bytes | None) -> Head | None:
    """Return a head without its lease; None if the row is damaged and must be written again."""
    with suppress(*UNREADABLE):
        return records.unseal_head(session, row or b"")._replace(lease=None)
    return None


def _names(reader: Reader) -> set[bytes]:
    """Return the names of all sessions of a store, also of deleted ones, and former names."""
    found = set()
    for row in lineage.all_sessions(reader):
        found.add(row.plain_name)
        with suppress(*UNREADABLE):
            found |= {*map(records.encode_name, records.unseal_session(*row).former)}
    return found


def _counterpart(
    there: Reader, name: bytes, former: bytes | None, found: dict[int, Row]
) -> int | None:
    """Return the number of a session in the target, whether deleted or not; None if missing."""
    known = there.session(former or name)
    if known and (former is None or _is_same(there, known.number, found)):
        return known.number
    for row in lineage.deleted_sessions(there):
        if row.former_name == (former or name) and _is_same(there, row.number, found):
            return row.number
    for each in found.values():  # it may have been renamed in either store
        for place in there.find_ids(each.record.id, each.record.id, 1):
            return place.session
    return None


def _is_same(there: Reader, number: int, found: dict[int, Row]) -> bool:
    """Return whether a session of the target has any of the checkpoints `found` in the source."""
    held = {row.seq: row.id for row in all_rows(there, number)}
    return any(held.get(seq) == row.record.id for seq, row in found.items())
