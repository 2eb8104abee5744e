"""Batches: what a commit writes to the tables, and under which conditions.

Each condition and each write that can be refused has an error. If some of them do not hold, a
backend raises the error of one of these, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from holdfast.storage.contract import View
    from holdfast.storage.tables import Index, Row

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

    A backend may also refuse a second row with a name or an id that must be unique.
    """

    table: str
    row: Row
    refusal: Refusal


class Put(NamedTuple):
    """A row that replaces the one with its key, if there is one."""

    table: str
    row: Row


class Rename(NamedTuple):
    """A new name and body of a session. It is refused if another session has the name."""

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


Guard = Equals | Present | Absent


def check(guard: Guard, view: View) -> None:
    """Raise the error of a guard, unless it holds in this view."""
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
    shared: tuple[int, ...] = ()
    """Other sessions, in order. They are locked against the removal of checkpoints."""
    guards: list[Guard] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

    def size(self) -> int:
        """Return the bytes of data in the writes."""
        size = 0
        for write in self.writes:
            if type(write) is Insert and write.table in ("items", "checkpoints"):
                size += len(write.row[-1])
            elif type(write) is Share:
                size += len(write.body or b"")
        return size
