"""The contract of storage: few primitives, opaque bytes, one atomic write.

A backend stores sealed rows under their addresses and never looks inside. `commit` is the one
write. Everything else (forks, rewinds, verification, diffs) is written once, above.
`holdfast.testing` holds the suite that every backend must pass.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from holdfast.codec.records import MAX_SEQ, SEQ_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.codec.streams import RowWrite


class Moved(Exception):
    """The head's row, lease or journal was not the expected one; nothing was written."""


class Gone(Exception):
    """A checkpoint or blob that the change builds on was freed; nothing was written."""


@dataclass(slots=True)
class Change:
    """One atomic write to one session."""

    session: int
    expect: bytes
    """The head's row as last read."""
    head: bytes
    create: tuple[bytes, bytes] | None = None
    """Name and row of a session that this change creates: there is no head to expect yet."""
    checkpoint: tuple[int, bytes, bytes] | None = None
    """seq, id, row"""
    rows: Sequence[RowWrite] = ()
    blobs: Sequence[tuple[bytes, bytes, bool]] = ()
    """digest, row, whether to write over one that exists (because it is damaged)"""
    notes: Notes | None = None
    """Whatever else the change brings; most bring nothing."""
    parent: tuple[int, bytes] | None = None
    """seq and id of the checkpoint that the new one is built on, and on no other that came in its
    place because what was written and read was taken back, or forgotten by a server that crashed.
    With `origin` it lies in that session."""

    def size(self) -> int:
        """Bytes of data."""
        return sum([len(row[3]) for row in self.rows]) + sum([len(b) for _, b, _ in self.blobs])


@dataclass(slots=True)
class Notes:
    """The less frequent parts of a change."""

    origin: tuple[int, int] | None = None
    """With `create`: session and seq of the checkpoint that the new session was forked from."""
    rename: tuple[bytes, bytes] | None = None
    """The session's new name and row. Raises SessionExists if it is taken."""
    key: bytes | None = None
    """An external key of the checkpoint, unique in the session."""
    keys: Sequence[tuple[bytes, int]] = ()
    """key and seq of checkpoints whose keys are to be found again"""
    marks: Sequence[tuple[int, int, bytes, bytes]] = ()
    """seq, kind, value, row"""
    unmarks: Sequence[tuple[int, int, bytes]] = ()
    operation: tuple[int, bytes] | None = None
    """number, row"""
    tombs: Sequence[tuple[int, bytes]] = ()
    """seq, row"""
    untombs: Sequence[int] = ()
    facets: Sequence[tuple[int, bytes, bytes]] = ()
    """kind, value, id: entries of the index for searches"""
    unfacets: Sequence[tuple[int, bytes, bytes]] = ()
    needs: Sequence[tuple[int, int]] = ()
    """session and seq of other checkpoints that must be there still, and not deleted unless that is
    taken back; else Gone is raised"""
    shares: Sequence[bytes] = ()
    """Digests of blobs that are there and are now referred to anew; Gone if one is not."""
    lease: tuple[bytes, bytes] | None = None
    """Token and row of the session's lease from now on, renewed at this moment."""
    copied: Copied | None = None


class Turnover(NamedTuple):
    """Two numbers by which gc and copies notice each other.

    A copy goes by what it has found in a store, and gc by what it has found to be garbage there. So
    a copy that lands says so by a new `copied`, and is refused if there was a new `freed` since it
    looked; and the other way round. 0 if there never was one.
    """

    freed: int
    copied: int

    @staticmethod
    def new() -> int:
        return random.getrandbits(52) + 1


@dataclass(slots=True)
class Copied:
    """Rows of a session that another store has: many at once, where a change has one of each."""

    freed: int
    """`Turnover.freed` when the copy looked; Gone if it is another."""

    checkpoints: Sequence[tuple[int, bytes, bytes]] = ()
    """seq, id, row"""
    operations: Sequence[tuple[int, bytes]] = ()
    """number, row"""
    gaps: Sequence[tuple[int, int | None, bytes]] = ()
    """seq, position of the ancestor, and row"""
    journal: Sequence[tuple[int, bytes]] = ()
    """number, row; Moved if there is an entry of this number, which somebody has written since"""
    journal_from: int = 0
    """Entries of the journal below this number go: those that came after them are freed."""


@dataclass(slots=True)
class Jot:
    """Entries of a session's journal, all of them or none."""

    session: int
    token: bytes | None
    """The session's lease must have it; None for somebody who needs no lease."""
    first: int
    """The number of the first entry: there must be none of this number, and none after it."""
    entries: Sequence[bytes]

    def size(self) -> int:
        return sum([len(entry) for entry in self.entries])


