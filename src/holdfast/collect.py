"""gc: free deleted checkpoints, then the data that no checkpoint refers to, then the space.

It runs beside savers. Each step is atomic and leaves a sound store, so a crash between two costs
nothing, and the next run goes on. Nothing is freed that somebody may have come to need since it was
found to be garbage: checkpoints go only if the head's row is unchanged, rows of data only if they
are still what they were, and a save that shares a blob says so in the blob's row.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from holdfast import clock, lineage
from holdfast.backends.base import Moved, Sweep, Trim
from holdfast.codec import records
from holdfast.codec.records import AGENT, LABEL, TAG, Gap
from holdfast.errors import UNREADABLE
from holdfast.lineage import Place
from holdfast.live import Live, all_rows

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
    with backend.reader() as reader:
        live = Live(reader, backend)
        live.mark_all(tell)
        items = list(live.dead_items())
        blobs = list(live.dead_blobs())
    removed = 0
    for n in range(0, max(len(items), len(blobs)), _BATCH):
        tell("data", n, max(len(items), len(blobs)))
        removed += backend.trim(Trim(items[n : n + _BATCH], blobs[n : n + _BATCH]))
    return removed


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
    def __init__(self, backend: Backend, tell: Progress) -> None:
        self._backend, self._tell = backend, tell
        self._checkpoints = self._sessions = self._held = 0

    def run(self) -> Collected:
        sessions = sorted(self._wanted())
        for n, session in enumerate(sessions):
            self._tell("checkpoints", n, len(sessions))
            for _ in range(_TRIES):
                try:
                    self._session(session)
                    break
                except Moved:
                    continue  # somebody saved; look again
        self._tell("checkpoints", len(sessions), len(sessions))
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
        self._held += tree.held
        while tree.due:
            batch, tree.due = tree.due[:_BATCH], tree.due[_BATCH:]
            with self._backend.reader() as reader:
                sweep = tree.sweep(reader, batch)
            self._backend.sweep(sweep)
            self._checkpoints += len(batch)
        if tree.remove is not None:
            number = session.to_bytes(8, "big")
            facets = [(AGENT, records.encode_name(agent), number) for agent in tree.agents]
            self._backend.sweep(tree.removal(facets))
            self._sessions += 1


class _Tree:
    """The checkpoints of a session, and what becomes of them."""

    def __init__(self, reader: Reader, session: int) -> None:
        self.session = session
        self.row, self.head = lineage.read_head(reader, session)
        self._freed_row = [body for _, body in reader.gaps(session, 0, 0)]
        self._freed = lineage.freed(reader, session)
        self._known: dict[int, _Known] = {}
        self.agents: set[str] = set()
        for seq, id, body in all_rows(reader, session):
            try:
                record = records.unseal_checkpoint(session, seq, id, body).record
                if "agent" in record.extra:
                    self.agents.add(record.extra["agent"])
                parent = lineage.parent_of(reader, Place(session, seq), record)
                self._known[seq] = _Known(id, parent, record.hash, record)
            except UNREADABLE:
                self._known[seq] = _Known(id, None, b"", None)
        self._gaps = {
            seq: records.unseal_gap(session, seq, body)
            for seq, body in reader.gaps(session, 1, records.MAX_SEQ)
        }
        tombs = {
            seq: records.unseal_tomb(session, seq, body)
            for seq, body in reader.tombs(session, 0, records.MAX_SEQ)
        }
        self.remove = _to_remove(reader, session, self.head)
        if self.remove is not None:
            # The head first: without it the deletion is final, and cannot be undone half-way.
            self.due = sorted(self._known, key=lambda seq: (seq != self.head.seq, seq))
        else:
            self.due = sorted(seq for seq in tombs if is_due(tombs[seq]) and seq in self._known)
        self.held = 0 if self.remove else len(tombs) - len(self.due)
        if self.remove is None and lineage.is_deleted(reader, session):
            self.held = len(self._known)

    def sweep(self, reader: Reader, batch: list[int]) -> Sweep:
        """Free these; whoever came after them learns what was there."""
        session = self.session
        going = set(batch)
        gaps: list[tuple[int, int, Gap]] = []
        for seq, known in self._known.items():
            if seq in going:
                continue
            gap = self._gaps.get(seq)
            new = self._widened(gap, going) if gap else self._new_gap(known.parent, going)
            if new is not None:
                self._gaps[seq] = new
                gaps.append((session, seq, new))
        forks = reader.forks(session, 1, records.MAX_SEQ)
        gaps += self._gaps_elsewhere(reader, forks, going)
        keys, facets = self._entries(reader, batch)
        self._freed = _runs([*_flat(self._freed), *batch])
        before, self._freed_row = self._freed_row, [records.seal_freed(session, self._freed)]
        rows = [(s, q, gap.ancestor, records.seal_gap(s, q, gap)) for s, q, gap in gaps]
        rows.append((session, 0, None, self._freed_row[0]))
        sweep = Sweep(
            session,
            self.row,
            [(seq, self._known[seq].id) for seq in batch],
            keys=keys,
            facets=facets,
            gaps=rows,
            freed=before,
            forks=forks,
        )
        for seq in batch:
            del self._known[seq]
            self._gaps.pop(seq, None)
        return sweep

    def removal(self, facets: list[tuple[int, bytes, bytes]]) -> Sweep:
        """The session itself, when it is empty."""
        freed = self._freed_row
        return Sweep(self.session, self.row, (), facets=facets, freed=freed, remove=self.remove)

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

    def _new_gap(self, parent: Place | None, going: set[int]) -> Gap | None:
        """The gap before a child of something that goes; None if its parent stays."""
        if parent is None or parent.session != self.session or parent.seq not in going:
            return None
        ancestor, freed = self._climb(parent, going)
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

    def _climb(self, place: Place, going: set[int]) -> tuple[int | None, int]:
        """From one that goes to the nearest ancestor that stays, and how many go on the way."""
        freed = 0
        at: Place | None = place
        while at is not None and at.session == self.session and at.seq in going:
            freed += 1
            gap = self._gaps.get(at.seq)
            if gap is not None:
                freed += gap.freed
                at = None if gap.ancestor is None else lineage.place_at(gap.ancestor)
            else:
                at = self._known[at.seq].parent
        return (None if at is None else records.position(*at)), freed

    def _gaps_elsewhere(
        self, reader: Reader, forks: list[tuple[int, int]], going: set[int]
    ) -> Iterator[tuple[int, int, Gap]]:
        """Gaps of other sessions: of those forked from what goes, and of all that reach up here."""
        for seq, session in forks:
            if not reader.gaps(session, 1, 1) and reader.checkpoint(session, 1) is not None:
                new = self._new_gap(Place(self.session, seq), going)
                if new is not None:
                    yield session, 1, new
        for session, seq in reader.gaps_below(self.session):
            gap = lineage.gap_before(reader, Place(session, seq))
            if session != self.session and gap is not None:
                new = self._widened(gap, going)
                if new is not None:
                    yield session, seq, new


def _to_remove(reader: Reader, session: int, head: Head) -> bytes | None:
    """The name of a session that was deleted as a whole and may go."""
    found = reader.session_by_number(session)
    if found is None or records.former_name(session, found[0]) is None:
        return None
    for number, body in reader.operations(session, head.operations, head.operations):
        _, created, _, details = records.unseal_operation(session, number, body)
        hold = details.get("hold")
        if hold is not None and not is_due(records.Tomb(number, created, True, *hold)):
            return None
    return found[0]


def _flat(runs: list[tuple[int, int]]) -> Iterator[int]:
    for low, high in runs:
        yield from range(low, high)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Numbers as runs [low, high)."""
    out: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if out and out[-1][1] == n:
            out[-1] = (out[-1][0], n + 1)
        else:
            out.append((n, n + 1))
    return out
