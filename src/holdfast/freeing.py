"""What of a session gc frees, and what those that stay have to know of it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast import clock, lineage
from holdfast.backends.base import Sweep
from holdfast.codec import records
from holdfast.codec.records import LABEL, TAG, Gap
from holdfast.errors import UNREADABLE
from holdfast.leases import Held
from holdfast.lineage import Place
from holdfast.live import Spans, all_rows
from holdfast.runs import notes
from holdfast.runs.journal import all_calls, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Reader
    from holdfast.codec.records import Head, Tomb
    from holdfast.model import Record

DAY = 24 * 60 * 60
BATCH = 2_000
"""Checkpoints that are freed in one write."""


def is_due(tomb: Tomb) -> bool:
    """Whether what is buried may be freed."""
    if not tomb.held:
        return True
    boot, uptime = clock.uptime()
    if tomb.boot and tomb.boot == boot:
        return uptime - tomb.uptime >= DAY
    return time.time_ns() // 1000 - tomb.created_us >= DAY * 1_000_000


def _may_go(session: int, seq: int, tomb: bytes) -> bool:
    try:
        return is_due(records.unseal_tomb(session, seq, tomb))
    except UNREADABLE:
        return False  # verify() tells of it


class _Known(NamedTuple):
    """What freeing has to know of a checkpoint."""

    id: bytes
    parent: Place | None
    hash: bytes
    """Empty if the record is damaged."""
    record: Record | None


class Tree:
    """The checkpoints of a session, and what becomes of them."""

    def __init__(self, reader: Reader, session: int) -> None:
        self.session = session
        self._row, self._head = lineage.read_head(reader, session)
        self._known: dict[int, _Known] = {}
        self._facets: set[tuple[int, bytes, bytes]] = set()
        for seq, id, body in all_rows(reader, session):
            try:
                record = records.unseal_checkpoint(session, seq, id, body).record
                self._facets.update(records.session_facets(session, record.extra))
                parent = lineage.parent_of(reader, Place(session, seq), record)
                self._known[seq] = _Known(id, parent, record.hash, record)
            except UNREADABLE:
                self._known[seq] = _Known(id, None, b"", None)
        self._gap_rows = dict(reader.gaps(session, 0, records.MAX_SEQ))
        """As they are in the store; the row of seq 0 tells what was freed."""
        self._gaps = {
            seq: records.unseal_gap(session, seq, row) for seq, row in self._gap_rows.items() if seq
        }
        self._freed = Spans()
        if 0 in self._gap_rows:
            for low, high in records.unseal_freed(session, self._gap_rows[0]):
                self._freed.add(low, high)
        tombs = reader.tombs(session, 0, records.MAX_SEQ)
        deleted, remove = _deletion(reader, session, self._head)
        if remove:
            # The head first: without it the deletion is final, and cannot be undone half-way.
            self.due = sorted(self._known, key=lambda seq: (seq != self._head.seq, seq))
            self.held = 0
        else:
            due = {seq for seq, row in tombs if _may_go(session, seq, row)}
            self.due = sorted(due & self._known.keys() - {self._head.seq})
            self.held = len(self._known) if deleted else len(tombs) - len(self.due)
            remove = not self._head.seq and len(self.due) == len(self._known)
        found = reader.session_by_number(session)
        self.remove = found[0] if found and remove else None

    def give_up(self, missing: list[int]) -> None:
        """Have records that are missing, and nothing else, counted among the freed."""
        self._known |= {seq: _Known(b"", None, b"", None) for seq in missing}
        self.due, self.remove = missing, None

    def sweep(self, reader: Reader) -> Sweep:
        """Free the next of those that are due; whoever came after them learns what was there."""
        session = self.session
        batch, self.due = self.due[:BATCH], self.due[BATCH:]
        going = set(batch)
        forks = reader.forks(session, 1, records.MAX_SEQ)
        below = reader.gaps_below(session)
        gaps = [*self._gaps_here(going), *self._gaps_elsewhere(reader, forks, below, going)]
        keys, facets = self._entries(reader, batch)
        known_gaps = sorted(self._gap_rows.items())
        for low, high in Spans.of(batch).all():
            self._freed.add(low, high)
        for seq in batch:
            self._gaps.pop(seq, None)
            self._gap_rows.pop(seq, None)
        rows = [(s, q, gap.ancestor, records.seal_gap(s, q, gap)) for s, q, gap in gaps]
        if batch:
            rows.append((session, 0, None, records.seal_freed(session, self._freed.all())))
        self._gap_rows.update({q: row for s, q, _, row in rows if s == session})
        last = self.remove is not None and not self.due
        journal = 0 if self.due or last else self._journal_from(reader, going)
        if last:
            facets += sorted(self._facets)
        freed = [(seq, self._known.pop(seq).id) for seq in batch]
        return Sweep(
            session, self._row, known_gaps, forks, below,
            freed, keys, facets, rows, journal, self.remove if last else None,
        )  # fmt: skip

    def _journal_from(self, reader: Reader, going: set[int]) -> int:
        """The number below which no entry of the journal matters any more.

        What is in doubt stays, and the calls from the first turn on of which a checkpoint stays; of
        a run that is open also those of the turn that it would go on in, and what was called
        outside of turns. The notes of a checkpoint that stays or may be yet to come stay, too, and
        so does the last entry: no number is ever given again, which copies and notes go by.
        """
        last = reader.last_entry(self.session)
        if not last:
            return 0
        turns: dict[str, int] = {}
        kept: list[int] = []
        keys: set[str | None] = set()
        for seq, known in self._known.items():
            if known.record is None:
                return 0
            keys.add(known.record.extra.get("key"))
            run, turn, _ = known.record.extra.get("run", ("", 0, None))
            if seq not in going:
                turns[run] = min(turn, turns.get(run, turn))
                noted = known.record.extra.get("meta", {}).get(notes.FROM)
                if type(noted) is int:
                    kept.append(noted)
        try:
            lease = reader.lease(self.session)
            held = None if lease is None else Held.read(lease)
            opened = held.run if held is not None and held.open else None
            if opened is not None:
                goes_on = self._goes_on(opened)
                turns[opened] = min(goes_on, turns.get(opened, goes_on))
            early = notes.Early(keys)
            calls = all_calls(early.watch(read(reader, self.session))).all.values()
        except UNREADABLE:
            return 0
        kept += early.numbers
        kept += [
            call.number
            for call in calls
            if call.outcome == "started"
            or (call.run in turns and call.turn >= turns[call.run])
            or (call.run == opened and not call.turn)
        ]
        return min([*kept, last])

    def _goes_on(self, run: str) -> int:
        """The turn in which a run that is open would be resumed; 0 if that is not known."""
        mark = self._mark(self._head.seq, run)
        if mark is None:
            return 0
        _, turn, base = mark
        if base is not None:
            found = self._mark(base, run)
            return 0 if found is None else found[1] + 1
        return turn + 1

    def _mark(self, seq: int, run: str) -> tuple[str, int, int | None] | None:
        """Where in a run a checkpoint was taken; None if it was taken elsewhere."""
        record = self._known[seq].record if seq in self._known else None
        mark = None if record is None else record.extra.get("run")
        return (mark[0], mark[1], mark[2]) if mark is not None and mark[0] == run else None

    def _entries(
        self, reader: Reader, batch: list[int]
    ) -> tuple[list[bytes], list[tuple[int, bytes, bytes]]]:
        """Keys, and entries of the index for searches, that go with the checkpoints."""
        keys: list[bytes] = []
        facets: list[tuple[int, bytes, bytes]] = []
        for seq in batch:
            id, _, _, record = self._known[seq]
            if record is not None:
                facets += records.facets(id, record.extra)
                if "key" in record.extra:
                    keys.append(records.encode_name(record.extra["key"]))
        low, high = min(batch, default=0), max(batch, default=0)
        for seq, kind, value, _ in reader.marks(self.session, low, high):
            if kind in (LABEL, TAG) and seq in self._known:
                facets.append((kind, value, self._known[seq].id))
        chosen = {self._known[seq].id for seq in batch}
        return keys, [f for f in facets if f[2] in chosen]

    def _gaps_here(self, going: set[int]) -> Iterator[tuple[int, int, Gap]]:
        for seq, known in self._known.items():
            if seq in going:
                continue
            gap = self._gaps.get(seq)
            if gap is not None:
                new = self._widened(gap, going)
            else:
                skip = known.record.skip if known.record else None
                new = self._new_gap(known.parent, going, skip)
            if new is not None:
                self._gaps[seq] = new
                yield self.session, seq, new

    def _new_gap(self, parent: Place | None, going: set[int], skip: int | None) -> Gap | None:
        """The gap before a child of something that goes; None if its parent stays."""
        if parent is None or parent.session != self.session or parent.seq not in going:
            return None
        ancestor, freed = self._climb(parent, going, skip)
        return Gap(ancestor, freed, self._known[parent.seq].hash)

    def _widened(self, gap: Gap, going: set[int]) -> Gap | None:
        """A gap whose far end goes, too."""
        if gap.ancestor is None:
            return None
        place = lineage.place_at(gap.ancestor)
        if place.session != self.session or place.seq not in going:
            return None
        ancestor, freed = self._climb(place, going)
        return Gap(ancestor, gap.freed + freed, gap.parent_hash)

    def _climb(
        self, place: Place, going: set[int], skip: int | None = None
    ) -> tuple[int | None, int]:
        """From one that goes to the nearest ancestor that stays, and how many go on the way.

        `skip` is what its child knows of the next one, should its own record be damaged.
        """
        freed = 0
        at: Place | None = place
        while at is not None and at.session == self.session and at.seq in going:
            freed += 1
            gap, known = self._gaps.get(at.seq), self._known[at.seq]
            if gap is not None:
                freed += gap.freed
                at = None if gap.ancestor is None else lineage.place_at(gap.ancestor)
            elif known.record is not None:
                at = known.parent
            else:
                at = None if skip is None else Place(self.session, skip)
            skip = known.record.skip if known.record else None
        return (None if at is None else records.position(*at)), freed

    def _gaps_elsewhere(
        self,
        reader: Reader,
        forks: list[tuple[int, int]],
        below: list[tuple[int, int]],
        going: set[int],
    ) -> Iterator[tuple[int, int, Gap]]:
        """Gaps of other sessions: of those forked from what goes, and of all that reach up here."""
        for seq, session in forks:
            found = reader.checkpoint(session, 1)
            if found is not None and not reader.gaps(session, 1, 1):
                skip = None
                with suppress(*UNREADABLE):
                    skip = records.unseal_checkpoint(session, 1, *found).record.skip
                new = self._new_gap(Place(self.session, seq), going, skip)
                if new is not None:
                    yield session, 1, new
        for session, seq in below:
            gap = lineage.gap_before(reader, Place(session, seq))
            if session != self.session and gap is not None:
                new = self._widened(gap, going)
                if new is not None:
                    yield session, seq, new


def _deletion(reader: Reader, session: int, head: Head) -> tuple[bool, bool]:
    """Whether a session was deleted as a whole, and whether it may go."""
    if not lineage.is_deleted(reader, session):
        return False, False
    for number, body in reader.operations(session, head.operations, head.operations):
        _, created, _, details = records.unseal_operation(session, number, body)
        hold = details.get("hold")
        if hold is not None and not is_due(records.Tomb(number, created, True, *hold)):
            return True, False
    return True, True