class Lease(NamedTuple):
    """Who may write a session's journal."""

    session: int
    token: bytes
    body: bytes
    age: float
    """Seconds since it was taken or renewed, by a clock nobody sets or by the server's."""


@dataclass(slots=True)
class Sweep:
    """What gc removes of one session, all of it or nothing."""

    session: int
    expect: bytes
    """The head's row as last read: what is freed was chosen by it. So it was by what follows:"""
    known_gaps: Sequence[tuple[int, bytes]]
    """seq and row of all gaps of the session,"""
    forks: Sequence[tuple[int, int]]
    """seq and session of all forks from it,"""
    below: Sequence[tuple[int, int]]
    """and session and seq of all gaps whose far end is in it."""
    checkpoints: Sequence[tuple[int, bytes]] = ()
    """seq and id; with it go its tombstone, its gap, its marks and its key"""
    keys: Sequence[bytes] = ()
    facets: Sequence[tuple[int, bytes, bytes]] = ()
    gaps: Sequence[tuple[int, int, int | None, bytes]] = ()
    """session, seq, position of the ancestor, and row: of this session, and of those below it"""
    journal: int = 0
    """Entries of the journal below this number go, too."""
    remove: bytes | None = None
    """The session's name, if all of it goes."""

    def is_current(self, reader: Reader) -> bool:
        """Whether the session, and what hangs on it, is still as it was when this was planned."""
        session = self.session
        far = [ancestor for _, _, ancestor, _ in self.gaps if ancestor is not None]
        return (
            reader.head(session) == self.expect
            and reader.gaps(session, 0, MAX_SEQ) == [*self.known_gaps]
            and reader.forks(session, 1, MAX_SEQ) == [*self.forks]
            and reader.gaps_below(session) == [*self.below]
            and all(reader.checkpoint(a >> SEQ_BITS, a & MAX_SEQ) is not None for a in far)
        )


@dataclass(slots=True)
class Trim:
    """Data that no checkpoint refers to, each with what it was when that was found out."""

    items: Sequence[tuple[Sequence[tuple[int, bytes]], Sequence[tuple[int, bytes]]]]
    """rows (position, first bytes) that go together, and rows (position, body) in their place"""
    blobs: Sequence[tuple[bytes, int]]
    """digest, and how often it was shared"""
    copied: int
    """`Turnover.copied` when that was found out; Gone if it is another."""


