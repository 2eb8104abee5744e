"""The contract of storage: few primitives, opaque bytes, one atomic write.

A backend stores sealed rows under their addresses and never looks inside. `commit` is the one
write. Everything else (forks, rewinds, verification, diffs) is written once, above.
`holdfast.testing` holds the suite that every backend must pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from holdfast.codec.streams import RowWrite


class Moved(Exception):
    """The head's row was not the expected one; nothing was written."""


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
    key: bytes | None = None
    """An external key of the checkpoint, unique in the session."""
    marks: Sequence[tuple[int, int, bytes, bytes]] = ()
    """seq, kind, value, row"""
    unmarks: Sequence[tuple[int, int, bytes]] = ()
    operation: tuple[int, bytes] | None = None
    """number, row"""
    plain: bool = False
    """Set where it has neither blobs, key, marks nor operation: rows and a checkpoint alone."""


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
        Moved if the head's row is not `change.expect`, SessionExists or KeyTaken if a name or key
        is taken, Unavailable if the storage fails; then nothing of the change is visible.
        """
        ...

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        """The first of `count` consecutive numbers that nobody else ever gets."""
        ...

    def reset_lock(self) -> None:
        """Called in a forked child, where a lock that another thread held is nobody's."""

    def close(self) -> None:
        """Idempotent. Later calls raise InvalidRequest."""
        ...
