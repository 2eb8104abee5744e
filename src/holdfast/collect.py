"""gc: free deleted checkpoints, then the data that no checkpoint refers to, then the space.

It runs beside savers. Each step is atomic and leaves a sound store, so a crash between two costs
nothing, and the next run goes on. Nothing is freed that somebody may have come to need since it was
found to be garbage: checkpoints go only if the head's row is unchanged, rows of data only if they
are still what they were, and a save that shares a blob says so in the blob's row.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from holdfast import clock, lineage
from holdfast.backends.base import Sweep, Trim
from holdfast.codec import records
from holdfast.codec.records import AGENT, LABEL, TAG, Gap
from holdfast.errors import UNREADABLE
from holdfast.lineage import Place
from holdfast.live import Live, Spans, all_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.records import Head, Tomb
    from holdfast.model import Record

    Progress = Callable[[str, int, int], None]

DAY = 24 * 60 * 60
_BATCH = 2_000
_PAGE = 1_000
_TRIES = 20
_MOST = 200
"""Sessions that are freed in one write."""


class Collected(NamedTuple):
    """What a run of gc has freed."""

    checkpoints: int = 0
    sessions: int = 0
    rows: int = 0
    held: int = 0
    """Deleted checkpoints that were kept back, for at most a day: see `Retention.max_age`."""


def collect(backend: Backend, progress: Progress | None = None) -> Collected:
    """Everything at once: checkpoints, data, space."""
    tell = progress or (lambda *_: None)
    freed = _Freeing(backend, tell).run()
    rows = sweep_data(backend, tell)
    backend.compact(lambda done, total: tell("space", done, total))
    return freed._replace(rows=rows)


def sweep_data(backend: Backend, tell: Progress = lambda *_: None) -> int:
    """Remove items and blobs that no checkpoint refers to, be it deleted or not."""
    removed = 0
    with backend.reader() as reader:
        live = Live(reader, backend)
        live.mark_all(tell)
        items, blobs = live.dead_items(), iter(list(live.dead_blobs()))
        while True:
            trim = Trim(list(islice(items, _BATCH)), list(islice(blobs, _BATCH)))
            if not trim.items and not trim.blobs:
                return removed
            removed += backend.trim(trim)
            tell("data", removed, live.rows)


def is_due(tomb: Tomb) -> bool:
    """Whether what is buried may be freed."""
    if not tomb.held:
        return True
    boot, uptime = clock.uptime()
    if tomb.boot and tomb.boot == boot:
        return uptime - tomb.uptime >= DAY
    return time.time_ns() // 1000 - tomb.created_us >= DAY * 1_000_000


# -- checkpoints -----------------------------------------------------------------------------------


class _Known(NamedTuple):
    """What freeing has to know of a checkpoint."""

    id: bytes
    parent: Place | None
    hash: bytes
    """Empty if the record is damaged."""
    record: Record | None


class _Freeing:
    """Goes through the sessions, and frees those of several in one write."""

    def __init__(self, backend: Backend, tell: Progress) -> None:
        self._backend, self._tell = backend, tell
        self._checkpoints = self._sessions = self._held = 0
        self._sweeps: list[Sweep] = []
        self._moved: list[int] = []

    def run(self) -> Collected:
        wanted = sorted(self._wanted())
        total = len(wanted)
        for _ in range(_TRIES):
            for n, session in enumerate(wanted):
                self._tell("checkpoints", total - len(wanted) + n, total)
                self._session(session)
            self._flush()
            wanted, self._moved = sorted(set(self._moved)), []  # somebody saved; look again
            if not wanted:
                break
        self._tell("checkpoints", total, total)
        return Collected(self._checkpoints, self._sessions, 0, self._held)

    def _wanted(self) -> set[int]:
        """Sessions with something to free."""
        wanted: set[int] = set()
        with self._backend.reader() as reader:
            after = -1
            while page := reader.buried(after, _PAGE):
                wanted.update(pos >> records.SEQ_BITS for pos, _ in page)
                after = page[-1][0]
            name = records.deleted_name(0, b"")
            while rows := reader.sessions(name, _PAGE):
                wanted.update(n for n, raw, _ in rows if records.former_name(n, raw) is not None)
                name = rows[-1][1]
        return wanted

    def _session(self, session: int) -> None:
        with self._backend.reader() as reader:
            if reader.head(session) is None:
                return
            tree = _Tree(reader, session)
            if not tree.due and tree.remove is None:
                self._held += tree.held
                return
            self._sweeps.append(tree.sweep(reader))
        while tree.due:  # more than one write should free
            if not self._flush():
                return
            with self._backend.reader() as reader:
                self._sweeps.append(tree.sweep(reader))
        self._held += tree.held
        if sum([len(s.checkpoints) for s in self._sweeps]) >= _BATCH or len(self._sweeps) >= _MOST:
            self._flush()

    def _flush(self) -> bool:
        """Write; False if something has to be looked at again."""
        sweeps, self._sweeps = self._sweeps, []
        if not sweeps:
            return True
        done = self._backend.sweep(sweeps)
        for sweep, was_done in zip(sweeps, done, strict=True):
            if was_done:
                self._checkpoints += len(sweep.checkpoints)
                self._sessions += sweep.remove is not None
            else:
                self._moved.append(sweep.session)
        return all(done)


class _Tree:
    """The checkpoints of a session, and what becomes of them."""

    def __init__(self, reader: Reader, session: int) -> None:
        self.session = session
        self._row, self._head = lineage.read_head(reader, session)
        self._known: dict[int, _Known] = {}
        self._agents: set[str] = set()
        for seq, id, body in all_rows(reader, session):
            try:
                record = records.unseal_checkpoint(session, seq, id, body).record
                if "agent" in record.extra:
                    self._agents.add(record.extra["agent"])
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
        for low, high in lineage.freed(reader, session):
            self._freed.add(low, high)
        tombs = {
            seq: records.unseal_tomb(session, seq, row)
            for seq, row in reader.tombs(session, 0, records.MAX_SEQ)
        }
        deleted, remove = _deletion(reader, session, self._head)
        if remove:
            # The head first: without it the deletion is final, and cannot be undone half-way.
            self.due = sorted(self._known, key=lambda seq: (seq != self._head.seq, seq))
            self.held = 0
        else:
            self.due = sorted(seq for seq in tombs if is_due(tombs[seq]) and seq in self._known)
            self.held = len(self._known) if deleted else len(tombs) - len(self.due)
            remove = not self._head.seq and len(self.due) == len(self._known)
        found = reader.session_by_number(session)
        self.remove = found[0] if found and remove else None

    def sweep(self, reader: Reader) -> Sweep:
        """Free the next of those that are due; whoever came after them learns what was there."""
        session = self.session
        batch, self.due = self.due[:_BATCH], self.due[_BATCH:]
        going = set(batch)
        forks = reader.forks(session, 1, records.MAX_SEQ)
        below = reader.gaps_below(session)
        gaps = [*self._gaps_here(going), *self._gaps_elsewhere(reader, forks, below, going)]
        keys, facets = self._entries(reader, batch)
        known_gaps = sorted(self._gap_rows.items())
        for seq in batch:
            self._freed.add(seq, seq + 1)
            self._gaps.pop(seq, None)
            self._gap_rows.pop(seq, None)
        rows = [(s, q, gap.ancestor, records.seal_gap(s, q, gap)) for s, q, gap in gaps]
        if batch:
            rows.append((session, 0, None, records.seal_freed(session, self._freed.all())))
        self._gap_rows.update({q: row for s, q, _, row in rows if s == session})
        last = self.remove is not None and not self.due
        if last:
            number = session.to_bytes(8, "big")
            facets += [(AGENT, records.encode_name(agent), number) for agent in self._agents]
        freed = [(seq, self._known.pop(seq).id) for seq in batch]
        return Sweep(
            session, self._row, known_gaps, forks, below,
            freed, keys, facets, rows, self.remove if last else None,
        )  # fmt: skip

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
        for seq, kind, value, _ in reader.marks(self.session, min(batch), max(batch)):
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
