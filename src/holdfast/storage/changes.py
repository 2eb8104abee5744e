"""The batches of the library: for changes of a session, entries of a journal, and gc.

Each class describes one kind of write. Its `batch()` returns the rows to write, and the conditions
under which they may be written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import Corrupt, KeyTaken, SessionExists
from holdfast.format.item_streams import STREAM_BITS
from holdfast.format.records import COPIED, FREED, SEQ_BITS, position, seal_counter
from holdfast.intervals import IntervalSet
from holdfast.storage.contract import (
    Absent,
    Batch,
    Delete,
    DeleteIf,
    DeleteRange,
    Equals,
    Insert,
    MissingReference,
    Present,
    Put,
    Rename,
    Share,
    StaleHead,
    Swap,
    Unchanged,
)
from holdfast.storage.tables import (
    BLOB_VERSIONS,
    CHECKPOINTS,
    COUNTERS,
    FORKS,
    GRAFTS,
    GRAFTS_BY_ANCESTOR,
    HEADS,
    ITEM_SIZES,
    LEASES,
    SESSIONS,
    SESSIONS_BY_NAME,
    TOMBSTONES,
)
from holdfast.storage.tally import Turnover

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.format.item_streams import RowWrite
    from holdfast.format.records import IndexTerm
    from holdfast.storage.contract import Backend, Guard, Write
    from holdfast.storage.rows import (
        Address,
        BlobTrim,
        BlobWrite,
        CheckpointRef,
        CheckpointRow,
        Fork,
        GraftRow,
        GraftWrite,
        ItemsTrim,
        JournalRow,
        KeyRow,
        LeaseRow,
        MarkKey,
        MarkRow,
        NameRow,
        OperationRow,
        TombstoneRow,
    )
    from holdfast.storage.tables import Row


@dataclass(slots=True)
class Change:
    """One atomic write to one session."""

    session: int
    expect: bytes
    """The head row as last read. The change is refused with StaleHead if it is another now."""
    head: bytes
    """The new head row."""
    create: NameRow | None = None
    """The session, if this change creates it. There is no head to expect then."""
    checkpoint: CheckpointRow | None = None
    """The checkpoint to write."""
    rows: Sequence[RowWrite] = ()
    """Rows of items to write."""
    blobs: Sequence[BlobWrite] = ()
    """Blobs to write. One that exists is shared instead, unless it is to be rewritten."""
    notes: Notes | None = None
    """Less frequent parts of the change. Most changes have none."""
    parent: CheckpointRef | None = None
    """The checkpoint that the new one is built on. With `origin`, it is in that session. The id
    matters: if the parent was undone, or a server lost it in a crash, another checkpoint may have
    taken its seq."""

    def batch(self) -> Batch:
        """Return the batch that commits the change."""
        session, notes, parent = self.session, self.notes, None
        if self.parent is not None:
            seq, id = self.parent
            origin = None if notes is None else notes.origin
            parent = (session if origin is None else origin.session) << SEQ_BITS | seq, id
        if self.create is None:
            batch = Batch(Swap(session, self.expect, self.head, StaleHead, parent))
        else:
            batch = self._creation(*self.create)
        if notes is not None:
            if notes.needs and parent is not None:
                key, id = parent[:1], parent[1]
                batch.guards.append(Equals(CHECKPOINTS, key, "id", id, MissingReference))
            notes.add_to(batch, session, self.checkpoint)
        writes = batch.writes
        for digest, body, rewrite in self.blobs:
            writes.append(Share(digest, body, rewrite, MissingReference))
        for stream, first, replaces, body in self.rows:
            pos = stream << STREAM_BITS | first
            if replaces:
                writes.append(DeleteRange("items", pos, pos + replaces))
            writes.append(Insert("items", (pos, body), row_taken))
        if self.checkpoint is not None:
            seq, id, body = self.checkpoint
            writes.append(Insert("checkpoints", (session << SEQ_BITS | seq, id, body), row_taken))
        return batch

    def _creation(self, name: bytes, body: bytes) -> Batch:
        """Return a batch that creates the session."""
        session, notes = self.session, self.notes
        origin = None if notes is None or notes.origin is None else position(*notes.origin)
        new: list[Write] = [
            Insert("sessions", (session, name, origin, body), _name_taken),
            Insert("heads", (session, self.head), _name_taken),
        ]
        return Batch(guards=[Absent(SESSIONS_BY_NAME, (name,), _name_taken)], writes=new)


@dataclass(slots=True)
class Notes:
    """The less frequent parts of a change."""

    origin: Address | None = None
    """With `create`: the checkpoint that the new session is forked from."""
    rename: NameRow | None = None
    """The session's new name and row. SessionExists is raised if the name is taken."""
    key: bytes | None = None
    """External key of the checkpoint. KeyTaken is raised if the session has it already."""
    keys: Sequence[KeyRow] = ()
    """Keys of other checkpoints that are put back into the index."""
    marks: Sequence[MarkRow] = ()
    """Labels and tags to write."""
    removed_marks: Sequence[MarkKey] = ()
    """Labels and tags to remove."""
    operation: OperationRow | None = None
    """Entry of the operation log."""
    tombstones: Sequence[TombstoneRow] = ()
    """Tombstones of deleted checkpoints."""
    undeleted: Sequence[int] = ()
    """seqs of the tombstones to remove, because their deletion is undone."""
    terms: Sequence[IndexTerm] = ()
    """Index terms to write, for searches."""
    removed_terms: Sequence[IndexTerm] = ()
    """Index terms to remove."""
    needs: Sequence[Address] = ()
    """Other checkpoints that this change needs. MissingReference is raised if one does not exist,
    or is deleted and this change does not undelete it."""
    shares: Sequence[bytes] = ()
    """Digests of existing blobs that the change adds a reference to. MissingReference is raised if
    one does not exist."""
    lease: LeaseRow | None = None
    """The session's new lease. Its time starts at this commit."""
    copied: Copied | None = None
    """Rows that are copied from another store."""

    def add_to(self, batch: Batch, session: int, checkpoint: CheckpointRow | None) -> None:
        """Add these parts to the batch of a change of a session."""
        guards, writes = batch.guards, batch.writes
        batch.shared = tuple(sorted({address.session for address in self.needs} - {session}))
        for address in self.needs:
            key = (position(*address),)
            guards.append(Present(CHECKPOINTS, key, MissingReference))
            if address.seq not in self.undeleted:
                guards.append(Absent(TOMBSTONES, key, MissingReference))
        if self.copied is not None:
            guards.append(_unturned(FREED, self.copied.freed))
            writes.append(_turned(COPIED))
        if self.rename is not None:
            name, body = self.rename
            guards.append(Absent(SESSIONS_BY_NAME, (name,), _name_taken))
            writes.append(Rename(session, name, body, _name_taken))
        if self.key is not None and checkpoint is not None:
            writes.append(Insert("keys", (session, self.key, checkpoint.seq), _key_taken))
        writes += [Put("keys", (session, key, seq)) for key, seq in self.keys]
        for seq, kind, value in self.removed_marks:
            writes.append(Delete("marks", (position(session, seq), kind, value)))
        for seq, kind, value, body in self.marks:
            writes.append(Put("marks", (position(session, seq), kind, value, body)))
        if self.operation is not None:
            number, body = self.operation
            writes.append(Insert("operations", (position(session, number), body), row_taken))
        writes += [Put("tombs", (position(session, seq), body)) for seq, body in self.tombstones]
        writes += [Delete("tombs", (position(session, seq),)) for seq in self.undeleted]
        writes += [Delete("facets", term) for term in self.removed_terms]
        writes += [Put("facets", term) for term in self.terms]
        writes += [Share(digest, None, False, MissingReference) for digest in self.shares]
        if self.lease is not None:
            writes.append(Put("leases", (session, *self.lease)))
        if self.copied is not None:
            self.copied.add_to(batch, session)


