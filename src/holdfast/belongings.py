"""What a session has besides its checkpoints, on its way to another store."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast import leases, lineage
from holdfast.backends.base import Copied, Notes
from holdfast.codec import records
from holdfast.codec.records import MAX_SEQ, Gap, Head, position
from holdfast.errors import UNREADABLE, Conflict
from holdfast.leases import Held, is_alive
from holdfast.live import Spans
from holdfast.runs.opening import interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.backends.base import Lease, Reader
    from holdfast.codec.records import Row
    from holdfast.model import Record

_PAGE = 1_000


class Besides:
    """Of the session `number` here, which is `here` in the other store."""

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
        self._freed, self._has = Spans(), set[int]()

    def collect(self, found: dict[int, Row], kept: Iterable[int], head: Head, freed: int) -> bool:
        """What the other store lacks, which has the checkpoints `kept` and gets all of `found`;
        whether that is anything.
        """
        reader, there, number, here = self._reader, self._there, self._number, self._here
        notes = self._notes
        self._has = {*kept}
        for low, high in [*lineage.freed(reader, number), *lineage.freed(there, here)]:
            self._freed.add(low, high)
        facets: list[tuple[int, bytes, bytes]] = []
        keys: list[tuple[bytes, int]] = []
        for seq, each in found.items():
            r = each.record
            facets += self._facets(r)
            key = records.encode_name(r.extra["key"]) if "key" in r.extra else None
            if key is not None and reader.find_key(number, key) == seq:
                keys.append((key, seq))
        self._marks(notes, found, facets)
        notes.facets = [f for f in dict.fromkeys(facets) if not _has_facet(there, f)]
        notes.keys = [(key, seq) for key, seq in keys if there.find_key(here, key) != seq]
        self._buried(notes)
        notes.rename = self._revived()
        operations = dict(there.operations(here, 1, MAX_SEQ))
        notes.copied = self._copied = Copied(
            freed,
            operations=[
                (n, body)
                for n, body in self.operations(head.operations)
                if operations.get(n) != body
            ],
            gaps=self._gaps(found),
            journal=self._entries(),
        )
        first = next((n for n, _ in self._copied.journal), 1)
        if first > there.last_entry(here) + 1:
            self._copied.journal_from = first  # what lay between was freed here since
        notes.lease = self._lease(head, found.get(head.seq))
        return _says_anything(notes, self._copied)

    def part(self, checkpoints: Sequence[tuple[int, bytes, bytes]], rows: Sequence[Row]) -> Notes:
        """What comes with some of the checkpoints: what they are found by, what is above them, and,
        as it is from then on, which ones are freed.
        """
        seqs = {row.record.seq for row in rows}
        self._has |= seqs
        facets = {facet for row in rows for facet in self._facets(row.record)}
        gaps = [gap for gap in self._copied.gaps if gap[0] in seqs]
        if any(seq == 0 for seq, _, _ in self._copied.gaps):
            rest = self._freed.without(self._has)
            gaps.append((0, None, records.seal_freed(self._here, rest)))
        return Notes(
            facets=[facet for facet in self._notes.facets if facet in facets],
            keys=[(key, seq) for key, seq in self._notes.keys if seq in seqs],
            copied=Copied(self._copied.freed, checkpoints, gaps=gaps),
        )

    def rest(self, checkpoints: Sequence[tuple[int, bytes, bytes]]) -> Notes:
        """All of it, with the last of the checkpoints."""
        self._copied.checkpoints = checkpoints
        return self._notes

    def _facets(self, record: Record) -> list[tuple[int, bytes, bytes]]:
        own = records.facets(record.id, record.extra)
        return own + records.session_facets(self._here, record.extra)

    def was_changed(self) -> bool:
        """Whether something was done to the session in the other store: whatever that was (a tag, a
        rewind, a deletion) is in the log of its operations, which can only be shorter than ours.
        """
        ours = dict(self.operations(MAX_SEQ))
        for n, body in self._there.operations(self._here, 1, MAX_SEQ):
            if ours.get(n) != body:
                with suppress(*UNREADABLE):  # one that is damaged there is written anew
                    records.unseal_operation(self._here, n, body)
                    return True
        return False

    def check_unchanged(self) -> None:
        """Conflict if the session was changed or run in the other store."""
        if self.was_changed():
            raise Conflict("the session was changed in the other store")
        theirs = self._there.lease(self._here)
        ours = self._reader.lease(self._number)  # looked at later: so its age is rather too high
        held = None if theirs is None else Held.read(theirs)
        if theirs is None or held is None or not held.open:
            self._check_journal(MAX_SEQ)
        elif is_alive(theirs, held) and not _is_held_here(ours, theirs):
            raise Conflict("the session is run in the other store")
        elif ours is not None and held == Held.read(ours)._replace(open=True):
            self._check_journal(MAX_SEQ)  # it came with a backup, and is ours
        else:
            self._check_journal(held.first)

    def _lease(self, head: Head, tip: Row | None) -> tuple[bytes, bytes] | None:
        """A run goes on here, if at all; but a journal without a lease would be damage. One that
        came with a backup stays open while the run could be taken up from it. From then on it must
        not: once its entries are freed here, nobody could tell them from those of a run there.
        """
        if self._there.lease(self._here) is None:
            lease = self._reader.lease(self._number)
            return lease and (b"", Held.read(lease)._replace(open=False).seal(self._here))
        if tip is None or interrupted(self._there, self._here, head, tip):
            return None
        return leases.closed(self._there, self._here)

    def _check_journal(self, own: int) -> None:
        """Entries are numbered by who writes them: the same number may be of something else. Those
        from `own` on are of a run that may go on there: so it must be known that they are ours.
        """
        last = self._reader.last_entry(self._number)
        ours = _journal(self._reader, self._number, 1)
        at, mine = 0, b""
        for n, body in _journal(self._there, self._here, 1):
            while at < n:  # either may lack any of them
                at, mine = next(ours, (MAX_SEQ + 1, b""))
            known = at == n or n < min(own, last + 1)  # else it was freed here
            if not known or not self._is_same(n, mine if at == n else None, body):
                raise Conflict("the session was run in the other store")

    def _is_same(self, n: int, ours: bytes | None, theirs: bytes) -> bool:
        """One that was freed here, or is damaged here or there, cannot be told from another."""
        with suppress(*UNREADABLE):
            if ours is not None:
                entry = records.open_entry(self._number, n, ours)
                return entry == records.open_entry(self._here, n, theirs)
        return True

    def operations(self, most: int) -> Iterator[tuple[int, bytes]]:
        for n, body in self._reader.operations(self._number, 1, most):
            kind, created, last, details = records.unseal_operation(self._number, n, body)
            yield n, records.seal_operation(self._here, n, kind, created, last, details)

    def _marks(
        self, notes: Notes, found: dict[int, Row], facets: list[tuple[int, bytes, bytes]]
    ) -> None:
        number, here = self._number, self._here
        marks, before = [], {m[:3]: m[3] for m in self._there.marks(here, 1, MAX_SEQ)}
        for seq, kind, value, body in self._reader.marks(number, 1, MAX_SEQ):
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

    def _buried(self, notes: Notes) -> None:
        buried = dict(self._there.tombs(self._here, 1, MAX_SEQ))
        tombs: dict[int, bytes] = {}
        for seq, body in self._reader.tombs(self._number, 1, MAX_SEQ):
            tomb = records.unseal_tomb(self._number, seq, body)
            tombs[seq] = records.seal_tomb(self._here, seq, tomb)
        notes.tombs = [(seq, body) for seq, body in tombs.items() if buried.get(seq) != body]
        notes.untombs = [seq for seq in buried if seq not in tombs]

    def _revived(self) -> tuple[bytes, bytes] | None:
        """The session's name and row, if a copy had brought its deletion, which was undone here."""
        name, _ = self._reader.session_by_number(self._number) or (b"", b"")
        known = self._there.session_by_number(self._here)
        if known is None or records.former_name(self._here, known[0]) is None:
            return None
        if records.former_name(self._number, name) is not None:
            return None
        info = records.unseal_session(self._here, *known)
        return name, records.seal_session(self._here, name, info)

    def _entries(self) -> list[tuple[int, bytes]]:
        """What the other store lacks of the journal."""
        out: list[tuple[int, bytes]] = []
        first = self._there.last_entry(self._here) + 1
        for n, body in _journal(self._reader, self._number, first):
            encoded = records.open_entry(self._number, n, body)
            out.append((n, records.seal_entry(self._here, n, encoded)))
        return out

    def _gaps(self, found: dict[int, Row]) -> list[tuple[int, int | None, bytes]]:
        """What is known of those that are gone; the other store may have them still."""
        here = self._here
        out: list[tuple[int, int | None, bytes]] = []
        known = dict(self._there.gaps(here, 0, MAX_SEQ))
        if self._freed.all():
            rest = self._freed.without({*self._has, *found})
            out.append((0, None, records.seal_freed(here, rest)))
        for seq, gap in self._ways_up(found):
            if not self._has_parent(found[seq]):
                gap = gap._replace(ancestor=self._place(gap.ancestor))
                out.append((seq, gap.ancestor, records.seal_gap(here, seq, gap)))
        return [gap for gap in out if known.get(gap[0]) != gap[2]]

    def _ways_up(self, found: dict[int, Row]) -> Iterator[tuple[int, Gap]]:
        """What is above checkpoints whose parents may not be where the other store looks for them:
        those that gc has freed here, and the one that a fork in the other store came from. If that
        was freed there and is back, it has another number now, and the gap in the fork tells it.
        """
        gaps = self._reader.gaps(self._number, 1, MAX_SEQ)
        for seq, body in gaps:
            yield seq, records.unseal_gap(self._number, seq, body)
        forked = 1 in found and "origin" in found[1].record.extra and 1 not in dict(gaps)
        if forked and self._there.session_by_number(self._here):
            name, row = self._reader.session_by_number(self._number) or (b"", b"")
            origin = records.unseal_session(self._number, name, row).origin
            if origin is not None:
                parent = lineage.read_row(self._reader, lineage.place_at(origin)).record
                yield 1, Gap(origin, 0, parent.hash)

    def _has_parent(self, row: Row) -> bool:
        """Whether the other store has kept the parent of a checkpoint."""
        r, here = row.record, self._here
        if r.parent_seq is None:
            return False
        places: list[int | None] = [position(here, r.parent_seq)]
        if "origin" in r.extra:
            known = self._there.session_by_number(here)
            gap = lineage.gap_before(self._there, lineage.Place(here, r.seq))
            places = [
                records.unseal_session(here, *known).origin if known else None,
                gap.ancestor if gap else None,
            ]
        kept = [self._there.checkpoint(*lineage.place_at(at)) for at in places if at is not None]
        return any(row is not None and row[0] == r.parent for row in kept)


def _is_held_here(ours: Lease | None, theirs: Lease) -> bool:
    """Whether a worker that seems to be there is here: one of the stores was made from the other,
    and only the one that it works in gets signs of life.
    """
    return ours is not None and ours.token == theirs.token and ours.age < theirs.age


def _journal(reader: Reader, session: int, first: int) -> Iterator[tuple[int, bytes]]:
    """Entries of a journal from a number on, a page at a time."""
    while page := reader.journal(session, first, _PAGE):
        yield from page
        first = page[-1][0] + 1


def _says_anything(notes: Notes, copied: Copied) -> bool:
    return any(
        (
            notes.marks, notes.unmarks, notes.facets, notes.keys, notes.tombs, notes.untombs,
            copied.operations, copied.gaps, copied.journal, notes.lease, notes.rename,
        )
    )  # fmt: skip


def _has_facet(reader: Reader, facet: tuple[int, bytes, bytes]) -> bool:
    kind, value, id = facet
    return reader.find_facets(kind, value, id, id + b"\0", 1) == [id]
