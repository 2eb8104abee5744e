"""Copying sessions to another store: every record as it is, all data once.

Records keep their ids, numbers and hashes. What depends on the store they lie in (the numbers of
sessions and streams, digests over addresses) is made anew. A session that is there already gets
what it lacks; so a copy that was interrupted goes on, and one that is complete changes nothing.

Every commit brings checkpoints with the data they need, or data for streams that are new: nothing
is ever written where the other store goes on by itself. What a copy goes by may be freed there; it
is refused then (see `Turnover`), and looks again.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast import lineage
from holdfast.backends.base import Change, Copied, Gone, Moved, Notes
from holdfast.backends.memory import MemoryBackend
from holdfast.belongings import Besides
from holdfast.cargo import CHUNK_BYTES, Cargo, Load, Pairing
from holdfast.codec import records
from holdfast.codec.records import MAX_SEQ, Head, Info, position
from holdfast.errors import UNREADABLE, Conflict, Corrupt, InvalidRequest, Unavailable
from holdfast.live import Spans, all_rows
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.backends.base import Backend, Reader
    from holdfast.cargo import Part
    from holdfast.codec.records import Row
    from holdfast.store import Store

    Progress = Callable[[int, int], None]

_PAGE = 1_000
_TRIES = 20


class Transferred(NamedTuple):
    """What a copy has done."""

    sessions: int
    """Sessions that got something."""
    checkpoints: int
    known: int
    """Checkpoints that were there already."""
    skipped: tuple[tuple[str, str], ...]
    """Sessions that were left alone, and why."""


def transfer(
    source: Backend, target: Store, names: Iterable[str] | None, progress: Progress | None
) -> Transferred:
    if source is target.backend:
        raise InvalidRequest("a store cannot be copied to itself")
    sessions: set[int] = set()
    checkpoints = 0
    with telling(progress) as tell, _read(source, target.backend) as reader:
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
                        skipped.append((_shown(reader, number), e.message))
            except Gone:  # gc has freed something there; what was copied is found there now
                continue
            finally:
                known = copy.known - checkpoints
                sessions |= copy.sessions
                checkpoints += copy.checkpoints
            tell(len(numbers), len(numbers))
            return Transferred(len(sessions), checkpoints, known, tuple(skipped))
    raise Unavailable("gc goes on in the other store", hint="copy again when it is done")


@contextmanager
def telling(progress: Progress | None) -> Iterator[Progress]:
    """A callback's own errors come out as they are, whatever is made of errors in between."""
    theirs: list[BaseException] = []

    def tell(done: int, total: int) -> None:
        try:
            if progress is not None:
                progress(done, total)
        except BaseException as e:
            theirs.append(e)
            raise

    try:
        yield tell
    except BaseException:
        if not theirs:
            raise
    for error in theirs:
        raise error


@contextmanager
def _read(source: Backend, target: Backend) -> Iterator[Reader]:
    """Who reads a store in memory locks it for others. Two that are copied into each other at the
    same time would wait for each other; so all take both locks, in one order.
    """
    with ExitStack() as stack:
        if isinstance(source, MemoryBackend) and isinstance(target, MemoryBackend):
            for backend in sorted((source, target), key=id):
                stack.enter_context(backend.reader())
        yield stack.enter_context(source.reader())


def listed(names: Iterable[str] | None) -> list[str] | None:
    if isinstance(names, str):
        raise InvalidRequest("sessions must be a list of names, not a string")
    return None if names is None else [*names]


def _shown(reader: Reader, number: int) -> str:
    name, _ = reader.session_by_number(number) or (b"", b"")
    return records.shown_name(records.former_name(number, name) or name)


def _wanted(reader: Reader, names: list[str] | None, there: set[bytes]) -> list[int]:
    """Sessions to copy, each after those that it descends from, which come along.

    Those that are `there` come first: what others share with them is then known to be there.
    """
    chosen: list[tuple[bool, int]] = []
    if names is not None:
        chosen = [
            (records.encode_name(name) not in there, lineage.find_session(reader, name))
            for name in names
        ]
    else:
        after: bytes | None = None
        while page := reader.sessions(after, _PAGE):
            kept = [(n, raw) for n, raw, _ in page if records.former_name(n, raw) is None]
            chosen += [(raw not in there, n) for n, raw in kept]
            after = page[-1][1]
    order: dict[int, None] = {}
    seen: set[int] = set()  # a file that was made up may have them go round in a circle
    stack = [n for _, n in sorted(chosen, key=lambda each: each[0])][::-1]
    while stack:
        above = set() if stack[-1] in seen else _above(reader, stack[-1]) - seen
        seen.add(stack[-1])
        stack += sorted(above)
        if not above:
            order[stack.pop()] = None
    return list(order)


def _above(reader: Reader, number: int) -> set[int]:
    """The sessions that one descends from, of those that are there.

    If the one that it was forked from was freed, its gaps tell where its history goes on.
    """
    found = reader.session_by_number(number)
    places: list[int | None] = []
    with suppress(*UNREADABLE):
        if found is not None:
            places.append(records.unseal_session(number, *found).origin)
        for seq, body in reader.gaps(number, 1, MAX_SEQ):
            places.append(records.unseal_gap(number, seq, body).ancestor)
    sessions = {place >> records.SEQ_BITS for place in places if place is not None} - {number}
    return {session for session in sessions if reader.session_by_number(session)}