@dataclass(slots=True)
class Copied:
    """Rows of a session from another store. A Change has one row of each kind, this has many."""

    freed: int
    """`Turnover.freed` when the copy read the store. MissingReference if it has changed."""

    checkpoints: Sequence[CheckpointRow] = ()
    operations: Sequence[OperationRow] = ()
    grafts: Sequence[GraftWrite] = ()
    journal: Sequence[JournalRow] = ()
    """StaleHead is raised if the journal has an entry of one of these numbers already."""
    journal_from: int = 0
    """Entries of the journal below this number are removed: the source has freed them."""

    def add_to(self, batch: Batch, session: int) -> None:
        """Add these rows to the batch of a change of a session."""
        writes = batch.writes
        for seq, id, body in self.checkpoints:
            writes.append(Insert("checkpoints", (position(session, seq), id, body), row_taken))
        for number, body in self.operations:
            writes.append(Put("operations", (position(session, number), body)))
        for other, seq, ancestor, body in self.grafts:
            writes.append(Put("gaps", (position(other, seq), ancestor, body)))
        if self.journal_from:
            low, high = position(session, 0), position(session, self.journal_from)
            writes.append(DeleteRange("journal", low, high))
        for number, body in self.journal:
            writes.append(Insert("journal", (position(session, number), body), StaleHead))


