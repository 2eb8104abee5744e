"""The search index: candidates for searches, beside the store and outside of its promise.

For each checkpoint, it has the text that came with it. A reader of the index checks each candidate
against the store. `history.search_index` decides what it contains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.storage.rows import IdRow

SHORTEST = 3
"""Characters of a text that the index can find: it has the text in groups of three."""
NONE, UNKNOWN = -1, -2
"""In place of an ancestor's position: a checkpoint without one, or one that was not read."""


class IndexUnusable(Exception):
    """The index is damaged, or belongs to something else."""


class IndexBusy(IndexUnusable):
    """Another process has locked the index."""


class Mark(NamedTuple):
    """How much of a session the index has."""

    head: bytes
    """The head row of the session when it was indexed to its end, else empty."""
    gone: bytes
    """A digest of which checkpoints were deleted or freed; empty if it must be compared again."""
    last: int
    """All checkpoints up to this seq are in the index."""
    id: bytes
    """The id of the checkpoint `last`."""


class Document(NamedTuple):
    """The text that came with a checkpoint, in the form that is searched."""

    seq: int
    id: bytes
    ancestor: int
    """The position of the ancestor whose text it has not."""
    text: str | None
    """None for a checkpoint that is a candidate of every search."""


class Change(NamedTuple):
    """A change of what the index has of one session."""

    session: int
    expect: Mark | None
    mark: Mark | None
    documents: Sequence[Document] = ()
    remove: Sequence[int] = ()
    """Seqs of checkpoints."""
    stale: Sequence[int] = ()
    """Sessions whose marks must be compared again, because they were forked from this one."""


class SearchIndex(Protocol):
    """An open index. Its methods raise IndexUnusable. Not safe for threads."""

    def version(self) -> object | None:
        """Return a value that changes with every change of the index; None if there is none."""
        ...

    def marks(self) -> dict[int, Mark]:
        """Return the marks of all sessions."""
        ...

    def tip(self) -> bytes:
        """Return the newest id of the store when the index was last complete; empty if never."""
        ...

    def set_tip(self, id: bytes) -> None: ...

    def known(self, session: int) -> dict[int, tuple[bytes, int]]:
        """Return id and ancestor of each checkpoint of a session that the index has, by seq."""
        ...

    def write(self, change: Change) -> bool:
        """Make a change, whole or not at all. Return False if the mark is not the expected one."""
        ...

    def find(self, text: str, below: bytes, limit: int) -> tuple[list[IdRow], bool]:
        """Return checkpoints that may have a text, newest first, with ids below `below`.

        Also return whether there may be more.
        """
        ...

    def find_in(self, text: str, session: int) -> list[IdRow]:
        """Return the checkpoints of a session that may have a text, highest seq first.

        Those whose ancestor is in another session are among them.
        """
        ...

    def compact(self, *, erase: bool = False) -> None:
        """Join what many changes have left; with `erase`, also overwrite what was removed."""
        ...

    def close(self) -> None: ...
