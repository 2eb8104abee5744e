"""Counts and sizes of the sessions, checkpoints and rows of a store."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import UNREADABLE
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.lineage import all_rows
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.contract import Backend


class SessionSize(NamedTuple):
    """The number of checkpoints of a session, and the bytes they have added."""

    name: str
    checkpoints: int
    added: int
    """Bytes that the checkpoints of the session have added to the store."""


class Stats(NamedTuple):
    """Counts and sizes of a whole store."""

    sessions: int
    """Number of sessions, without deleted ones."""
    checkpoints: int
    """Number of checkpoints, without deleted ones."""
    deleted: int
    """Checkpoints that are deleted, and that gc() has not freed yet."""
    rows: dict[str, int]
    """Number of stored rows by kind: items, blobs, checkpoints, …"""
    bytes: dict[str, int]
    """Bytes of the stored rows by kind."""
    states: int
    """Bytes that all states would take if each were encoded and stored separately."""
    largest: tuple[SessionSize, ...]
    """The sessions that have added the most bytes, largest first."""

    @property
    def sharing(self) -> float:
        """Return how many times smaller the stored data is than all states stored separately."""
        stored = self.bytes["items"] + self.bytes["blobs"] + self.bytes["checkpoints"]
        return self.states / stored if stored else 1.0


def stats(backend: Backend, largest: int = 10) -> Stats:
    """Return the counts and sizes of a store, with its `largest` sessions.

    Damaged records are counted, but their sizes are not.
    """
    with open_reader(backend) as reader:
        sizes = reader.sizes()
        sessions = checkpoints = states = deleted = 0

        def each() -> Iterator[SessionSize]:
            nonlocal sessions, checkpoints, states, deleted
            for session in lineage.all_sessions(reader):
                number = session.number
                if session.is_deleted:
                    deleted += sum(1 for _ in all_rows(reader, number))
                    continue
                added = count = 0
                gone = {row.seq for row in reader.tombstones(number, 0, records.MAX_SEQ)}
                deleted += len(gone)
                for row in all_rows(reader, number):
                    count += row.seq not in gone
                    try:
                        record = records.unseal_checkpoint(number, *row).record
                    except UNREADABLE:
                        continue
                    states += record.size
                    added += record.added
                sessions += 1
                checkpoints += count
                yield SessionSize(records.shown_name(session.name), count, added)

        top = nlargest(max(largest, 1), each(), key=lambda s: s.added)[:largest]
        return Stats(
            sessions,
            checkpoints,
            deleted,
            {kind: rows for kind, (rows, _) in sizes.items()},
            {kind: size for kind, (_, size) in sizes.items()},
            states,
            tuple(top),
        )
