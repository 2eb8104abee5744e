"""Garbage collection: free deleted checkpoints, and the data that no checkpoint refers to.

A checkpoint that loses its parent gets a graft: a pointer to its nearest remaining ancestor.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from holdfast import clock
from holdfast.errors import UNREADABLE, Unavailable
from holdfast.format import records, values
from holdfast.format.records import LABEL, TAG, Graft, IndexTerm
from holdfast.history import journal, lineage, search_index
from holdfast.history.leases import LeaseRecord
from holdfast.history.lineage import all_rows
from holdfast.history.notes import FIRST_NOTE, UNCLAIMED, unclaimed
from holdfast.intervals import IntervalSet
from holdfast.log import logger
from holdfast.maintenance.reachability import Reachable
from holdfast.storage import changes
from holdfast.storage.changes import JournalAppend, Sweep, Trim
from holdfast.storage.contract import MissingReference, StaleHead
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import PAGE, Address, GraftRow, GraftWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.format.records import Head, Tombstone
    from holdfast.model import Record
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import Fork
    from holdfast.storage.tables import Row

    GcProgress = Callable[[str, int, int], None]


DAY = 24 * 60 * 60
BATCH = 2_000
"""The most checkpoints that are freed in one write."""


def is_due(tombstone: Tombstone) -> bool:
    """Return whether a deleted checkpoint may be freed.

    A held one, which was deleted by its age, waits for a day. The day is measured by the machine's
    uptime if the machine was not restarted since, else by the wall clock.
    """
    if not tombstone.held:
        return True
    boot, uptime = clock.uptime()
    if tombstone.boot and tombstone.boot == boot:
        return uptime - tombstone.uptime >= DAY
    return time.time_ns() // 1000 - tombstone.created_us >= DAY * 1_000_000


def _may_go(session: int, seq: int, row: bytes, *, erase: bool) -> bool:
    try:
        tombstone = records.unseal_tombstone(session, seq, row)
        return erase or is_due(tombstone)
    except UNREADABLE:
        return False  # verify() reports the damage


class _Known(NamedTuple):
    """The parts of a checkpoint that gc needs."""

    id: bytes
    parent: Address | None
    hash: bytes
    """The hash of the record; empty if the record is damaged."""
    record: Record | None


class FreePlanner:
    """Selects the checkpoints of a session to free, and computes the grafts of their descendants.

    `due` has the seqs still to be freed, `held` is the number of deleted checkpoints that are kept
    for now, and `remove` is the session's name if the whole session is freed. With `erase`, held
    checkpoints are freed as well. Raises Corrupt or UnsupportedFormat if the head, a graft or the
    list of freed checkpoints cannot be read.
    """

    def __init__(
        self, reader: Reader, session: int, *, erase: bool = False, batch: int = BATCH
    ) -> None:
        self.session, self._batch = session, batch
        self._row, self._head = lineage.read_head(reader, session)
        self._known = dict(self._checkpoints(reader))
        self._graft_rows = dict(reader.grafts(session, 0, records.MAX_SEQ))
        """Rows of the grafts as stored. The row of seq 0 lists the freed checkpoints."""
        self._grafts = {
            seq: records.unseal_graft(session, seq, row)
            for seq, row in self._graft_rows.items()
            if seq
        }
        self._freed = IntervalSet(
            records.unseal_freed(session, self._graft_rows[0]) if 0 in self._graft_rows else ()
        )
        found = reader.session_by_number(session)
        deleted = found is not None and found.is_deleted
        self.due, self.held, remove = self._select(reader, deleted=deleted, erase=erase)
        self.remove = found.name if found and remove else None
        self._terms: set[IndexTerm] = set()
        """The index terms of the session, if it is removed."""

    def _checkpoints(self, reader: Reader) -> Iterator[tuple[int, _Known]]:
        """Yield the checkpoints of the session by seq."""
        session = self.session
        for row in all_rows(reader, session):
            try:
                record = records.unseal_checkpoint(session, *row).record
                parent = lineage.parent_of(reader, Address(session, row.seq), record)
                yield row.seq, _Known(row.id, parent, record.hash, record)
            except UNREADABLE:
                yield row.seq, _Known(row.id, None, b"", None)

    def _select(self, reader: Reader, *, deleted: bool, erase: bool) -> tuple[list[int], int, bool]:
        """Return the initial `due` and `held`, and whether the whole session is freed."""
        head = self._head.seq
        tombstones = reader.tombstones(self.session, 0, records.MAX_SEQ)
        if deleted and (erase or _is_deletion_due(reader, self.session, self._head)):
            # Free the head first. Without it the deletion cannot be undone. So an undo never
            # restores a session that has lost some of its checkpoints.
            return sorted(self._known, key=lambda seq: (seq != head, seq)), 0, True
        chosen = {seq for seq, row in tombstones if _may_go(self.session, seq, row, erase=erase)}
        due = sorted(chosen & self._known.keys() - {head})
        held = len(self._known) if deleted else len(tombstones) - len(due)
        return due, held, not head and len(due) == len(self._known)

    def give_up(self, missing: list[int]) -> None:
        """Count the checkpoints whose records are `missing` as freed, and free nothing else."""
        self._known |= {seq: _Known(b"", None, b"", None) for seq in missing}
        self.due, self.remove = missing, None

    def sweep(self, reader: Reader) -> Sweep:
        """Return the write that frees the next checkpoints that are due, at most `batch`.

        It includes the grafts of their descendants. The backend applies it only if the head, the
        grafts and the forks are still as they were read.
        """
        session = self.session
        batch, self.due = self.due[: self._batch], self.due[self._batch :]
        going = set(batch)
        forks = reader.forks(session, 1, records.MAX_SEQ)
        below = reader.graft_ancestors(session)
        grafts = [*self._grafts_here(going), *self._grafts_elsewhere(reader, forks, below, going)]
        keys, terms = self._entries(reader, batch)
        known_grafts = [GraftRow(*row) for row in sorted(self._graft_rows.items())]
        self._freed.update(IntervalSet.of(batch))
        for seq in batch:
            self._grafts.pop(seq, None)
            self._graft_rows.pop(seq, None)
        rows = [
            GraftWrite(s, q, graft.ancestor, records.seal_graft(s, q, graft))
            for s, q, graft in grafts
        ]
        if batch:
            freed_list = records.seal_freed(session, self._freed.all())
            rows.append(GraftWrite(session, 0, None, freed_list))
        self._graft_rows.update({row.seq: row.body for row in rows if row.session == session})
        last = self.remove is not None and not self.due
        journal_from = 0 if self.due or last else self._journal_from(reader, going)
        if last:
            terms += sorted(self._terms)
        for seq in batch:
            del self._known[seq]
        return Sweep(
            session, self._row, known_grafts, forks, below,
            batch, keys, terms, rows, journal_from, self.remove if last else None,
        )  # fmt: skip

    def empty_entry(self, reader: Reader) -> JournalAppend | None:
        """Return an append of an empty entry to the journal; None if there is no use for one.

        gc always keeps the last entry, because its number must not be used again. If no entry is
        needed for its contents, an empty one at the end allows gc to free all entries before it.
        """
        session, last = self.session, reader.last_entry(self.session)
        if not last or self.remove is not None or self._needed(reader, {*self.due}) != []:
            return None
        empty = values.encode(journal.ended(0, "skipped", 0))
        if reader.journal(session, last, 1) == [(last, records.seal_entry(session, last, empty))]:
            return None
        return JournalAppend(
            session, None, last + 1, [records.seal_entry(session, last + 1, empty)]
        )

    def _journal_from(self, reader: Reader, going: set[int]) -> int:
        """Return the number below which all entries of the journal can be freed; 0 frees none.

        The last entry stays, so that no number is used twice. Copies and notes rely on that.
        """
        last = reader.last_entry(self.session)
        needed = self._needed(reader, going) if last else None
        return 0 if needed is None else min([*needed, last])

    def _needed(self, reader: Reader, going: set[int]) -> list[int] | None:
        """Return the numbers of the journal's entries that must stay; None if that is unknown.

        These entries stay:
        - calls without a known outcome
        - calls of a run from the first turn that still has a checkpoint
        - calls of an open run from the turn in which it would resume, and those outside of turns
        - notes of a checkpoint that stays, or that may still be saved
        """
        turns: dict[str, int] = {}
        kept: list[int] = []
        keys: set[str | None] = set()
        for seq, known in self._known.items():
            if known.record is None:
                return None
            keys.add(known.record.extra.get("key"))
            run, turn, _ = known.record.extra.get("run", ("", 0, None))
            if seq not in going:
                turns[run] = min(turn, turns.get(run, turn))
                noted = known.record.extra.get("meta", {}).get(FIRST_NOTE)
                if type(noted) is int:
                    kept.append(noted)
        try:
            lease = reader.lease(self.session)
            held = None if lease is None else LeaseRecord.read(lease)
            opened = held.run if held is not None and held.open else None
            if opened is not None:
                turn = self._resume_turn(opened)
                turns[opened] = min(turn, turns.get(opened, turn))
            calls, newest = journal.Calls(), deque[journal.Entry](maxlen=UNCLAIMED)
            for entry in journal.read(reader, self.session):
                calls.apply(*entry)
                newest.append(entry)
        except UNREADABLE:
            return None
        kept += unclaimed(newest, keys)
        kept += [
            call.number
            for call in calls.all.values()
            if call.status == "started"
            or (call.run in turns and call.turn >= turns[call.run])
            or (call.run == opened and not call.turn)
        ]
        return kept

    def _resume_turn(self, run: str) -> int:
        """Return the turn in which an open run would resume; 0 if that is unknown."""
        mark = self._mark(self._head.seq, run)
        if mark is None:
            return 0
        _, turn, base = mark
        if base is not None:
            found = self._mark(base, run)
            return 0 if found is None else found[1] + 1
        return turn + 1

    def _mark(self, seq: int, run: str) -> tuple[str, int, int | None] | None:
        """Return the run, turn and base of a checkpoint; None if it was not saved by this run."""
        record = self._known[seq].record if seq in self._known else None
        mark = None if record is None else record.extra.get("run")
        return (mark[0], mark[1], mark[2]) if mark is not None and mark[0] == run else None

    def _entries(self, reader: Reader, batch: list[int]) -> tuple[list[bytes], list[IndexTerm]]:
        """Return the keys and the index terms to delete together with the checkpoints."""
        keys: list[bytes] = []
        terms: list[IndexTerm] = []
        for seq in batch:
            id, _, _, record = self._known[seq]
            if record is not None:
                terms += records.index_terms(id, record.extra)
                if self.remove is not None:
                    self._terms.update(records.session_terms(self.session, record.extra))
                if "key" in record.extra:
                    keys.append(records.encode_name(record.extra["key"]))
        low, high = min(batch, default=0), max(batch, default=0)
        for seq, kind, value, _ in reader.marks(self.session, low, high):
            if kind in (LABEL, TAG) and seq in self._known:
                terms.append(IndexTerm(kind, value, self._known[seq].id))
        chosen = {self._known[seq].id for seq in batch}
        return keys, [term for term in terms if term.id in chosen]

    def _grafts_here(self, going: set[int]) -> Iterator[tuple[int, int, Graft]]:
        """Yield the new and changed grafts of this session, as (session, seq, graft)."""
        for seq, known in self._known.items():
            if seq in going:
                continue
            graft = self._grafts.get(seq)
            if graft is not None:
                new = self._widened(graft, going)
            else:
                skip = known.record.skip if known.record else None
                new = self._new_graft(known.parent, going, skip)
            if new is not None:
                self._grafts[seq] = new
                yield self.session, seq, new

    def _new_graft(self, parent: Address | None, going: set[int], skip: int | None) -> Graft | None:
        """Return the graft of a child of `parent`; None if the parent stays."""
        if parent is None or parent.session != self.session or parent.seq not in going:
            return None
        ancestor, freed = self._climb(parent, going, skip)
        return Graft(ancestor, freed, self._known[parent.seq].hash)

    def _widened(self, graft: Graft, going: set[int]) -> Graft | None:
        """Return a graft extended past its ancestor; None if the ancestor stays."""
        if graft.ancestor is None:
            return None
        place = lineage.address_at(graft.ancestor)
        if place.session != self.session or place.seq not in going:
            return None
        ancestor, freed = self._climb(place, going)
        return Graft(ancestor, graft.freed + freed, graft.parent_hash)

    def _climb(
        self, place: Address, going: set[int], skip: int | None = None
    ) -> tuple[int | None, int]:
        """Return the position of the nearest ancestor that stays, and how many are freed before it.

        The position is None if no ancestor stays. `skip` is the seq of the parent of `place`, as
        recorded by its child; it is used if the record of `place` is damaged.
        """
        freed = 0
        at: Address | None = place
        while at is not None and at.session == self.session and at.seq in going:
            freed += 1
            graft, known = self._grafts.get(at.seq), self._known[at.seq]
            if graft is not None:
                freed += graft.freed
                at = None if graft.ancestor is None else lineage.address_at(graft.ancestor)
            elif known.record is not None:
                at = known.parent
            else:
                at = None if skip is None else Address(self.session, skip)
            skip = known.record.skip if known.record else None
        return (None if at is None else records.position(*at)), freed

    def _grafts_elsewhere(
        self, reader: Reader, forks: list[Fork], below: list[Row], going: set[int]
    ) -> Iterator[tuple[int, int, Graft]]:
        """Yield the new and changed grafts of other sessions.

        These are sessions forked from a checkpoint that is freed, and grafts that point to one.
        """
        for seq, session in forks:
            found = reader.checkpoint(session, 1)
            if found is not None and not reader.grafts(session, 1, 1):
                skip = None
                with suppress(*UNREADABLE):
                    skip = records.unseal_checkpoint(session, *found).record.skip
                new = self._new_graft(Address(self.session, seq), going, skip)
                if new is not None:
                    yield session, 1, new
        for address in sorted([lineage.address_at(pos) for _, pos in below]):
            graft = lineage.graft_before(reader, address)
            if address.session != self.session and graft is not None:
                new = self._widened(graft, going)
                if new is not None:
                    yield *address, new


def _is_deletion_due(reader: Reader, session: int, head: Head) -> bool:
    """Return whether a session that was deleted as a whole may be freed."""
    for number, body in reader.operations(session, head.operations, head.operations):
        _, created, _, details = records.unseal_operation(session, number, body)
        hold = details.get("hold")
        if hold is not None and not is_due(records.Tombstone(number, created, True, *hold)):
            return False
    return True


_TRIM_BATCH = 2_000
"""The most rows of items, and of blobs, that are deleted in one write."""
_TRIES = 20
_MAX_SESSIONS = 200
"""The most sessions that one write frees checkpoints of."""


class GcResult(NamedTuple):
    """The numbers of checkpoints, sessions and rows of data that a run of gc has freed."""

    checkpoints: int = 0
    """Number of checkpoints that were freed."""
    sessions: int = 0
    """Number of deleted sessions that were freed."""
    rows: int = 0
    """Number of rows of data that were freed."""
    held: int = 0
    """Deleted checkpoints that gc holds back, for at most a day: see `Retention.max_age`."""
    blocked: bool = False
    """Whether gc could not remove everything: others used the store, or a session is unreadable.

    The next gc removes the rest.
    """


def collect(
    backend: Backend, progress: GcProgress | None = None, *, erase: bool = False
) -> GcResult:
    """Free deleted checkpoints, delete the data that is no longer needed, and compact the storage.

    With `erase`, checkpoints deleted by their age are freed without waiting, and no deleted item
    stays in a row that is kept. Raises Corrupt if damage makes it unknown which data is needed; no
    data is deleted then. After a crash the next gc does the rest.
    """
    tell = progress or (lambda *_: None)
    freed = _Freeing(backend, tell, erase=erase).run()
    rows, swept = sweep_data(backend, tell, erase=erase)
    forgotten = search_index.forget(backend)
    done = backend.compact(lambda done, total: tell("space", done, total), erase=erase)
    return freed._replace(rows=rows, blocked=freed.blocked or not (swept and done and forgotten))


def sweep_data(
    backend: Backend, tell: GcProgress = lambda *_: None, *, erase: bool = False
) -> tuple[int, bool]:
    """Delete items and blobs that no checkpoint refers to.

    Return the number of deleted rows, and whether that was all. Deleted checkpoints that are not
    freed yet count as well, because their deletion can be undone. Raises Corrupt if damage makes it
    unknown which data is needed.
    """
    removed = 0
    for _ in range(_TRIES):
        # MissingReference: a copy has arrived, and may need data that seemed to be garbage.
        with suppress(MissingReference):
            for count, rows in _trimmed(backend, tell, erase=erase):
                removed += count
                tell("data", removed, rows)
            return removed, True
    logger.info("the next gc frees the data: copies to this store are still running")
    return removed, False


def _trimmed(backend: Backend, tell: GcProgress, *, erase: bool) -> Iterator[tuple[int, int]]:
    """Delete garbage in batches. Yield the deleted rows of each, and the item rows at the start."""
    with open_reader(backend) as reader:
        copied = reader.turnover().copied
        live = Reachable(reader, backend, erase=erase)
        live.mark_all(tell)
        items, blobs = live.dead_items(), iter(list(live.dead_blobs()))
        while True:
            trim = Trim(list(islice(items, _TRIM_BATCH)), list(islice(blobs, _TRIM_BATCH)), copied)
            if not trim.items and not trim.blobs:
                return
            yield _trim(backend, trim), live.rows


def _trim(backend: Backend, trim: Trim) -> int:
    """Delete rows; return how many. If that fails, as on a full disk, retry with half of them.

    Raises Unavailable if even a single row cannot be deleted.
    """
    items, blobs = trim.items, trim.blobs
    try:
        return changes.trim(backend, trim)
    except Unavailable:
        if len(items) + len(blobs) == 1:
            raise
        some, few = (len(items) + 1) // 2, len(blobs) // 2
        first, rest = (
            Trim(items[:some], blobs[:few], trim.copied),
            Trim(items[some:], blobs[few:], trim.copied),
        )
        return _trim(backend, first) + _trim(backend, rest)


class _Freeing:
    """Frees the deleted checkpoints of all sessions, several sessions in one write."""

    def __init__(self, backend: Backend, tell: GcProgress, *, erase: bool) -> None:
        self._backend, self._tell, self._erase = backend, tell, erase
        self._checkpoints = self._sessions = 0
        self._held: dict[int, int] = {}  # by session, because a session may be read again
        self._sweeps: list[Sweep] = []
        self._batch = BATCH
        self._moved: list[int] = []
        self._skipped = False
        """Whether a session could not be read, so that nothing of it is freed."""

    def run(self) -> GcResult:
        wanted = sorted(self._wanted())
        total = len(wanted)
        for _ in range(_TRIES):
            for n, session in enumerate(wanted):
                self._tell("checkpoints", total - len(wanted) + n, total)
                self._session(session)
            self._flush()
            wanted, self._moved = sorted(set(self._moved)), []  # changed since; read them again
            if not wanted:
                break
        self._tell("checkpoints", total, total)
        blocked = self._skipped or bool(wanted)
        return GcResult(self._checkpoints, self._sessions, 0, sum(self._held.values()), blocked)

    def _wanted(self) -> set[int]:
        """Return the sessions that are deleted, or that have deleted checkpoints."""
        wanted: set[int] = set()
        with open_reader(self._backend) as reader:
            after = -1
            while page := reader.all_tombstones(after, PAGE):
                wanted.update(row.position >> records.SEQ_BITS for row in page)
                after = page[-1].position
            wanted.update(row.number for row in lineage.deleted_sessions(reader))
        return wanted

    def _session(self, session: int) -> None:
        """Plan the writes for one session, and flush them when there are enough for one write.

        A session that cannot be read is logged and skipped.
        """
        with open_reader(self._backend) as reader:
            if reader.session_by_number(session) is None:
                return
            try:
                planner = FreePlanner(reader, session, erase=self._erase, batch=self._batch)
            except UNREADABLE as e:
                logger.warning("nothing of session %d is freed: %s", session, e.message)
                self._skipped = True
                return
            if not planner.due and planner.remove is None:
                self._held[session] = planner.held
                return
            entry = planner.empty_entry(reader) if self._erase else None
            if entry is None:
                self._sweeps.append(planner.sweep(reader))
        if entry is not None:
            with suppress(StaleHead):  # another process has added an entry
                self._backend.commit(entry.batch())
            self._moved.append(session)
            return
        while planner.due:  # too many for one write
            self._flush()
            if session in self._moved:
                return
            with open_reader(self._backend) as reader:
                self._sweeps.append(planner.sweep(reader))
        self._held[session] = planner.held
        count = sum([len(s.checkpoints) for s in self._sweeps])
        if count >= self._batch or len(self._sweeps) >= _MAX_SESSIONS:
            self._flush()

    def _flush(self) -> None:
        """Write the planned sweeps. Sessions that have changed are planned again later.

        On a full disk, later writes are 20 times smaller. Raises Unavailable if even a write of one
        checkpoint fails.
        """
        sweeps, self._sweeps = self._sweeps, []
        if not sweeps:
            return
        try:
            done = changes.sweep(self._backend, sweeps)
        except Unavailable:
            if self._batch == 1:
                raise
            # A full disk may have room for a smaller write.
            self._batch = max(1, self._batch // 20)
            done = [False] * len(sweeps)
        for sweep, was_done in zip(sweeps, done, strict=True):
            if was_done:
                self._checkpoints += len(sweep.checkpoints)
                self._sessions += sweep.remove is not None
            else:
                self._moved.append(sweep.session)
