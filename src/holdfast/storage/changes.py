"""Changes of sessions, as batches of writes to the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import Corrupt, KeyTaken, SessionExists
from holdfast.format.item_streams import STREAM_BITS
from holdfast.format.records import COPIED, FREED, SEQ_BITS, position, seal_counter
from holdfast.intervals import IntervalSet
from holdfast.storage.batch import (
    Absent,
    Batch,
    Delete,
    DeleteIf,
    DeleteRange,
    Equals,
    Insert,
    Present,
    Put,
    Rename,
    Share,
    Swap,
)
from holdfast.storage.contract import MissingReference, StaleHead
from holdfast.storage.tables import (
    BLOB_VERSIONS,
    CHECKPOINTS,
    COUNTERS,
    ITEM_SIZES,
    LEASES,
    SESSIONS,
    SESSIONS_BY_NAME,
    TOMBSTONES,
)
from holdfast.storage.tally import Turnover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.batch import Write
    from holdfast.storage.contract import Change, Copied, JournalAppend, Notes, Sweep, Trim
    from holdfast.storage.rows import CheckpointRow


def _name_taken() -> SessionExists:
    return SessionExists("a session of this name exists already")


def _key_taken() -> KeyTaken:
    return KeyTaken("the key names another checkpoint of this session")


def _row_taken() -> Corrupt:
    return Corrupt("a row that is about to be written exists already")


def of_change(change: Change) -> Batch:
    """Return the batch that commits a change of a session."""
    session, notes, parent = change.session, change.notes, None
    if change.parent is not None:
        seq, id = change.parent
        origin = None if notes is None else notes.origin
        parent = (session if origin is None else origin.session) << SEQ_BITS | seq, id
    if change.create is None:
        batch = Batch(Swap(session, change.expect, change.head, StaleHead, parent))
    else:
        batch = _creation(change, *change.create)
    if notes is not None:
        if notes.needs and parent is not None:
            batch.guards.append(Equals(CHECKPOINTS, parent[:1], "id", parent[1], MissingReference))
        _add_notes(batch, session, notes, change.checkpoint)
    writes = batch.writes
    for digest, body, rewrite in change.blobs:
        writes.append(Share(digest, body, rewrite, MissingReference))
    for stream, first, replaces, body in change.rows:
        pos = stream << STREAM_BITS | first
        if replaces:
            writes.append(DeleteRange("items", pos, pos + replaces))
        writes.append(Insert("items", (pos, body), _row_taken))
    if change.checkpoint is not None:
        seq, id, body = change.checkpoint
        writes.append(Insert("checkpoints", (session << SEQ_BITS | seq, id, body), _row_taken))
    return batch


def _creation(change: Change, name: bytes, body: bytes) -> Batch:
    """Return a batch that creates the session of a change."""
    session, notes = change.session, change.notes
    origin = None if notes is None or notes.origin is None else position(*notes.origin)
    new: list[Write] = [
        Insert("sessions", (session, name, origin, body), _name_taken),
        Insert("heads", (session, change.head), _name_taken),
    ]
    return Batch(guards=[Absent(SESSIONS_BY_NAME, (name,), _name_taken)], writes=new)


def _add_notes(batch: Batch, session: int, notes: Notes, checkpoint: CheckpointRow | None) -> None:
    """Add the less frequent parts of a change."""
    guards, writes = batch.guards, batch.writes
    batch.shared = tuple(sorted({address.session for address in notes.needs} - {session}))
    for address in notes.needs:
        key = (position(*address),)
        guards.append(Present(CHECKPOINTS, key, MissingReference))
        if address.seq not in notes.undeleted:
            guards.append(Absent(TOMBSTONES, key, MissingReference))
    if notes.copied is not None:
        guards.append(_unturned(FREED, notes.copied.freed))
        writes.append(_turned(COPIED))
    if notes.rename is not None:
        name, body = notes.rename
        guards.append(Absent(SESSIONS_BY_NAME, (name,), _name_taken))
        writes.append(Rename(session, name, body, _name_taken))
    if notes.key is not None and checkpoint is not None:
        writes.append(Insert("keys", (session, notes.key, checkpoint.seq), _key_taken))
    writes += [Put("keys", (session, key, seq)) for key, seq in notes.keys]
    for seq, kind, value in notes.removed_marks:
        writes.append(Delete("marks", (position(session, seq), kind, value)))
    for seq, kind, value, body in notes.marks:
        writes.append(Put("marks", (position(session, seq), kind, value, body)))
    if notes.operation is not None:
        number, body = notes.operation
        writes.append(Insert("operations", (position(session, number), body), _row_taken))
    writes += [Put("tombs", (position(session, seq), body)) for seq, body in notes.tombstones]
    writes += [Delete("tombs", (position(session, seq),)) for seq in notes.undeleted]
    writes += [Delete("facets", term) for term in notes.removed_terms]
    writes += [Put("facets", term) for term in notes.terms]
    writes += [Share(digest, None, False, MissingReference) for digest in notes.shares]
    if notes.lease is not None:
        writes.append(Put("leases", (session, *notes.lease)))
    if notes.copied is not None:
        _add_copied(batch, session, notes.copied)


def _add_copied(batch: Batch, session: int, copied: Copied) -> None:
    """Add rows that are copied from another store."""
    writes = batch.writes
    for seq, id, body in copied.checkpoints:
        writes.append(Insert("checkpoints", (position(session, seq), id, body), _row_taken))
    for number, body in copied.operations:
        writes.append(Put("operations", (position(session, number), body)))
    for other, seq, ancestor, body in copied.grafts:
        writes.append(Put("gaps", (position(other, seq), ancestor, body)))
    if copied.journal_from:
        low, high = position(session, 0), position(session, copied.journal_from)
        writes.append(DeleteRange("journal", low, high))
    for number, body in copied.journal:
        writes.append(Insert("journal", (position(session, number), body), StaleHead))


def _unturned(space: str, number: int) -> Equals:
    """Return the guard that no gc, or no copy, came since `number` was read."""
    body = seal_counter(space, number) if number else None
    return Equals(COUNTERS, (space,), "body", body, MissingReference)


def _turned(space: str) -> Put:
    return Put("counters", (space, seal_counter(space, Turnover.new())))


def of_append(append: JournalAppend) -> Batch:
    """Return the batch that appends entries to a journal."""
    session = append.session
    batch = Batch()
    if append.token is None:
        batch.guards.append(Present(SESSIONS, (session,), StaleHead))
    else:
        batch.guards.append(Equals(LEASES, (session,), "token", append.token, StaleHead))
    for number, body in enumerate(append.entries, append.first):
        batch.writes.append(Insert("journal", (position(session, number), body), StaleHead))
    return batch


def of_sweep(sweep: Sweep) -> Batch:
    """Return the batch that removes checkpoints which gc has chosen."""
    session = sweep.session
    low, high = position(session, 0), position(session + 1, 0)
    batch = Batch()
    writes = batch.writes
    for first, end in IntervalSet.of([ref.seq for ref in sweep.checkpoints]).all():
        for table in ("checkpoints", "gaps", "tombs", "marks"):
            writes.append(DeleteRange(table, position(session, first), position(session, end)))
    writes += [Delete("keys", (session, key)) for key in sweep.keys]
    writes += [Delete("facets", term) for term in sweep.terms]
    for other, seq, ancestor, body in sweep.grafts:
        writes.append(Put("gaps", (position(other, seq), ancestor, body)))
    if sweep.journal:
        writes.append(DeleteRange("journal", low, position(session, sweep.journal)))
    if sweep.remove is not None:
        writes += [DeleteRange(table, low, high) for table in ("journal", "operations")]
        writes.append(Delete("gaps", (low,)))
        for table in ("sessions", "heads", "leases", "tallies", "spans"):
            writes.append(Delete(table, (session,)))
    return batch


def of_gc(copied: int | None = None) -> Batch:
    """Return the batch with which gc begins to free. It is refused after a copy, if asked to."""
    guards = [] if copied is None else [_unturned(COPIED, copied)]
    return Batch(guards=[*guards], writes=[_turned(FREED)])


def of_trim(trim: Trim) -> Iterator[Batch]:
    """Yield a batch for each group of rows, and each blob, that gc found unused."""
    for group in trim.items:
        batch = Batch()
        for pos, begin in group.remove:
            batch.writes.append(DeleteIf(ITEM_SIZES, (pos,), "begin", begin, StaleHead))
        batch.writes += [Insert("items", row, StaleHead) for row in group.replace]
        yield batch
    for digest, uses in trim.blobs:
        yield Batch(writes=[DeleteIf(BLOB_VERSIONS, (digest,), "uses", uses, StaleHead)])