class Reader(Protocol):
    """A consistent view: everything read through one reader is of one moment."""

    def session(self, name: bytes) -> tuple[int, bytes] | None:
        """Number and row of the session of exactly this name."""
        ...

    def session_by_number(self, session: int) -> tuple[bytes, bytes] | None:
        """Name and row."""
        ...

    def sessions(self, after: bytes | None, limit: int) -> list[tuple[int, bytes, bytes]]:
        """Number, name and row, ordered by the bytes of the name, strictly after `after`."""
        ...

    def head(self, session: int) -> bytes | None: ...

    def checkpoint(self, session: int, seq: int) -> tuple[bytes, bytes] | None:
        """Id and row."""
        ...

    def checkpoints(
        self, session: int, low: int, high: int, limit: int
    ) -> list[tuple[int, bytes, bytes]]:
        """seq, id and row for low <= seq <= high, in order of seq, at most `limit`."""
        ...

    def find_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        """session, seq and id of the checkpoints with low <= id <= high, by id."""
        ...

    def find_key(self, session: int, key: bytes) -> int | None:
        """The seq of the checkpoint with this external key."""
        ...

    def items(self, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
        """The rows that hold items [start, stop), with the number of each one's first item.

        The row that begins before `start` and reaches into the range comes first. Holes are left
        out, not an error here.
        """
        ...

    def blob(self, digest: bytes) -> bytes | None: ...

    def marks(self, session: int, low: int, high: int) -> list[tuple[int, int, bytes, bytes]]:
        """seq, kind, value and row of the marks of a range of checkpoints."""
        ...

    def find_marks(self, session: int, kind: int, value: bytes) -> list[tuple[int, bytes]]:
        """seq and row of the checkpoints that carry this mark, newest first."""
        ...

    def operations(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]: ...

    def lease(self, session: int) -> Lease | None: ...

    def leases(self, after: int, limit: int) -> list[Lease]:
        """By the number of their sessions, strictly after one."""
        ...

    def journal(self, session: int, low: int, limit: int) -> list[tuple[int, bytes]]:
        """Number and row of the entries from a number on, in order."""
        ...

    def last_entry(self, session: int) -> int:
        """The number of the newest entry of the journal; 0 if there is none."""
        ...

    def tombs(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        """seq and row of what is deleted and not yet freed, by seq."""
        ...

    def buried(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Position and row of all tombstones of the store, strictly after a position."""
        ...

    def count_buried(self) -> int: ...

    def count_checkpoints(self) -> int:
        """All of the store, deleted ones as well."""
        ...

    def gaps(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        """seq and row, by seq."""
        ...

    def gaps_below(self, session: int) -> list[tuple[int, int]]:
        """session and seq of all gaps, of any session, whose ancestor lies in this one."""
        ...

    def forks(self, session: int, low: int, high: int) -> list[tuple[int, int]]:
        """seq and session for each session that was forked from one of these checkpoints."""
        ...

    def find_facets(
        self, kind: int, value: bytes, low: bytes, high: bytes, limit: int
    ) -> list[bytes]:
        """Ids with low <= id < high in the index for searches, the highest first."""
        ...

    def newest_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        """session, seq and id of the checkpoints with low <= id < high, the highest first."""
        ...

    def item_rows(self, after: int, limit: int) -> list[tuple[int, int, bytes]]:
        """Position, length and first 9 bytes of all rows of items, strictly after a position."""
        ...

    def blob_rows(self, after: int, limit: int) -> list[tuple[int, bytes, int, int]]:
        """A number to go on after, digest, length, and how often it was shared, of all blobs."""
        ...

    def turnover(self) -> Turnover:
        """Not later than anything else that is read through this reader, if it is asked first."""
        ...

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and bytes by kind of row."""
        ...

    def damage(self, session: int) -> str | None:  # noqa: ARG002 # most storages need not look
        """In words, that something of a session is lost, if that cannot be told from its rows."""
        return None

    def check(self) -> Iterator[str]:
        """What is wrong with the storage's own structures, in words."""
        ...


class Backend(Protocol):
    """Safe for many threads, and, unless it says otherwise, for many processes."""

    name: str
    read_only: bool

    def reader(self) -> AbstractContextManager[Reader]: ...

    def commit(self, change: Change) -> None:
        """Write all of `change`, or nothing.

        When it returns, the change survives a crash of the process and of the machine. Raises
        Moved if the head's row is not `change.expect`, Gone if something that the change needs was
        freed, SessionExists or KeyTaken if a name or key is taken, Unavailable if the storage
        fails; then nothing of the change is visible.
        """
        ...

    def jot(self, jot: Jot) -> None:
        """Write all of `jot`, or nothing, as durable as a commit.

        Raises Moved if the lease has another token, or an entry's number is taken: somebody else
        has written since the last one was looked for.
        """
        ...

    def renew(self, session: int, token: bytes) -> bool:
        """Begin a lease's time anew; False if it has another token by now. Need not be durable."""
        ...

    def sweep(self, sweeps: Sequence[Sweep]) -> list[bool]:
        """Free checkpoints of several sessions, and tell which: none of one that is not current."""
        ...

    def trim(self, trim: Trim) -> int:
        """Remove data, but not what has changed since; returns how many rows went.

        Raises Gone, and removes nothing, if a copy has come to need some of it.
        """
        ...

    def compact(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Give space that is free back to the system. `progress` is told pages done, and of all."""
        ...

    def reindex(self) -> None:
        """Make indexes of the storage anew from what they index, where that can be done.

        Only from rows that are sound. What an index alone still knows of a damaged one is not
        forgotten: else a name that is taken would look free.
        """
        ...

    def accept(self, session: int) -> bool:  # noqa: ARG002 # most storages have nothing to accept
        """Count as lost what `Reader.damage` tells of a session; whether there was anything.

        What could be found of it is kept. From then on only its traces tell that it was there.
        """
        return False

    def version(self) -> object:
        """Something that changes whenever anybody commits. Cheap: made to be asked often."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when somebody may have committed, or after so long."""
        time.sleep(seconds)

    def backup(self, path: Path) -> None:
        """A copy as of one moment, durable when this returns, while others go on writing."""
        ...

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        """The first of `count` consecutive numbers that nobody else ever gets."""
        ...

    def reset_lock(self) -> None:
        """Called in a forked child, where a lock that another thread held is nobody's."""

    def close(self) -> None:
        """Idempotent. Later calls raise InvalidRequest."""
        ...
