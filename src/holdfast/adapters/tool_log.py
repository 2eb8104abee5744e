"""A log of tool calls that is kept in the state of a session.

An adapter records that a model asks for a call, that the call begins, and what it returns. After a
crash, the log says which calls have a result, which are in doubt, and which never began. It lies in
the state, so rewinds, forks and undo take it along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Entry = dict[str, Any]


class ToolLog:
    """Tool calls by their ids. `entries` is plain data, to be stored in a state:

        {"call_1": {"stage": "done", "call": {…}, "output": "Hotel Sonne"}}

    A call in the stage "asked" had no effect. A call in the stage "started" is in doubt: it may
    have had its effect or not. A call in the stage "done" has an `output`. An entry may have other
    items, which belong to the adapter; if it has a `call`, that is the call as the model wrote it.
    """

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self.entries: dict[str, Entry] = dict(entries or {})
        self._replayable = {id for id in self.entries if not self.is_open(id)}

    def ask(self, calls: Mapping[str, Entry]) -> None:
        """Add the calls of a model's answer. Earlier calls that never began are removed."""
        self.forget([id for id in self.entries if not self.has_begun(id)])
        for id, call in calls.items():
            self.entries[id] = {"stage": "asked", **call}

    def start(self, id: str, call: Entry | None = None) -> None:
        """Record that a call begins. Store the log before the call has any effect.

        `call` is its entry if it is not in the log.
        """
        self.entries[id] = {**self.entries.get(id, call or {}), "stage": "started"}

    def end(self, id: str, output: Any, **details: Any) -> Entry:
        """Record what a call returned, and return its entry. The call need not be in the log."""
        entry = {**self.entries.get(id, {}), **details, "stage": "done", "output": output}
        self.entries[id] = entry
        self._replayable.discard(id)
        return entry

    def forget(self, ids: Iterable[str]) -> None:
        """Remove calls. Ids that are not in the log are ignored."""
        for id in ids:
            self.entries.pop(id, None)

    def has_begun(self, id: str) -> bool:
        """Return whether the call may have had an effect."""
        return id in self.entries and self.entries[id]["stage"] != "asked"

    def is_open(self, id: str) -> bool:
        """Return whether there is no result of the call."""
        return id not in self.entries or self.entries[id]["stage"] != "done"

    def replay(self, id: str, call: Any = None) -> Entry | None:
        """Return the entry of a call that ended before this log was loaded.

        Each result is returned once, so that a tool that is retried runs again. Returns None if
        there is no result, or if it belongs to another call with the same id.
        """
        entry = self.entries.get(id)
        if id not in self._replayable or entry is None or entry.get("call") != call:
            return None
        self._replayable.remove(id)
        return entry
