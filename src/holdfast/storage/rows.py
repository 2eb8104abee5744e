"""The rows that a storage keeps, as named tuples.

A `body` is a sealed row: the bytes that are stored. `format.records` opens it. The other fields are
the key of the row, or what an index knows about it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from holdfast.format import records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


R = TypeVar("R")

PAGE = 1_000
"""How many rows one query reads, where all rows are wanted."""


def maker(kind: type[R]) -> Callable[[Sequence[Any]], R]:
    """Return a function that makes rows of a kind from plain tuples.

    It takes a third of the time of the constructor, and does not check the number of fields.
    """
    new: Any = tuple.__new__
    return partial(new, kind)


class Address(NamedTuple):
    """The address of a checkpoint: the number of its session, and its seq."""

    session: int
    seq: int


class SessionRow(NamedTuple):
    """A session: its number, its stored name and its row."""

    number: int
    name: bytes
    body: bytes

    @property
    def is_deleted(self) -> bool:
        """Return whether the session is deleted, and not yet freed by gc."""
        return records.is_deleted(self.number, self.name)

    @property
    def former_name(self) -> bytes | None:
        """Return the name that a deleted session had; None for one that is not deleted."""
        return records.former_name(self.number, self.name)

    @property
    def plain_name(self) -> bytes:
        """Return the name without the addition that deleted sessions have."""
        former = self.former_name
        return self.name if former is None else former


class HeadRow(NamedTuple):
    """The head row of a session."""

    session: int
    body: bytes


class NameRow(NamedTuple):
    """The name that a session gets, and its row."""

    name: bytes
    body: bytes


class CheckpointRow(NamedTuple):
    """A checkpoint of a session."""

    seq: int
    id: bytes
    body: bytes


class CheckpointRef(NamedTuple):
    """A checkpoint of a session, without its row."""

    seq: int
    id: bytes


class IdRow(NamedTuple):
    """An entry of the index of ids: where the checkpoint with this id is."""

    session: int
    seq: int
    id: bytes

    @property
    def address(self) -> Address:
        return Address(self.session, self.seq)


class ItemsRow(NamedTuple):
    """A stored row of items, with the number of its first item in the stream."""

    first: int
    body: bytes


class BlobWrite(NamedTuple):
    """A blob to write. With `rewrite`, it replaces an existing row, because that is damaged."""

    digest: bytes
    body: bytes
    rewrite: bool


class MarkKey(NamedTuple):
    """A label or a tag of a checkpoint, without its row."""

    seq: int
    kind: int
    value: bytes


class MarkRow(NamedTuple):
    """A label or a tag of a checkpoint."""

    seq: int
    kind: int
    value: bytes
    body: bytes

    @property
    def key(self) -> MarkKey:
        """Return the mark without its row."""
        return MarkKey(*self[:3])


class KeyRow(NamedTuple):
    """The external key of a checkpoint."""

    key: bytes
    seq: int


class OperationRow(NamedTuple):
    """An entry of a session's operation log."""

    number: int
    body: bytes


class JournalRow(NamedTuple):
    """An entry of a session's journal."""

    number: int
    body: bytes


class LeaseRow(NamedTuple):
    """The token that a session's lease gets, and its row."""

    token: bytes
    body: bytes


class TombstoneRow(NamedTuple):
    """The tombstone of a deleted checkpoint."""

    seq: int
    body: bytes


class TombstoneAt(NamedTuple):
    """A tombstone of any session. The position holds session and seq in one number."""

    position: int
    body: bytes


class GraftRow(NamedTuple):
    """A graft: the parent pointer of a checkpoint whose parent gc has freed.

    The row of seq 0 is the list of the session's freed checkpoints.
    """

    seq: int
    body: bytes


class GraftWrite(NamedTuple):
    """A graft to write. `ancestor` is the position of the checkpoint that it points to, if any."""

    session: int
    seq: int
    ancestor: int | None
    body: bytes


class Fork(NamedTuple):
    """A session that was forked from the checkpoint `seq` of another one."""

    seq: int
    session: int


class ItemsBegin(NamedTuple):
    """A stored row of items, known by its first 9 bytes.

    The position holds the stream and the number of the first item.
    """

    position: int
    size: int
    begin: bytes


class BlobUse(NamedTuple):
    """A stored blob. `uses` changes whenever a checkpoint begins to refer to it."""

    number: int
    digest: bytes
    size: int
    uses: int


class ItemsTrim(NamedTuple):
    """Rows of items that gc removes together, with the rows that replace them.

    All of them stay if one has changed since gc read it.
    """

    remove: Sequence[ItemsKey]
    replace: Sequence[ItemsPut]


class ItemsKey(NamedTuple):
    """A row of items to remove, if it still begins with these bytes."""

    position: int
    begin: bytes


class ItemsPut(NamedTuple):
    """A row of items to write at a position."""

    position: int
    body: bytes


class BlobTrim(NamedTuple):
    """A blob to remove, if its number of uses is still this one."""

    digest: bytes
    uses: int
