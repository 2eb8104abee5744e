"""Numbers about a store."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

from holdfast import lineage
from holdfast.codec import records
from holdfast.errors import UNREADABLE
from holdfast.live import all_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Backend, Reader

_PAGE = 500


class SessionSize(NamedTuple):
    name: str
    checkpoints: int
    added: int
    """Bytes that its checkpoints have written."""


class Stats(NamedTuple):
    sessions: int
    checkpoints: int
    deleted: int
    """Checkpoints that are deleted and wait for gc()."""
    rows: dict[str, int]
    """Stored rows by kind: items, blobs, checkpoints, …"""
    bytes: dict[str, int]
    """And how many bytes they hold."""
    states: int
    """What all states would take if each were stored on its own, encoded."""
    largest: tuple[SessionSize, ...]

    @property
    def sharing(self) -> float:
        """How many times smaller the stored data is than all states on their own."""
        stored = self.bytes["items"] + self.bytes["blobs"] + self.bytes["checkpoints"]
        return self.states / stored if stored else 1.0


def stats(backend: Backend, largest: int = 10) -> Stats:
    with backend.reader() as reader:
        sizes = reader.sizes()
        sessions = checkpoints = states = deleted = 0

        def each() -> Iterator[SessionSize]:
            nonlocal sessions, checkpoints, states, deleted
            for number, raw, gone in _sessions(reader):
                if gone:
                    deleted += sum(1 for _ in all_rows(reader, number))
                    continue
                added = count = 0
                deleted += len(reader.tombs(number, 0, records.MAX_SEQ))
                buried = {seq for seq, _ in reader.tombs(number, 0, records.MAX_SEQ)}
                for seq, id, body in all_rows(reader, number):
                    count += seq not in buried
                    try:
                        record = records.unseal_checkpoint(number, seq, id, body).record
                    except UNREADABLE:
                        continue
                    states += record.size
                    added += record.added
                sessions += 1
                checkpoints += count
                yield SessionSize(records.shown_name(raw), count, added)

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


def _sessions(reader: Reader) -> Iterator[tuple[int, bytes, bool]]:
    """Number, name, and whether it is deleted."""
    after: bytes | None = None
    while page := reader.sessions(after, _PAGE):
        for number, raw, _ in page:
            yield number, raw, lineage.is_deleted(reader, number)
        after = page[-1][1]
