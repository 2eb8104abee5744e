"""Watching: what lands in a session or a store, by whichever process, as it lands.

A watcher asks the backend now and then whether anybody has committed, which costs next to nothing,
and looks at heads only then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import lineage
from holdfast.checkpoint import Checkpoint
from holdfast.codec import records
from holdfast.errors import UNREADABLE, InvalidRequest
from holdfast.model import Operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Backend, Reader

    Event = Checkpoint | Operation

_PAGE = 500
_NEVER = object()


class Watcher:
    """From now on. `poll()` never waits."""

    def __init__(self, backend: Backend, session: str | None = None) -> None:
        self._backend = backend
        self._name = None if session is None else records.encode_name(session)
        self._version: object = _NEVER
        self._seen: dict[int, tuple[bytes, int, int]] = {}
        """By session: the head's row, and how many checkpoints and operations were told of."""
        self.poll()

    def poll(self) -> list[Event]:
        """What has landed since the last time, session by session, each in the order it landed."""
        version = self._backend.version()
        if version == self._version:
            return []
        first = self._version is _NEVER
        out: list[Event] = []
        with self._backend.reader() as reader:
            for number, raw in self._sessions(reader):
                out += self._news(reader, number, raw, quiet=first)
        self._version = version
        return out

    def follow(self, interval: float, patience: float | None) -> Iterator[Event]:
        """Yield what lands; end after so many seconds without news, or when the store is closed."""
        quiet_since = time.monotonic()
        while True:
            try:
                news = self.poll()
            except InvalidRequest:
                return  # closed
            yield from news
            now = time.monotonic()
            if news:
                quiet_since = now
            elif patience is not None and now - quiet_since >= patience:
                return
            else:
                self._backend.wait(interval)

    def _sessions(self, reader: Reader) -> Iterator[tuple[int, bytes]]:
        if self._name is not None:
            found = reader.session(self._name)
            numbers = set(self._seen) | ({found[0]} if found else set())
            for number in sorted(numbers):
                row = reader.session_by_number(number)
                if row is not None:
                    yield number, row[0]
            return
        after: bytes | None = None
        while page := reader.sessions(after, _PAGE):
            for number, raw, _ in page:
                yield number, raw
            after = page[-1][1]

    def _news(self, reader: Reader, number: int, raw: bytes, *, quiet: bool) -> list[Event]:
        row, last, operations = self._seen.get(number, (b"", 0, 0))
        now = reader.head(number)
        if now is None or now == row:
            return []
        try:
            head = records.unseal_head(number, now)
        except UNREADABLE:
            return []  # verify() tells of it
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
