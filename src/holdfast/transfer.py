"""Copying sessions to another store: every record as it is, all data once.

Records keep their ids, numbers and hashes. What depends on the store they lie in (the numbers of
sessions and streams, digests over addresses) is made anew. A session that is there already gets
what it lacks; so a copy that was interrupted goes on, and one that is complete changes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast import lineage
from holdfast.backends.base import Change, Copied, Moved, Notes
from holdfast.backends.memory import MemoryBackend
from holdfast.cargo import Cargo, Load, Pairing
from holdfast.codec import records
from holdfast.codec.records import MAX_SEQ, Head, Info, position
from holdfast.errors import UNREADABLE, Conflict, Corrupt, InvalidRequest
from holdfast.leases import Held
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
    with source.reader() as reader:
        numbers = _wanted(reader, names)
        copy = _Copy(source, reader, target)
        skipped: list[tuple[str, str]] = []
        for done, number in enumerate(numbers):
            if progress is not None:
                progress(done, len(numbers))
            try:
                copy.session(number)
            except (*UNREADABLE, Conflict) as e:
                skipped.append((_shown(reader, number), e.message))
        if progress is not None:
            progress(len(numbers), len(numbers))
    return Transferred(copy.sessions, copy.checkpoints, copy.known, tuple(skipped))


def _shown(reader: Reader, number: int) -> str:
    name, _ = reader.session_by_number(number) or (b"", b"")
    return records.shown_name(records.former_name(number, name) or name)


def _wanted(reader: Reader, names: Iterable[str] | None) -> list[int]:
    """Sessions to copy, each after the one that it was forked from, which comes along."""
    if isinstance(names, str):
        raise InvalidRequest("sessions must be a list of names, not a string")
    chosen: list[int] = []
    if names is not None:
        chosen = [lineage.find_session(reader, name) for name in names]
    else:
        after: bytes | None = None
        while page := reader.sessions(after, _PAGE):
            chosen += [n for n, raw, _ in page if records.former_name(n, raw) is None]
            after = page[-1][1]
    order: dict[int, None] = {}
    for number in chosen:
        line = [number]
        while (above := _origin(reader, line[-1])) is not None and above not in order:
            line.append(above)
        order |= dict.fromkeys(reversed(line))
    return list(order)


def _origin(reader: Reader, number: int) -> int | None:
    """The session that one was forked from, if that is still there."""
    found = reader.session_by_number(number)
    with suppress(*UNREADABLE):
        if found is not None:
            where = records.unseal_session(number, *found).origin
            if where is not None and reader.session_by_number(where >> records.SEQ_BITS):
                return where >> records.SEQ_BITS
    return None


class _Copy:
    """What is known of both stores while sessions are copied."""

    def __init__(self, source: Backend, reader: Reader, target: Store) -> None:
        self._reader, self._target = reader, target
        self._cargo = Cargo(source, reader, target.new_stream)
        self._sessions: dict[int, int] = {}
        self._failed: set[int] = set()
        self._names = _names(target.backend)
        self.sessions = self.checkpoints = self.known = 0

    def session(self, number: int) -> None:
        self._failed.add(number)  # until it is done
        self._session(number)
        self._failed.discard(number)

    def _session(self, number: int) -> None:
        name, row = self._reader.session_by_number(number) or (b"", b"")
        info = records.unseal_session(number, name, row)
        if info.origin is not None and info.origin >> records.SEQ_BITS in self._failed:
            raise Conflict("the session that it was forked from was not copied")
        _, head = lineage.read_head(self._reader, number)
        head = head._replace(lease=None)  # who runs it here does not run it there
        found = {
            seq: records.unseal_checkpoint(number, seq, id, body)
            for seq, id, body in all_rows(self._reader, number)
        }
        self._check_complete(number, head, found)
        former = records.former_name(number, name)
        taken = former is not None or name in self._names
        # Of a session that is not there nothing has to be looked up, which takes long on a server.
        other = self._target.backend if taken else MemoryBackend()
        with other.reader() as there:
            known = _counterpart(there, name, former, found)
            here = known or self._target.new_session()
            self._sessions[number] = here
            has = self._compare(there, number, here, found) if known else set()
            expect = there.head(here) if known else None
            new = [found[seq] for seq in sorted(found.keys() - has)]
            self.known += len(has)
            load = Load(self._cargo, found.get(head.last))
            for each in new:
                load.root(each.root)
            if former is not None and known and lineage.is_deleted(there, here) is False:
                # Deleted here since: there it lives on, with what is new for its forks.
                head = records.unseal_head(here, expect or b"")._replace(last=head.last)
            notes = self._notes(there, number, here, found, head)
        if former is not None:
            name = records.deleted_name(here, former)
        created = Info(info.created_us, info.agent, self._place(info.origin))
        create = None if known else (name, records.seal_session(here, name, created))
        final = head.seal(here)
        if new or expect != final or _says(notes):
            self._write(here, create, expect or b"", final, load, new, notes)
            self.sessions += 1
            self.checkpoints += len(new)

    def _check_complete(self, number: int, head: Head, found: dict[int, Row]) -> None:
        there = Spans.of(found)
        for low, high in lineage.freed(self._reader, number):
            there.add(low, high)
        for low, _ in there.missing(1, head.last + 1):
            raise Corrupt(f"the record of checkpoint {low} is missing")
        if head.seq and head.seq not in found:
            raise Corrupt("the head points at no checkpoint")

    def _write(
        self,
        here: int,
        create: tuple[bytes, bytes] | None,
        expect: bytes,
        final: bytes,
        load: Load,
        new: list[Row],
        notes: Notes,
    ) -> None:
        """Data first, a bounded part at a time; then all records at once."""
        origin = notes.origin
        at = expect
        part: Part = ([], [])
        for following in load.parts():
            if part != ([], []):
                head = at or Head(0, 0, 0, None).seal(here)
                self._commit(Change(here, at, head, create, None, *part, Notes(origin=origin)))
                create, at, origin = None, head, None
            part = following
        notes.origin = origin
        notes.copied = Copied(
            [self._checkpoint(here, row) for row in new],
            notes.copied.operations if notes.copied else (),
            notes.copied.gaps if notes.copied else (),
            notes.copied.journal if notes.copied else (),
        )
        self._commit(Change(here, at, final, create, None, *part, notes))
        load.done()

    def _commit(self, change: Change) -> None:
        try:
            self._target.backend.commit(change)
        except Moved:
            raise Conflict("somebody else writes to the session in the other store") from None

    def _compare(self, there: Reader, number: int, here: int, found: dict[int, Row]) -> set[int]:
        """Seqs that both have; Conflict if the other store has something else."""
        has = set()
        gone = Spans()
        for low, high in lineage.freed(self._reader, number):
            gone.add(low, high)
        pairing = Pairing(self._cargo, StoredSource(self._target.backend, there))
        for seq, id, body in all_rows(there, here):
            row = found.get(seq)
            other = records.unseal_checkpoint(here, seq, id, body)
            if row is None and gone.within(seq, seq + 1):
                continue  # freed here since, and kept there
            if row is None or row.record.id != id or row.record.hash != other.record.hash:
                raise Conflict(f"the other store has another checkpoint {seq} of the session")
            pairing.roots(row, other)
            has.add(seq)
        return has

    def _checkpoint(self, here: int, row: Row) -> tuple[int, bytes, bytes]:
        r = row.record
        line, root = self._cargo.stream(row.line), self._cargo.remapped(row.root)
        body = records.seal_checkpoint(
            here, r.seq, r.id, row.meta, r.hash, line, r.size, r.added, root, r.skip
        )
        return r.seq, r.id, body

    def _place(self, at: int | None) -> int | None:
        """A position in the other store. What is gone here gets a number that stays nobody's."""
        if at is None:
            return None
        session = at >> records.SEQ_BITS
        if session not in self._sessions:
            self._sessions[session] = self._target.new_session()
        return position(self._sessions[session], at & MAX_SEQ)

    def _notes(
        self, there: Reader, number: int, here: int, found: dict[int, Row], head: Head
    ) -> Notes:
        """What the session has besides its checkpoints, where the other store has it not."""
        reader = self._reader
        notes = Notes()
        name, row = reader.session_by_number(number) or (b"", b"")
        where = self._place(records.unseal_session(number, name, row).origin)
        if where is not None:
            notes.origin = lineage.place_at(where)
        facets: list[tuple[int, bytes, bytes]] = []
        keys: list[tuple[bytes, int]] = []
        for seq, each in found.items():
            r = each.record
            facets += records.facets(r.id, r.extra)
            facets += records.session_facets(here, r.extra)
            key = records.encode_name(r.extra["key"]) if "key" in r.extra else None
            if key is not None and reader.find_key(number, key) == seq:
                keys.append((key, seq))
        marks, before = [], {m[:3]: m[3] for m in there.marks(here, 1, MAX_SEQ)}
        for seq, kind, value, body in reader.marks(number, 1, MAX_SEQ):
            order = records.unseal_mark(position(number, seq), kind, value, body)
            marks.append(
                (seq, kind, value, records.seal_mark(position(here, seq), kind, value, order))
            )
            if seq in found:
                facets.append((kind, value, found[seq].record.id))
        known = {mark[:3] for mark in marks}
        notes.marks = [mark for mark in marks if before.get(mark[:3]) != mark[3]]
        notes.unmarks = [mark for mark in before if mark not in known]
        notes.unfacets = [
            (kind, value, found[seq].record.id)
            for seq, kind, value in notes.unmarks
            if seq in found
        ]
        notes.facets = [f for f in dict.fromkeys(facets) if not _has_facet(there, f)]
        notes.keys = [(key, seq) for key, seq in keys if there.find_key(here, key) != seq]
        self._buried(notes, there, number, here)
        operations = dict(there.operations(here, 1, MAX_SEQ))
        copied = Copied(
            operations=[
                (n, body)
                for n, body in self._operations(number, here, head)
                if operations.get(n) != body
            ],
            gaps=self._gaps(there, number, here, found),
            journal=self._entries(there, number, here),
        )
        notes.copied = copied
        lease = reader.lease(number)
        if lease is not None and there.lease(here) is None:
            # A run goes on here, if at all; a journal without a lease would be damage.
            notes.lease = (b"", Held.read(lease)._replace(open=False).seal(here))
        return notes

    def _buried(self, notes: Notes, there: Reader, number: int, here: int) -> None:
        buried = dict(there.tombs(here, 1, MAX_SEQ))
        tombs = []
        for seq, body in self._reader.tombs(number, 1, MAX_SEQ):
            tomb = records.unseal_tomb(number, seq, body)
            tombs.append((seq, records.seal_tomb(here, seq, tomb)))
        notes.tombs = [(seq, body) for seq, body in tombs if buried.get(seq) != body]
        notes.untombs = [seq for seq in buried if seq not in dict(tombs)]

    def _operations(self, number: int, here: int, head: Head) -> Iterator[tuple[int, bytes]]:
        for n, body in self._reader.operations(number, 1, head.operations):
            kind, created, last, details = records.unseal_operation(number, n, body)
            yield n, records.seal_operation(here, n, kind, created, last, details)

    def _entries(self, there: Reader, number: int, here: int) -> list[tuple[int, bytes]]:
        """What the other store lacks of the journal."""
        out: list[tuple[int, bytes]] = []
        first = there.last_entry(here) + 1
        while page := self._reader.journal(number, first, _PAGE):
            for n, body in page:
                encoded = records.open_entry(number, n, body)
                out.append((n, records.seal_entry(here, n, encoded)))
            first = page[-1][0] + 1
        return out

    def _gaps(
        self, there: Reader, number: int, here: int, found: dict[int, Row]
    ) -> list[tuple[int, int | None, bytes]]:
        """What is known of those that are gone; the other store may have them still."""
        out: list[tuple[int, int | None, bytes]] = []
        known = dict(there.gaps(here, 0, MAX_SEQ))
        for seq, body in self._reader.gaps(number, 0, MAX_SEQ):
            if seq == 0:
                freed = Spans.of(
                    n
                    for low, high in records.unseal_freed(number, body)
                    for n in range(low, high)
                    if there.checkpoint(here, n) is None
                )
                out.append((0, None, records.seal_freed(here, freed.all())))
                continue
            gap = records.unseal_gap(number, seq, body)
            if self._has_parent(there, here, found[seq]):
                continue
            gap = gap._replace(ancestor=self._place(gap.ancestor))
            out.append((seq, gap.ancestor, records.seal_gap(here, seq, gap)))
        return [gap for gap in out if known.get(gap[0]) != gap[2]]

    def _has_parent(self, there: Reader, here: int, row: Row) -> bool:
        """Whether the other store has kept the parent of a checkpoint."""
        r = row.record
        if r.parent_seq is None:
            return False
        place = lineage.Place(here, r.parent_seq)
        if "origin" in r.extra:
            known = there.session_by_number(here)
            where = records.unseal_session(here, *known).origin if known else None
            if where is None:
                return False
            place = lineage.place_at(where)
        kept = there.checkpoint(*place)
        return kept is not None and kept[0] == r.parent