@dataclass(slots=True)
class JournalAppend:
    """Entries to append to a session's journal, all of them or none."""

    session: int
    token: bytes | None
    """The token that the session's lease must have. None for writers that need no lease."""
    first: int
    """The number of the first entry. The journal must end before this number."""
    entries: Sequence[bytes]

    def batch(self) -> Batch:
        """Return the batch that appends the entries."""
        session = self.session
        batch = Batch()
        if self.token is None:
            batch.guards.append(Present(SESSIONS, (session,), StaleHead))
        else:
            batch.guards.append(Equals(LEASES, (session,), "token", self.token, StaleHead))
        for number, body in enumerate(self.entries, self.first):
            batch.writes.append(Insert("journal", (position(session, number), body), StaleHead))
        return batch


@dataclass(slots=True)
class Sweep:
    """The checkpoints of one session that gc removes, all of them or none.

    A sweep is written only if `expect`, `known_grafts`, `forks` and `below` still describe the
    session, because gc has chosen the checkpoints by them.
    """

    session: int
    expect: bytes
    """The head row as last read."""
    known_grafts: Sequence[GraftRow]
    """All grafts of the session."""
    forks: Sequence[Fork]
    """All forks from it."""
    below: Sequence[Row]
    """All grafts whose ancestor is in this session: the positions of ancestor and graft."""
    checkpoints: Sequence[int] = ()
    """The seqs of the checkpoints to remove, each with its tombstone, graft, marks and key."""
    keys: Sequence[bytes] = ()
    """External keys to remove."""
    terms: Sequence[IndexTerm] = ()
    """Index terms to remove."""
    grafts: Sequence[GraftWrite] = ()
    """Grafts to write, in this session and in its forks."""
    journal: int = 0
    """Entries of the journal below this number are removed, too."""
    remove: bytes | None = None
    """The session's name, if the whole session is removed."""

    def batch(self) -> Batch:
        """Return the batch that removes the checkpoints, and writes the grafts over them."""
        session = self.session
        writes: list[Write] = []
        low, high = position(session, 0), position(session + 1, 0)
        for first, end in IntervalSet.of(self.checkpoints).all():
            begin, stop = position(session, first), position(session, end)
            tables = ("checkpoints", "gaps", "tombs", "marks")
            writes += [DeleteRange(table, begin, stop) for table in tables]
        writes += [Delete("keys", (session, key)) for key in self.keys]
        writes += [Delete("facets", term) for term in self.terms]
        for other, seq, ancestor, body in self.grafts:
            writes.append(Put("gaps", (position(other, seq), ancestor, body)))
        if self.journal:
            writes.append(DeleteRange("journal", low, position(session, self.journal)))
        if self.remove is not None:
            writes += [DeleteRange(table, low, high) for table in ("journal", "operations")]
            writes.append(Delete("gaps", (low,)))
            for table in ("sessions", "heads", "leases", "tallies", "spans"):
                writes.append(Delete(table, (session,)))
        others = {graft.session for graft in self.grafts} - {session}
        ancestors = {graft.ancestor for graft in self.grafts if graft.ancestor is not None}
        return Batch(
            sessions=(session, *sorted(others)),
            shared=tuple(sorted({ancestor >> SEQ_BITS for ancestor in ancestors})),
            guards=[*self._guards(low, high), *[_kept(pos) for pos in sorted(ancestors)]],
            writes=writes,
        )

    def _guards(self, low: int, high: int) -> Iterator[Guard]:
        """Yield the guards that the session and its forks are as they were read."""
        grafts = [(low | seq, body) for seq, body in self.known_grafts]
        forks = [(low | seq, number) for seq, number in self.forks]
        yield Equals(HEADS, (self.session,), "body", self.expect, StaleHead)
        yield Unchanged(GRAFTS, low, high, grafts, StaleHead)
        yield Unchanged(FORKS, low + 1, high, forks, StaleHead)
        yield Unchanged(GRAFTS_BY_ANCESTOR, low, high, self.below, StaleHead)


