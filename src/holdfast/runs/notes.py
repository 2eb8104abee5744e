"""Notes: what is kept in a session's journal under a key, beside its checkpoints.

A note may come before the checkpoint that it belongs to. So that not all of a journal must be read
for the notes of one, a checkpoint says in its meta from which entry on they are; below the first
that any checkpoint names, gc frees the entries.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from holdfast.codec import records
from holdfast.errors import SessionNotFound
from holdfast.runs.journal import NOTE, Entry, Journal, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.backends.base import Backend

FROM = "$notes"
"""The key of a checkpoint's meta that names the entry from which on its notes are."""
_RECENT = 1_000
_EARLY = 64
"""So far from the end of a journal, at most, are notes whose checkpoint is still to come."""


class Notes:
    """Those of the session of this name. Safe for threads."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend, self._name = backend, name
        self._raw = records.encode_name(name)
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._first: OrderedDict[str, int] = OrderedDict()

    def put(
        self,
        key: str,
        facts: dict[str, Any],
        ready: Callable[[int, str], None] | None = None,
    ) -> None:
        """Durable when this returns. The session must be there: `ready` gets its number first."""
        journal = self._there()
        if ready is not None:
            ready(journal.session, key)
        with self._lock:
            self._first.setdefault(key, journal.next)
            while len(self._first) > _RECENT:
                self._first.popitem(last=False)
        journal.note({**facts, "what": NOTE, "key": key})

    def first(self, key: str, *, known: bool = False) -> int:
        """The entry from which on the notes of this key are: those put here, and all to come.

        `known` is for whoever is certain that the session is the one that was here last.
        """
        journal = self._journal
        if journal is None or not known:
            try:
                journal = self._there()
            except SessionNotFound:
                return 1
        with self._lock:
            return min(self._first.get(key, journal.next), journal.next)

    def read(
        self, low: int, high: int = records.MAX_SEQ
    ) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Number, key and facts of the notes from one entry on, up to another."""
        with self._backend.reader() as reader:
            found = reader.session(self._raw)
            if found is None:
                return
            for number, facts in read(reader, found[0], low, high):
                if facts["what"] == NOTE:
                    yield number, facts["key"], facts

    def _there(self) -> Journal:
        with self._backend.reader() as reader:
            found = reader.session(self._raw)
            if found is None:
                with self._lock:
                    self._journal = None
                    self._first.clear()
                raise SessionNotFound(f"there is no session {self._name!r}")
            with self._lock:
                if self._journal is None or self._journal.session != found[0]:
                    self._journal = Journal(self._backend, found[0], None)
                    self._journal.next = reader.last_entry(found[0]) + 1
                    self._first.clear()
                return self._journal


class Early:
    """The newest entries that may be notes of checkpoints to come: of none that is here."""

    def __init__(self, keys: set[str | None]) -> None:
        self._keys = keys
        self._newest: deque[Entry] = deque(maxlen=_EARLY)

    def watch(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for entry in entries:
            self._newest.append(entry)
            yield entry

    @property
    def numbers(self) -> list[int]:
        return [
            entry.number
            for entry in self._newest
            if entry.facts["what"] == NOTE and entry.facts["key"] not in self._keys
        ]
