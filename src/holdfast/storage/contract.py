"""The contract between the library and its storages.

A backend keeps the tables of `storage.tables` and never looks inside a row. A `View` reads one
moment of them. A `Batch` is written as a whole or not at all. Everything else is built on top, once
for all backends: `storage.reader` asks what callers want to know, `storage.changes` makes the
batches of the library. `holdfast.testing` holds the tests that every backend must pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from holdfast.storage.tables import Index, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path


class StaleHead(Exception):
    """The head row, lease or journal is not the expected one. Nothing was written."""


class MissingReference(Exception):
    """A checkpoint or blob that a batch refers to was freed. Nothing was written."""


# -- batches -------------------------------------------------------------------------------------
# Each condition and each write that can be refused has an error. If some of them do not hold, a
# backend raises the error of one of these, and writes nothing.

Key = tuple[Any, ...]
Refusal = Callable[[], Exception]
"""Makes the error that is raised if a guard does not hold, or a write is refused."""


class Swap(NamedTuple):
    """The head row of a session, which must be `expect` before. Empty: missing or empty."""

    session: int
    expect: bytes
    body: bytes
    refusal: Refusal
    parent: tuple[int, bytes] | None = None
    """Position and id of the checkpoint that the old head row refers to.

    A server that crashed may have lost it, and another one may have got its position since. A
    storage to which that can happen refuses the batch then.
    """


class Equals(NamedTuple):
    """A row exists, and this column of it has this value.

    With None, no such row exists, or the column is empty.
    """

    by: Index
    key: Key
    column: str
    value: Any
    refusal: Refusal


class Present(NamedTuple):
    """A row with this key exists."""

    by: Index
    key: Key
    refusal: Refusal


class Absent(NamedTuple):
    """No row with this key exists."""

    by: Index
    key: Key
    refusal: Refusal


class Insert(NamedTuple):
    """A new row. It is refused if there is one with its key.

    A backend may also refuse a second row with a name or an id that must be unique. A new session
    comes with an Absent for its name: a backend checks one of the two.
    """

    table: str
    row: Row
    refusal: Refusal


class Put(NamedTuple):
    """A row that replaces the one with its key, if there is one."""

    table: str
    row: Row


class Rename(NamedTuple):
    """A new name and body of a session. It is refused if another session has the name.

    It comes with an Absent for the name: a backend checks one of the two.
    """

    session: int
    name: bytes
    body: bytes
    refusal: Refusal


class Delete(NamedTuple):
    """Removes the row with this key, if there is one."""

    table: str
    key: Key


class DeleteRange(NamedTuple):
    """Removes all rows with low <= first column of the key < high."""

    table: str
    low: Any
    high: Any


class DeleteIf(NamedTuple):
    """Removes a row. It is refused unless this column of the row has this value."""

    by: Index
    key: Key
    column: str
    value: Any
    refusal: Refusal


class Share(NamedTuple):
    """A new use of a blob. Its number of uses changes, so gc does not remove it.

    With a body, the blob is written if it does not exist, or if `rewrite` says that the stored one
    is damaged. Without one, the batch is refused if the blob does not exist.
    """

    digest: bytes
    body: bytes | None
    rewrite: bool
    refusal: Refusal


class Unchanged(NamedTuple):
    """A scan of this index from low to high returns these rows."""

    by: Index
    low: Any
    high: Any
    rows: Sequence[Row]
    refusal: Refusal


Guard = Equals | Present | Absent | Unchanged


def check(guard: Guard, view: View) -> None:
    """Raise the error of a guard, unless it holds in this view."""
    if isinstance(guard, Unchanged):
        if view.scan(guard.by, guard.low, guard.high) != [*guard.rows]:
            raise guard.refusal()
        return
    row = view.get(guard.by, *guard.key)
    if isinstance(guard, Equals):
        found = None if row is None else row[guard.by.columns.index(guard.column)]
        holds = found == guard.value or (guard.value is None and not found)
    else:
        holds = (row is None) == isinstance(guard, Absent)
    if not holds:
        raise guard.refusal()


Write = Insert | Put | Rename | Delete | DeleteRange | DeleteIf | Share


@dataclass(slots=True)
class Batch:
    """Writes that are made together, or not at all.

    The swap and the guards are checked first. Then the writes are made in order.
    """

    swap: Swap | None = None
    """The head row that the batch replaces. It locks the session against other writers."""
    sessions: tuple[int, ...] = ()
    """More sessions that are locked against other writers."""
    shared: tuple[int, ...] = ()
    """Sessions that are locked against the removal of checkpoints."""
    guards: list[Guard] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

    def size(self) -> int:
        """Return the bytes of new data in the writes; 0 if the batch only notes or removes."""
        size = 0
        for write in self.writes:
            if type(write) is Insert and write.table in _DATA:
                size += len(write.row[-1])
            elif type(write) is Share:
                size += len(write.body or b"")
        return size


_DATA = ("items", "checkpoints", "journal")


# -- reading -------------------------------------------------------------------------------------


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

        With a session, only those that `Backend.salvage` accepts for it.
        """
        ...


# -- the storage -----------------------------------------------------------------------------------


class Backend(Protocol):
    """A storage. Safe for many threads and, unless a backend says otherwise, many processes."""

    name: str
    read_only: bool

    def view(self) -> AbstractContextManager[View]:
        """Return a context with a consistent view of the store."""
        ...

    def commit(self, batch: Batch) -> None:
        """Write all of a batch, or nothing.

        When it returns, the batch survives a crash of the process and of the machine. Raises the
        refusal of the swap, of a guard or of a write that does not hold, and Unavailable if the
        storage fails. Then nothing of the batch is visible.
        """
        ...

    def commit_all(self, first: Batch, rest: Sequence[Batch]) -> list[bool]:
        """Write a batch, and then each of the others, unless it is refused.

        Each is written as a whole. Return which of the others were written. They are durable even
        in a store that otherwise does not wait for the disk. Raises the refusal of the first one,
        and writes nothing then. No other `commit_all` runs meanwhile, and no batch that guards or
        writes counters. A batch that only removes data, with DeleteIf, may be made later, by
        `compact`. So may the removal of entries of a journal.
        """
        ...

    def renew(self, session: int, token: bytes) -> bool:
        """Start the time of a lease again. Return False if the lease has another token.

        This need not be durable.
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

    def salvage(self, accept: int | None = None) -> bool:
        """Rebuild damaged structures of the storage itself, such as indexes, from the rows left.

        Only undamaged rows decide. Index entries of damaged rows are kept: otherwise a name that is
        taken would look free. No sound row that can be read is lost. Damage that cannot be repaired
        without guessing stays, and `View.problems` describes it.

        With a session, accept instead the loss that `Reader.damage` describes. Everything that was
        found of the lost rows is kept. From then on, only these remains show the loss.

        Other processes see the store as it was, or as it is when this returns. Return whether
        anything was changed; a second call changes nothing. Raises Unavailable if the storage
        fails, and Corrupt if the damage does not allow even this. Nothing is changed then.
        """
        ...

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