def _kept(pos: int) -> Present:
    """Return the guard that a checkpoint to which a graft points is there."""
    return Present(CHECKPOINTS, (pos,), StaleHead)


@dataclass(slots=True)
class Trim:
    """Unused data to remove, each with its version when gc found that it is unused."""

    items: Sequence[ItemsTrim]
    blobs: Sequence[BlobTrim]
    copied: int
    """`Turnover.copied` when gc read the store. MissingReference if it has changed."""

    def batches(self) -> Iterator[Batch]:
        """Yield a batch for each group of rows, and each blob."""
        for group in self.items:
            batch = Batch()
            for pos, begin in group.remove:
                batch.writes.append(DeleteIf(ITEM_SIZES, (pos,), "begin", begin, StaleHead))
            batch.writes += [Insert("items", row, StaleHead) for row in group.replace]
            yield batch
        for digest, uses in self.blobs:
            yield Batch(writes=[DeleteIf(BLOB_VERSIONS, (digest,), "uses", uses, StaleHead)])


def sweep(backend: Backend, sweeps: Sequence[Sweep]) -> list[bool]:
    """Remove checkpoints of several sessions. Return, for each sweep, whether it was written.

    A sweep that is not current any more is not.
    """
    return backend.commit_all(_gc(), [sweep.batch() for sweep in sweeps])


def trim(backend: Backend, trim: Trim) -> int:
    """Remove unused data that has not changed since. Return the number of removed rows.

    Raises MissingReference, and removes nothing, if a copy may have started to use some of it.
    """
    batches = [*trim.batches()]
    done = backend.commit_all(_gc(trim.copied), batches)
    gone = [batch.writes for batch, was_done in zip(batches, done, strict=True) if was_done]
    return sum([type(write) is DeleteIf for writes in gone for write in writes])


def _gc(copied: int | None = None) -> Batch:
    """Return the batch with which gc begins to free. It is refused after a copy, if asked to."""
    guards = [] if copied is None else [_unturned(COPIED, copied)]
    return Batch(guards=[*guards], writes=[_turned(FREED)])


def _unturned(space: str, number: int) -> Equals:
    """Return the guard that no gc, or no copy, came since `number` was read."""
    body = seal_counter(space, number) if number else None
    return Equals(COUNTERS, (space,), "body", body, MissingReference)


def _turned(space: str) -> Put:
    return Put("counters", (space, seal_counter(space, Turnover.new())))


def replace_counter(space: str, expect: bytes | None, body: bytes) -> Batch:
    """Return the batch that replaces a counter's row. StaleHead is raised if it has changed."""
    guard = Equals(COUNTERS, (space,), "body", expect, StaleHead)
    return Batch(guards=[guard], writes=[Put("counters", (space, body))])


def row_taken() -> Corrupt:
    """Return the error for a new row whose key is taken."""
    return Corrupt("a row that is about to be written exists already")


def _name_taken() -> SessionExists:
    return SessionExists("a session of this name exists already")


def _key_taken() -> KeyTaken:
    return KeyTaken("the key names another checkpoint of this session")