class _Copy:
    """What is known of both stores while sessions are copied."""

    def __init__(self, source: Backend, reader: Reader, target: Store) -> None:
        self._reader, self._target = reader, target
        self._cargo = Cargo(source, reader, target.backend, target.new_stream)
        self._places: dict[int, int] = {}
        self._failed: set[int] = set()
        with target.backend.reader() as there:
            self._freed = there.turnover().freed
            self.names = _names(there)
        self.sessions: set[int] = set()
        self.checkpoints = self.known = 0

    def session(self, number: int) -> None:
        self._failed.add(number)  # until it is done
        self._cargo.begin()
        self._session(number)
        self._failed.discard(number)

    def _session(self, number: int) -> None:
        name, row = self._reader.session_by_number(number) or (b"", b"")
        info = records.unseal_session(number, name, row)
        if not self._failed.isdisjoint(_above(self._reader, number)):
            raise Conflict("the session that it was forked from was not copied")
        _, head = lineage.read_head(self._reader, number)
        head = head._replace(lease=None)  # who runs it here does not run it there
        found = {
            seq: records.unseal_checkpoint(number, seq, id, body)
            for seq, id, body in all_rows(self._reader, number)
        }
        self._check_complete(number, head, found)
        self._check_origin(number, info, found)
        former = records.former_name(number, name)
        # Of a session that is not there nothing has to be looked up, which takes long on a server.
        other = self._target.backend if (former or name) in self.names else MemoryBackend()
        with other.reader() as there:
            known = _counterpart(there, name, former, found)
            here = known or self._places.get(number) or self._target.new_session()
            self._places[number] = here
            besides = Besides(self._reader, there, self._place, number, here)
            has: set[int] = set()
            kept = list(all_rows(there, here)) if known else []
            if known:
                if former is None and lineage.is_deleted(there, here) and besides.was_changed():
                    raise Conflict("it was deleted in the other store: copy again after gc there")
                pairing = Pairing(self._cargo, StoredSource(self._target.backend, there))
                has = self._compare(pairing, number, here, found, kept)
                besides.check_unchanged()
            expect = there.head(here) if known else None
            new = [found[seq] for seq in sorted(found.keys() - has)]
            self.known += len(has)
            if former is not None and known and lineage.is_deleted(there, here) is False:
                # Deleted here since: there it lives on, with what is new for its forks.
                head = records.unseal_head(here, expect or b"")._replace(last=head.last)
            more = besides.collect(found, [seq for seq, _, _ in kept], head, self._freed)
        if former is not None:
            name = records.deleted_name(here, former)
        create, origin = None, None
        if not known:
            origin = self._place(info.origin)
            create = name, records.seal_session(here, name, info._replace(origin=origin))
        if new or more or _without_lease(here, expect) != head._replace(lease=None):
            self._write(_Landing(here, create, origin, expect or b"", besides), new, head)
            self.sessions.add(number)

    def _check_complete(self, number: int, head: Head, found: dict[int, Row]) -> None:
        if damage := self._reader.damage(number):
            raise Corrupt(damage)
        there = Spans.of(found)
        for low, high in lineage.freed(self._reader, number):
            there.add(low, high)
        for low, _ in there.missing(1, head.last + 1):
            raise Corrupt(f"the record of checkpoint {low} is missing")
        if head.seq and head.seq not in found:
            raise Corrupt("the head points at no checkpoint")

    def _check_origin(self, number: int, info: Info, found: dict[int, Row]) -> None:
        """Corrupt if what the session descends from is missing, and not because gc has freed it."""
        gaps = dict(self._reader.gaps(number, 1, MAX_SEQ))
        above = [records.unseal_gap(number, seq, body).ancestor for seq, body in gaps.items()]
        if 1 in found and 1 not in gaps:
            above.append(info.origin)
        for place in [lineage.place_at(at) for at in above if at is not None]:
            own = place.session == number
            if not (place.seq in found if own else self._reader.checkpoint(*place)):
                raise Corrupt("a checkpoint that it descends from is missing")
        for seq in gaps.keys() - found.keys():
            raise Corrupt(f"there is no checkpoint {seq}, but something of those before it")

    def _write(self, landing: _Landing, new: list[Row], head: Head) -> None:
        """Checkpoints with all that they need, a bounded part at a time; the rest with the last."""
        load = Load(self._cargo)
        held: list[Row] = []
        for row in new:
            full = load.size > CHUNK_BYTES
            try:
                load.root(row, goes_on=full or row.record.seq == head.last)
            except Corrupt:
                if not full or row.record.seq == head.last:
                    raise
                load.root(row, goes_on=False)
                full = False  # the session could not be gone on with, if this were the last
            held.append(row)
            if full and row is not new[-1]:
                self._land(landing, landing.meanwhile(row), load, held)
                load, held = Load(self._cargo), []
        self._land(landing, head, load, held, last=True)

    def _land(
        self, landing: _Landing, head: Head, load: Load, rows: list[Row], *, last: bool = False
    ) -> None:
        here = landing.session
        *early, part = load.parts()
        for each in early:
            so_far = landing.at or Head(0, 0, 0, None).seal(here)
            self._commit(landing.change(so_far, each, Notes(copied=Copied(self._freed))))
        checkpoints = [self._checkpoint(here, row, load) for row in rows]
        besides = landing.besides
        notes = besides.rest(checkpoints) if last else besides.part(checkpoints, rows)
        self._commit(landing.change(head.seal(here), part, notes))
        load.done()
        self.checkpoints += len(rows)

    def _commit(self, change: Change) -> None:
        try:
            self._target.backend.commit(change)
        except Moved:
            raise Conflict("somebody else writes to the session in the other store") from None

    def _compare(
        self,
        pairing: Pairing,
        number: int,
        here: int,
        found: dict[int, Row],
        there: list[tuple[int, bytes, bytes]],
    ) -> set[int]:
        """Seqs that both have; Conflict if the other store has something else."""
        has = set()
        gone = Spans()
        for low, high in lineage.freed(self._reader, number):
            gone.add(low, high)
        kept: dict[int, bytes] = {}
        for seq, id, body in there:
            row = found.get(seq)
            other = records.unseal_checkpoint(here, seq, id, body)
            if row is None and gone.within(seq, seq + 1):
                kept[seq] = id  # freed here since, and kept there
                continue
            if row is None or row.record.id != id or row.record.hash != other.record.hash:
                raise Conflict(f"the other store has another checkpoint {seq} of the session")
            pairing.roots(row, other)
            has.add(seq)
        if kept and not has:
            raise Conflict("the other store has another session of this name")
        for row in found.values():
            r = row.record
            if "origin" not in r.extra and kept.get(r.parent_seq or 0, r.parent) != r.parent:
                raise Conflict(f"the other store has another checkpoint {r.parent_seq}")
        return has

    def _checkpoint(self, here: int, row: Row, load: Load) -> tuple[int, bytes, bytes]:
        r = row.record
        line, root = self._cargo.line(row.line), load.remapped(row.root)
        body = records.seal_checkpoint(
            here, r.seq, r.id, row.meta, r.hash, line, r.size, r.added, root, r.skip
        )
        return r.seq, r.id, body

    def _place(self, at: int | None) -> int | None:
        """A position in the other store. What is gone here gets a number that stays nobody's."""
        if at is None:
            return None
        session = at >> records.SEQ_BITS
        if session not in self._places:
            self._places[session] = self._target.new_session()
        return position(self._places[session], at & MAX_SEQ)


