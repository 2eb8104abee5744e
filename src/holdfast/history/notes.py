"""Notes: small facts in the journal of a session, under a key, such as a checkpoint's key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from holdfast.errors import SessionNotFound
from holdfast.format import records
from holdfast.history import journal as journals
from holdfast.history.journal import NOTE, Journal
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.history.journal import Entry
    from holdfast.storage.contract import Backend

FIRST_NOTE = "$notes"
"""The key in a checkpoint's meta that holds the number of its first note in the journal."""
_RECENT = 1_000
UNCLAIMED = 64
"""gc keeps the notes among this many newest entries even if their checkpoint is not saved yet."""


class Notes:
    """Notes in the journal of a session: facts under a key, such as a checkpoint's key.

    Notes may come before the checkpoint of their key. When that checkpoint is saved, its meta must
    have `first(key)` under the name `Notes.META`: gc keeps its notes, which are those from this
    number on. Safe for threads.
    """

    META = FIRST_NOTE

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend, self._name = backend, name
        self._raw = records.encode_name(name)
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._first: OrderedDict[str, int] = OrderedDict()

    def put(
        self, key: str, facts: dict[str, Any], ready: Callable[[int, str], None] | None = None
    ) -> None:
        """Append a note. It is durable when this returns.

        `ready` is called first, with the number of the session and the key. Raises SessionNotFound.
        """
        journal = self._current_journal()
        if ready is not None:
            ready(journal.session, key)
        with self._lock:
            self._first.setdefault(key, journal.next)
            while len(self._first) > _RECENT:
                self._first.popitem(last=False)
        journal.append({**facts, "what": NOTE, "key": key})

    def first(self, key: str, *, known: bool = False) -> int:
        """Return a lower bound for the numbers of the notes with this key.

        It holds for the notes that were put through this object, and for all future ones. `known`
        skips a lookup, if the caller is certain that the session was not replaced since the last
        call.
        """
        journal = self._journal
        if journal is None or not known:
            try:
                journal = self._current_journal()
            except SessionNotFound:
                return 1
        with self._lock:
            return min(self._first.get(key, journal.next), journal.next)

    def read(
        self, low: int, high: int = records.MAX_SEQ
    ) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield number, key and facts of the notes among the entries [low, high)."""
        with open_reader(self._backend) as reader:
            found = reader.session(self._raw)
            if found is None:
                return
            for number, facts in journals.read(reader, found.number, low, high):
                if facts["what"] == NOTE:
                    yield number, facts["key"], facts

    def _current_journal(self) -> Journal:
        """Return the journal of the session that has the name now."""
        with open_reader(self._backend) as reader:
            found = reader.session(self._raw)
            if found is None:
                with self._lock:
                    self._journal = None
                    self._first.clear()
                raise SessionNotFound(f"there is no session {self._name!r}")
            with self._lock:
                if self._journal is None or self._journal.session != found.number:
                    self._journal = Journal(self._backend, found.number, None)
                    self._journal.next = reader.last_entry(found.number) + 1
                    self._first.clear()
                return self._journal


def unclaimed(newest: Iterable[Entry], keys: set[str | None]) -> list[int]:
    """Return the numbers of the notes among the newest entries whose checkpoint is not saved yet.

    `keys` are those of the checkpoints that exist.
    """
    return [n for n, facts in newest if facts["what"] == NOTE and facts["key"] not in keys]
