"""Watch a session or a whole store for new checkpoints and operations of any process.

A watcher asks the backend from time to time whether there was a commit, which is cheap. Only then
does it read the heads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.errors import UNREADABLE, InvalidRequest
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.model import Operation
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader

    Event = Checkpoint | Operation

_NEVER = object()


class Watcher:
    """Reports the events that come after its creation. `poll()` never waits."""

    def __init__(self, backend: Backend, session: str | None = None) -> None:
        self._backend = backend
        self._name = None if session is None else records.encode_name(session)
        self._version: object = _NEVER
        self._seen: dict[int, tuple[bytes, int, int]] = {}
        """By session: the head's row, and the numbers of the last checkpoint and operation seen."""
        self.poll()

    def poll(self) -> list[Event]:
        """Return the events since the last call, by session, and in commit order within each."""
        version = self._backend.version()
        if version == self._version:
            return []
        first = self._version is _NEVER
        out: list[Event] = []
        with open_reader(self._backend) as reader:
            for number, raw in self._sessions(reader):
                out += self._news(reader, number, raw, quiet=first)
        self._version = version
        return out

    def polls(self, patience: float | None) -> Iterator[list[Event]]:
        """Yield the events since the last time, again and again.

        After an empty list, the caller should wait a little. Ends after `patience` seconds without
        events, and when the store is closed.
        """
        quiet_since = time.monotonic()
        while True:
            try:
                news = self.poll()
            except InvalidRequest:
                return  # the store is closed
            quiet = time.monotonic() - quiet_since
            if not news and patience is not None and quiet >= patience:
                return
            yield news
            if news:  # the time that the caller takes does not count
                quiet_since = time.monotonic()

    def follow(self, interval: float, patience: float | None) -> Iterator[Event]:
        """Yield events as they are committed. Ends when polls() does."""
        for news in self.polls(patience):
            yield from news
            if not news:
                self._backend.wait(interval)

    def _sessions(self, reader: Reader) -> Iterator[tuple[int, bytes]]:
        if self._name is not None:
            found = reader.session(self._name)
            numbers = set(self._seen) | ({found.number} if found else set())
            for number in sorted(numbers):
                row = reader.session_by_number(number)
                if row is not None:
                    yield number, row.name
            return
        for listed in lineage.all_sessions(reader):
            yield listed.number, listed.name

    def _news(self, reader: Reader, number: int, raw: bytes, *, quiet: bool) -> list[Event]:
        row, last, operations = self._seen.get(number, (b"", 0, 0))
        now = reader.head(number)
        if now is None or now == row:
            return []
        try:
            head = records.unseal_head(number, now)
        except UNREADABLE:
            return []  # verify() reports it
        self._seen[number] = (now, head.last, head.operations)
        if quiet:
            return []
        former = records.former_name(number, raw)
        name = records.shown_name(raw if former is None else former)
        events: list[tuple[int, int, Event]] = []
        at, low = last, last + 1
        while low <= head.last:
            page, low = lineage.listing(reader, number, name, low, head.last)
            events += [(c.seq, 0, c) for c in page]
        for n, body in reader.operations(number, operations + 1, head.operations):
            newest, operation = lineage.read_operation(number, name, n, body)
            at = at if newest is None else newest
            events.append((at, n, operation))
        return [event for _, _, event in sorted(events, key=lambda e: e[:2])]
