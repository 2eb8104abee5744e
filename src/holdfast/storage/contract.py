"""The contract between the library and its storages.

A backend keeps the tables of `storage.tables` and never looks inside a row. A `View` reads one
moment of them. `commit` is the central write: all or nothing. Forks, rewinds, verification and
diffs are built on top, once for all backends. `holdfast.testing` holds the test suite that every
backend must pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from holdfast.format.records import MAX_SEQ, SEQ_BITS
from holdfast.storage.rows import JournalRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.format.item_streams import RowWrite
    from holdfast.format.records import IndexTerm
    from holdfast.storage.reader import Reader
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
        KeyRow,
        LeaseRow,
        MarkKey,
        MarkRow,
        NameRow,
        OperationRow,
        TombstoneRow,
    )
    from holdfast.storage.tables import Index, Row


class StaleHead(Exception):
    """The head row, lease or journal is not the expected one. Nothing was written."""


class MissingReference(Exception):
    """A checkpoint or blob that the change refers to was freed. Nothing was written."""


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

    def size(self) -> int:
        """Return the bytes of data in the change."""
        return sum([len(row.body) for row in self.rows]) + sum([len(b.body) for b in self.blobs])


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


@dataclass(slots=True)
class JournalAppend:
    """Entries to append to a session's journal, all of them or none."""

    session: int
    token: bytes | None
    """The token that the session's lease must have. None for writers that need no lease."""
    first: int
    """The number of the first entry. The journal must end before this number."""
    entries: Sequence[bytes]

    def size(self) -> int:
        """Return the bytes of the entries."""
        return sum([len(entry) for entry in self.entries])


@dataclass(slots=True)
class Sweep:
    """The checkpoints of one session that gc removes, all of them or none.

    A sweep is applied only if `expect`, `known_grafts`, `forks` and `below` still describe the
    session, because gc has chosen the checkpoints by them.
    """

    session: int
    expect: bytes
    """The head row as last read."""
    known_grafts: Sequence[GraftRow]
    """All grafts of the session."""
    forks: Sequence[Fork]
    """All forks from it."""
    below: Sequence[Address]
    """All grafts whose ancestor is in this session."""
    checkpoints: Sequence[CheckpointRef] = ()
    """The tombstone, graft, marks and key of a checkpoint are removed with it."""
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

    def is_current(self, reader: Reader) -> bool:
        """Return whether the session and its forks are unchanged since the sweep was planned."""
        session = self.session
        far = [graft.ancestor for graft in self.grafts if graft.ancestor is not None]
        return (
            reader.head(session) == self.expect
            and reader.grafts(session, 0, MAX_SEQ) == [*self.known_grafts]
            and reader.forks(session, 1, MAX_SEQ) == [*self.forks]
            and reader.grafts_below(session) == [*self.below]
            and all(reader.checkpoint(a >> SEQ_BITS, a & MAX_SEQ) is not None for a in far)
        )


@dataclass(slots=True)
class Trim:
    """Unused data to remove, each with its version when gc found that it is unused."""

    items: Sequence[ItemsTrim]
    blobs: Sequence[BlobTrim]
    copied: int
    """`Turnover.copied` when gc read the store. MissingReference if it has changed."""


