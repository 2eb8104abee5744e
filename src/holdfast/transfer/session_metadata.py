"""Copies the metadata of a session: everything except its checkpoints and their data.

Metadata are index entries, marks, tombstones, grafts, operations, the journal and the lease.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import UNREADABLE, Conflict
from holdfast.format import records
from holdfast.format.records import MAX_SEQ, Graft, Head, IndexTerm, position
from holdfast.history import leases, lineage
from holdfast.history.leases import LeaseRecord, is_alive
from holdfast.intervals import IntervalSet
from holdfast.runs.resume import interrupted
from holdfast.storage.changes import Copied, Notes
from holdfast.storage.rows import (
    Address,
    GraftWrite,
    JournalRow,
    KeyRow,
    LeaseRow,
    MarkRow,
    NameRow,
    OperationRow,
    TombstoneRow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.format.records import Row
    from holdfast.model import Record
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import CheckpointRow
    from holdfast.storage.tally import Lease


class SessionMetadata:
    """The metadata of a session that the target lacks.

    The session has the number `number` in the source and `here` in the target. `there` reads the
    target, and `place` maps a position of the source to one of the target.
    """

    def __init__(
        self,
        reader: Reader,
        there: Reader,
        place: Callable[[int | None], int | None],
        number: int,
        here: int,
    ) -> None:
        self._reader, self._there, self._place = reader, there, place
        self._number, self._here = number, here
        self._notes, self._copied = Notes(), Copied(0)
        self._freed, self._has = IntervalSet(), set[int]()

    def collect(self, found: dict[int, Row], kept: Iterable[int], head: Head, freed: int) -> bool:
        """Collect the metadata that the target lacks; return whether there is any.

        The target has the checkpoints `kept` and gets all of `found`. `freed` is the target's
        `Turnover.freed` from before the copy: the commit fails if gc has changed it since.
        """
        reader, there, number, here = self._reader, self._there, self._number, self._here
        notes = self._notes
        self._has = {*kept}
        self._freed = lineage.freed(reader, number)
        self._freed.update(lineage.freed(there, here))
        terms: list[IndexTerm] = []
        keys: list[KeyRow] = []
        for seq, each in found.items():
            r = each.record
            terms += self._terms(r)
            key = records.encode_name(r.extra["key"]) if "key" in r.extra else None
            if key is not None and reader.find_key(number, key) == seq:
                keys.append(KeyRow(key, seq))
        self._marks(notes, found, terms)
        notes.terms = [f for f in dict.fromkeys(terms) if not lineage.has_term(there, f)]
        notes.keys = [row for row in keys if there.find_key(here, row.key) != row.seq]
        self._tombstones(notes)
        notes.rename = self._renamed()
        operations = dict(there.operations(here, 1, MAX_SEQ))
        notes.copied = self._copied = Copied(
            freed,
            operations=[
                row
                for row in self.operations(head.operations)
                if operations.get(row.number) != row.body
            ],
            grafts=self._grafts(found),
            journal=self._entries(),
        )
        first = self._copied.journal[0].number if self._copied.journal else 1
        if first > there.last_entry(here) + 1:
            self._copied.journal_from = first  # the entries between were freed in the source
        notes.lease = self._lease(head, found.get(head.seq))
        return _says_anything(notes, self._copied)

    def part(self, checkpoints: Sequence[CheckpointRow], rows: Sequence[Row]) -> Notes:
        """Return the index entries, the grafts and the freed list for one batch of checkpoints."""
        seqs = {row.record.seq for row in rows}
        self._has |= seqs
        terms = {term for row in rows for term in self._terms(row.record)}
        grafts = [graft for graft in self._copied.grafts if graft.seq in seqs]
        if any(graft.seq == 0 for graft in self._copied.grafts):
            grafts.append(self._freed_list(self._has))
        return Notes(
            terms=[term for term in self._notes.terms if term in terms],
            keys=[row for row in self._notes.keys if row.seq in seqs],
            copied=Copied(self._copied.freed, checkpoints, grafts=grafts),
        )

    def rest(self, checkpoints: Sequence[CheckpointRow]) -> Notes:
        """Return all metadata, to be committed with the last batch of checkpoints."""
        self._copied.checkpoints = checkpoints
        return self._notes

    def _terms(self, record: Record) -> list[IndexTerm]:
        own = records.index_terms(record.id, record.extra)
        return own + records.session_terms(self._here, record.extra)

    def was_changed(self) -> bool:
        """Return whether the session was changed in the target.

        Each change (a tag, a rewind, a deletion) is logged as an operation. So the target's
        operations must all be in the source as well. Damaged ones are ignored.
        """
        ours = dict(self.operations(MAX_SEQ))
        for n, body in self._there.operations(self._here, 1, MAX_SEQ):
            if ours.get(n) != body:
                with suppress(*UNREADABLE):  # the copy replaces a damaged one
                    records.unseal_operation(self._here, n, body)
                    return True
        return False

    def check_unchanged(self) -> None:
        """Raise Conflict if the session was changed in the target, or run there."""
        if self.was_changed():
            raise Conflict("the session was changed in the other store")
        theirs = self._there.lease(self._here)
        ours = self._reader.lease(self._number)  # read second, so that its age is not too low
        held = None if theirs is None else LeaseRecord.read(theirs)
        if theirs is None or held is None or not held.open:
            self._check_journal(MAX_SEQ)
        elif is_alive(theirs, held) and not _is_held_here(ours, theirs):
            raise Conflict("the session is run in the other store")
        elif ours is not None and held == LeaseRecord.read(ours)._replace(open=True):
            self._check_journal(MAX_SEQ)  # the lease came with a backup of the source
        else:
            self._check_journal(held.first)

    def _lease(self, head: Head, row: Row | None) -> LeaseRow | None:
        """Return token and row of the lease to write to the target; None to leave it unchanged.

        A run continues in the source only, so a lease is copied as closed. It is copied because a
        journal without a lease counts as damage. A lease that came with a backup stays open while
        the run can be resumed from it. After that it is closed: once gc has freed the entries of
        that run in the source, they would look like entries of a run in the target.
        """
        if self._there.lease(self._here) is None:
            lease = self._reader.lease(self._number)
            if lease is None:
                return None
            return LeaseRow(b"", LeaseRecord.read(lease)._replace(open=False).seal(self._here))
        if row is None or interrupted(self._there, self._here, head, row):
            return None
        return leases.closed(self._there, self._here)

    def _check_journal(self, own: int) -> None:
        """Raise Conflict if the target's journal has an entry that is not from the source.

        Each store numbers its entries, so two entries may have the same number. Entries below `own`
        that were freed in the source are accepted. Entries from `own` on belong to a run that may
        be resumed in the target, so the source must have each of them.
        """
        last = self._reader.last_entry(self._number)
        ours = lineage.journal_rows(self._reader, self._number)
        at, mine = 0, b""
        for n, body in lineage.journal_rows(self._there, self._here):
            while at < n:  # either store may lack entries
                at, mine = next(ours, (MAX_SEQ + 1, b""))
            # The source may have freed an entry that it lacks.
            known = at == n or n < min(own, last + 1)
            if not known or not self._is_same(n, mine if at == n else None, body):
                raise Conflict("the session was run in the other store")

    def _is_same(self, n: int, ours: bytes | None, theirs: bytes) -> bool:
        """Return whether an entry is the same in both stores.

        If it was freed in the source, or is damaged in either store, that is assumed.
        """
        with suppress(*UNREADABLE):
            if ours is not None:
                entry = records.open_entry(self._number, n, ours)
                return entry == records.open_entry(self._here, n, theirs)
        return True

    def operations(self, most: int) -> Iterator[OperationRow]:
        """Yield the source's operations up to number `most`, sealed for the target."""
        for n, body in self._reader.operations(self._number, 1, most):
            kind, created, last, details = records.unseal_operation(self._number, n, body)
            body = records.seal_operation(self._here, n, kind, created, last, details)
            yield OperationRow(n, body)

    def _marks(self, notes: Notes, found: dict[int, Row], terms: list[IndexTerm]) -> None:
        """Collect the labels and tags to add and to remove. Add their index terms to `terms`."""
        number, here = self._number, self._here
        before = {row.key: row for row in self._there.marks(here, 1, MAX_SEQ)}
        marks: list[MarkRow] = []
        for seq, kind, value, body in self._reader.marks(number, 1, MAX_SEQ):
            order = records.unseal_mark(position(number, seq), kind, value, body)
            sealed = records.seal_mark(position(here, seq), kind, value, order)
            marks.append(MarkRow(seq, kind, value, sealed))
            if seq in found:
                terms.append(IndexTerm(kind, value, found[seq].record.id))
        known = {mark.key for mark in marks}
        notes.marks = [mark for mark in marks if before.get(mark.key) != mark]
        notes.removed_marks = [key for key in before if key not in known]
        notes.removed_terms = [
            IndexTerm(key.kind, key.value, found[key.seq].record.id)
            for key in notes.removed_marks
            if key.seq in found
        ]

    def _tombstones(self, notes: Notes) -> None:
        """Collect the tombstones to add and to remove."""
        before = dict(self._there.tombstones(self._here, 1, MAX_SEQ))
        tombstones: list[TombstoneRow] = []
        for seq, body in self._reader.tombstones(self._number, 1, MAX_SEQ):
            tombstone = records.unseal_tombstone(self._number, seq, body)
            body = records.seal_tombstone(self._here, seq, tombstone)
            tombstones.append(TombstoneRow(seq, body))
        notes.tombstones = [row for row in tombstones if before.get(row.seq) != row.body]
        notes.undeleted = sorted(before.keys() - {row.seq for row in tombstones})

    def _renamed(self) -> NameRow | None:
        """Return the session's name and row if it has another name in the target; else None.

        That is so if it was renamed in the source since an earlier copy, or if an earlier copy
        brought a deletion that was undone in the source.
        """
        ours = self._reader.session_by_number(self._number)
        theirs = self._there.session_by_number(self._here)
        if ours is None or ours.is_deleted or theirs is None or theirs.name == ours.name:
            return None
        former = records.unseal_session(*ours).former
        info = records.unseal_session(*theirs)._replace(former=former)
        return NameRow(ours.name, records.seal_session(self._here, ours.name, info))

    def _entries(self) -> list[JournalRow]:
        """Return the entries after the last one of the target's journal, sealed for the target."""
        out: list[JournalRow] = []
        first = self._there.last_entry(self._here) + 1
        for n, body in lineage.journal_rows(self._reader, self._number, first):
            encoded = records.open_entry(self._number, n, body)
            out.append(JournalRow(n, records.seal_entry(self._here, n, encoded)))
        return out

    def _grafts(self, found: dict[int, Row]) -> list[GraftWrite]:
        """Return the grafts and the freed list that the target lacks.

        The target may still have checkpoints that were freed in the source. Those are not in its
        freed list, and their children need no graft there.
        """
        here = self._here
        out: list[GraftWrite] = []
        known = dict(self._there.grafts(here, 0, MAX_SEQ))
        if self._freed.all():
            out.append(self._freed_list({*self._has, *found}))
        for seq, graft in self._ways_up(found):
            if not self._has_parent(found[seq]):
                graft = graft._replace(ancestor=self._place(graft.ancestor))
                body = records.seal_graft(here, seq, graft)
                out.append(GraftWrite(here, seq, graft.ancestor, body))
        return [graft for graft in out if known.get(graft.seq) != graft.body]

    def _freed_list(self, has: set[int]) -> GraftWrite:
        """Return the list of freed checkpoints, for a target that has the checkpoints `has`."""
        rest = self._freed.without(has)
        return GraftWrite(self._here, 0, None, records.seal_freed(self._here, rest))

    def _ways_up(self, found: dict[int, Row]) -> Iterator[tuple[int, Graft]]:
        """Yield seq and graft of each checkpoint whose parent may be elsewhere in the target.

        First come the grafts of the source: their parents are freed. Then, if the target has the
        session and it is a fork, comes a graft to the checkpoint it was forked from. If that one
        was freed in the target and copied again, its session has a new number there.
        """
        grafts = self._reader.grafts(self._number, 1, MAX_SEQ)
        for seq, body in grafts:
            yield seq, records.unseal_graft(self._number, seq, body)
        forked = 1 in found and found[1].record.is_fork and 1 not in dict(grafts)
        if forked and self._there.session_by_number(self._here):
            origin = lineage.forked_at(self._reader, self._number)
            if origin is not None:
                parent = lineage.read_row(self._reader, origin).record
                yield 1, Graft(position(*origin), 0, parent.hash)

    def _has_parent(self, row: Row) -> bool:
        """Return whether the target has the parent of a checkpoint, where its rows point to."""
        r, here = row.record, self._here
        if r.parent_seq is None:
            return False
        places: list[int | None] = [position(here, r.parent_seq)]
        if r.is_fork:
            known = self._there.session_by_number(here)
            graft = lineage.graft_before(self._there, Address(here, r.seq))
            places = [
                records.unseal_session(*known).origin if known else None,
                graft.ancestor if graft else None,
            ]
        kept = [self._there.checkpoint(*lineage.address_at(at)) for at in places if at is not None]
        return any(row is not None and row.id == r.parent for row in kept)


def _is_held_here(ours: Lease | None, theirs: Lease) -> bool:
    """Return whether the worker that holds a lease in the target works in the source.

    If one store is a copy of the other, both have the lease. The worker renews it only in the store
    that it works in, so the lease is younger there.
    """
    return ours is not None and ours.token == theirs.token and ours.age < theirs.age


def _says_anything(notes: Notes, copied: Copied) -> bool:
    return any(
        (
            notes.marks, notes.removed_marks, notes.terms, notes.keys,
            notes.tombstones, notes.undeleted, notes.lease, notes.rename,
            copied.operations, copied.grafts, copied.journal,
        )
    )  # fmt: skip