def _says(notes: Notes) -> bool:
    """Whether there is anything to note."""
    copied = notes.copied or Copied()
    return any(
        (
            notes.marks, notes.unmarks, notes.facets, notes.keys, notes.tombs, notes.untombs,
            copied.operations, copied.gaps, copied.journal, notes.lease,
        )
    )  # fmt: skip


def _has_facet(reader: Reader, facet: tuple[int, bytes, bytes]) -> bool:
    kind, value, id = facet
    return reader.find_facets(kind, value, id, id + b"\0", 1) == [id]


def _names(backend: Backend) -> set[bytes]:
    """Of all sessions of a store."""
    names: set[bytes] = set()
    after: bytes | None = None
    with backend.reader() as reader:
        while page := reader.sessions(after, _PAGE):
            names |= {name for _, name, _ in page}
            after = page[-1][1]
    return names


def _counterpart(
    there: Reader, name: bytes, former: bytes | None, found: dict[int, Row]
) -> int | None:
    """The session's number in the other store, if it is there; a deleted one may live there."""
    known = there.session(former or name)
    if former is None or (known and _is_same(there, known[0], found)):
        return known[0] if known else None
    after = records.deleted_name(0, b"")
    while page := there.sessions(after, _PAGE):
        for number, raw, _ in page:
            if records.former_name(number, raw) == former and _is_same(there, number, found):
                return number
        after = page[-1][1]
    return None


def _is_same(there: Reader, number: int, found: dict[int, Row]) -> bool:
    held = {seq: id for seq, id, _ in all_rows(there, number)}
    return any(held.get(seq) == row.record.id for seq, row in found.items())