class _Landing:
    """How far a session has come in the other store, and what it has besides checkpoints."""

    def __init__(
        self,
        session: int,
        create: tuple[bytes, bytes] | None,
        origin: int | None,
        expect: bytes,
        besides: Besides,
    ) -> None:
        self.session, self.at, self.besides = session, expect, besides
        self._create = create
        self._origin = None if origin is None else lineage.place_at(origin)

    def change(self, head: bytes, part: Part, notes: Notes) -> Change:
        """The next one, which is expected to be made."""
        notes.origin = self._origin
        change = Change(self.session, self.at, head, self._create, None, *part, notes)
        self._create, self._origin, self.at = None, None, head
        return change

    def meanwhile(self, row: Row) -> Head:
        """A head for the time until the last part is there: as if no more had been saved yet."""
        r = row.record
        before = records.unseal_head(self.session, self.at) if self.at else Head(0, 0, 0, None)
        if before.seq:
            return before._replace(last=max(before.last, r.seq))
        near = None if "origin" in r.extra else r.parent_seq
        return Head(r.seq, r.seq, before.operations, near)


def _without_lease(session: int, row: bytes | None) -> Head | None:
    """What a head's row says; None if it is damaged, and has to be written anew."""
    with suppress(*UNREADABLE):
        return records.unseal_head(session, row or b"")._replace(lease=None)
    return None


def _names(reader: Reader) -> set[bytes]:
    """Of all sessions of a store, and of those that were deleted."""
    names: set[bytes] = set()
    after: bytes | None = None
    while page := reader.sessions(after, _PAGE):
        names |= {records.former_name(number, name) or name for number, name, _ in page}
        after = page[-1][1]
    return names


def _counterpart(
    there: Reader, name: bytes, former: bytes | None, found: dict[int, Row]
) -> int | None:
    """The session's number in the other store, if it is there, deleted or not."""
    known = there.session(former or name)
    if known and (former is None or _is_same(there, known[0], found)):
        return known[0]
    after = records.deleted_name(0, b"")
    while page := there.sessions(after, _PAGE):
        for number, raw, _ in page:
            same = records.former_name(number, raw) == (former or name)
            if same and _is_same(there, number, found):
                return number
        after = page[-1][1]
    return None


def _is_same(there: Reader, number: int, found: dict[int, Row]) -> bool:
    held = {seq: id for seq, id, _ in all_rows(there, number)}
    return any(held.get(seq) == row.record.id for seq, row in found.items())
