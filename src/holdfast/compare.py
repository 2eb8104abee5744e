"""Two checkpoints held against each other, of any two sessions of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast import lineage
from holdfast.codec import records
from holdfast.diff import Diff, diff
from holdfast.errors import SessionNotFound
from holdfast.lineage import Place
from holdfast.model import Usage
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Backend, Reader
    from holdfast.checkpoint import Checkpoint
    from holdfast.model import Record


class Way(NamedTuple):
    """From the common ancestor to one of the two."""

    steps: int
    usage: Usage


class Comparison(NamedTuple):
    ancestor: Checkpoint | None
    """The newest checkpoint that both come from; None if there is none, or it cannot be told."""
    to_a: Way
    to_b: Way
    changes: Diff


def compare(backend: Backend, a: Checkpoint, b: Checkpoint) -> Comparison:
    """What changed from `a` to `b`, reading only what differs, and how they are related."""
    with backend.reader() as reader:
        left, right = _place(reader, a), _place(reader, b)
        before, after = (lineage.read_row(reader, place).node() for place in (left, right))
        changes = diff(before, after, StoredSource(backend, reader))
        meeting, to_a, to_b = _meet(reader, left, right)
        ancestor = None
        if meeting is not None:
            record = lineage.read_row(reader, meeting).record
            ancestor = lineage.dress(reader, meeting, record)
    return Comparison(ancestor, to_a, to_b, changes)


def _place(reader: Reader, of: Checkpoint) -> Place:
    found = reader.session(records.encode_name(of.session))
    if found is None:
        raise SessionNotFound(f"there is no session {of.session!r}")
    return Place(found[0], of.seq)


def _meet(reader: Reader, a: Place, b: Place) -> tuple[Place | None, Way, Way]:
    """Climb from both, always from the one with more steps, until both are at the same place."""
    ways = [_Climb(reader, a), _Climb(reader, b)]
    while True:
        left, right = ways
        if left.at is None or right.at is None:
            return None, left.way, right.way
        if left.at[0] == right.at[0]:
            return left.at[0], left.way, right.way
        ways[left.at[1].step < right.at[1].step].climb()


class _Climb:
    def __init__(self, reader: Reader, start: Place) -> None:
        self._ancestors: Iterator[tuple[Place, Record]] = lineage.ancestors(reader, start)
        self.way = Way(0, Usage())
        self.at: tuple[Place, Record] | None = next(self._ancestors, None)

    def climb(self) -> None:
        if self.at is not None:
            tokens, cost = self.at[1].extra.get("usage", (0, 0.0))
            steps, usage = self.way
            self.way = Way(steps + 1, usage + Usage(tokens, cost))
        self.at = next(self._ancestors, None)