class View(Protocol):
    """One moment of a store: all reads through one view see the same rows.

    The indexes are those of `storage.tables`. Damaged data raises Corrupt, or is returned as it is
    if it is in a body, because bodies are sealed.
    """

    tallied: bool
    """Whether the store has the table `tallies`."""

    def get(self, index: Index, *key: Any) -> Row | None:
        """Return the row with this key, which has a value for each column of `index.by`."""
        ...

    def scan(
        self,
        index: Index,
        low: Any = None,
        high: Any = None,
        *,
        prefix: tuple[Any, ...] = (),
        limit: int | None = None,
        reverse: bool = False,
        floor: Any = None,
    ) -> list[Row]:
        """Return the rows with low <= key < high in the order of the index, at most `limit`.

        `prefix` has the values of the first columns of `index.by`; low and high are compared with
        the next one. Without a bound, that side is open. With `reverse`, the highest come first.
        With `floor`, if no row is at `low`, the last row before it comes first, unless its key is
        below `floor`.
        """
        ...

    def count(self, table: str) -> int:
        """Return the number of rows of the table `checkpoints` or `tombs`."""
        ...

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return, for each table in `tables.MEASURED`, the number of rows and their bytes."""
        ...

    def problems(self, session: int | None = None) -> Iterator[str]:
        """Yield descriptions of damage in the storage's own structures.

        With a session, only those that `Backend.accept` accepts for it.
        """
        ...


class Backend(Protocol):
    """A storage. Safe for many threads and, unless a backend says otherwise, many processes."""

    name: str
    read_only: bool

    def view(self) -> AbstractContextManager[View]:
        """Return a context with a consistent view of the store."""
        ...

    def commit(self, change: Change) -> None:
        """Write all of `change`, or nothing.

        When it returns, the change survives a crash of the process and of the machine. Raises
        StaleHead if the head row is not `change.expect`, MissingReference if a checkpoint or blob
        that the change refers to was freed, SessionExists or KeyTaken if a name or key is taken,
        and Unavailable if the storage fails. Then nothing of the change is visible.
        """
        ...

    def append_journal(self, append: JournalAppend) -> None:
        """Append all entries to a journal, or none. They are as durable as a commit.

        Raises StaleHead if the lease has another token, or if the number of an entry is taken
        because another writer has appended since the journal was read.
        """
        ...

    def renew(self, session: int, token: bytes) -> bool:
        """Start the time of a lease again. Return False if the lease has another token.

        This need not be durable.
        """
        ...

    def sweep(self, sweeps: Sequence[Sweep]) -> list[bool]:
        """Remove checkpoints of several sessions. Return, for each sweep, whether it was applied.

        A sweep that is not current any more is not applied at all.
        """
        ...

    def trim(self, trim: Trim) -> int:
        """Remove unused data that has not changed since. Return the number of removed rows.

        Raises MissingReference, and removes nothing, if a copy may have started to use some of it.
        """
        ...

    def compact(
        self, progress: Callable[[int, int], None] | None = None, *, erase: bool = False
    ) -> bool:
        """Return free space to the system, and overwrite the remains of removed rows.

        `progress` is called with the pages done and their total. With `erase`, all remaining data
        is rewritten, whatever that costs. Returns False if a concurrent reader prevented a part of
        it.
        """
        ...

    def reindex(self) -> None:
        """Rebuild the storage's indexes from the rows that they index, where possible.

        Only undamaged rows are used. Index entries of damaged rows are kept: otherwise a name that
        is taken would look free.
        """
        ...

    def recount(self, used: Mapping[str, int]) -> None:  # noqa: ARG002
        """Replace every counter that `Reader.check_counters` names.

        `used` maps each space of numbers to the highest number in use. Most backends need not do
        this.
        """
        return

    def accept(self, session: int) -> bool:  # noqa: ARG002
        """Accept the loss that `Reader.damage` describes. Return whether there was any.

        Everything that was found of the lost rows is kept. From then on, only these remains show
        the loss. Most backends have nothing to accept.
        """
        return False

    def version(self) -> object:
        """Return a value that changes with every commit of any process. Cheap enough to poll."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when there may be a new commit, or after `seconds`."""
        time.sleep(seconds)

    def identity(self) -> object:
        """Return a value that is equal for all backends of one store, whatever their addresses."""
        return id(self)

    def backup(self, path: Path) -> None:
        """Copy the store, as it is at one moment, to `path`. The copy is durable when this returns.

        Others can write at the same time.
        """
        ...

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        """Return the first of `count` consecutive numbers, which are never given out again."""
        ...

    def reset_lock(self) -> None:
        """Replace locks in a forked child, where the threads that held them do not exist."""

    def close(self) -> None:
        """Close the backend. Later calls raise InvalidRequest. Idempotent."""
        ...
