"""Transcripts of the Claude Agent SDK: `session_store=HoldfastSessionStore("agents.db")`.

A transcript is a session named "project/session", that of a subagent "project/session/subpath". Its
state is {"entries": [...]}, and each append is one checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from claude_agent_sdk import SessionStore, fold_session_summary

from holdfast.adapters.hosting import Host, Hosted, finished
from holdfast.errors import HeadMoved, InvalidRequest, NotFound, SessionNotFound
from holdfast.model import Usage
from holdfast.workers import Lane

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from claude_agent_sdk import (
        SessionKey,
        SessionListSubkeysKey,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
    )

    from holdfast.checkpoint import Checkpoint, SessionInfo
    from holdfast.fields import Fields
    from holdfast.session import Session
    from holdfast.store import Store

    Entry = dict[str, Any]

_SUMMARY = "summary"
"""The name in `meta` of what the SDK lists a session by."""
_TOKENS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)
_LOGS = 512
"""Transcripts whose entries' ids are remembered."""


class HoldfastSessionStore(Hosted, SessionStore):
    """Keeps transcripts in a store: one that was given, or a URL, which is opened and closed.

    What was appended is durable when append() returns, and is there once: an entry whose `uuid` the
    transcript has already is left out. An append that is cancelled comes to its end first.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], *, agent: str | None = "claude"
    ) -> None:
        self.host, self._agent = Host(store), agent
        self._logs: dict[str, _Log] = {}

    # -- the protocol --------------------------------------------------------------------------

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        log, found = self._log(key), _checked(entries)
        if found:
            await finished(log.lane.call(log.append, found))

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """None for a key that was never written, or is deleted."""
        name = _name(key)
        entries = await self.host.call(lambda: _entries(self.store.session(name)))
        return cast("list[SessionStoreEntry] | None", entries)

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """`mtime` is when the newest checkpoint was taken; 0 if that is damaged."""
        found = await self.host.call(lambda: [*self._mains(project_key)])
        return [{"session_id": id, "mtime": _mtime(info.head)} for id, info in found]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        return await self.host.call(self._summaries, project_key)

    async def delete(self, key: SessionKey) -> None:
        """Subagents' transcripts go with the main one. undo() brings each back, until gc()."""
        name, main = _name(key), key.get("subpath") is None
        await finished(self.host.call(self._delete, name, main))

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        prefix = _name(key) + "/"
        infos = await self.host.call(lambda: [*self._under(prefix)])
        return [info.name[len(prefix) :] for info in infos if info.head or info.damaged]

    # -- behind it -----------------------------------------------------------------------------

    def _log(self, key: SessionKey) -> _Log:
        name = _name(key)
        log = self._logs.pop(name, None)
        if log is None:
            main = None if key.get("subpath") is None else _join(key)
            log = _Log(self.store, name, self._agent, main, self.host.lane())
            for old in [n for n, kept in self._logs.items() if not kept.lane.calls][:-_LOGS]:
                del self._logs[old]
        self._logs[name] = log  # the last one used is the last to go
        return log

    def _under(self, prefix: str) -> Iterator[SessionInfo]:
        """Sessions whose names begin so, which lie side by side in the list."""
        return takewhile(lambda s: s.name.startswith(prefix), self.store.sessions(after=prefix))

    def _mains(self, project_key: str) -> Iterator[tuple[str, SessionInfo]]:
        """Main transcripts of a project with their ids."""
        prefix = _escape("project_key", project_key) + "/"
        for info in self._under(prefix):
            rest = info.name[len(prefix) :]
            if "/" not in rest and (info.head or info.damaged):
                yield _unescape(rest), info

    def _summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        out: list[SessionSummaryEntry] = []
        for id, info in self._mains(project_key):
            if info.head is None:
                continue
            data = info.head.meta.get(_SUMMARY)
            if data is None:  # a fork, or what somebody else has saved
                data = _fold(None, id, _entries(self.store.session(info.name)) or [])
            out.append({"session_id": id, "mtime": _mtime(info.head), "data": data})
        return out

    def _delete(self, name: str, main: bool) -> None:  # noqa: FBT001
        """The main one last: after a crash it is still there, to be deleted again."""
        below = [info.name for info in self._under(name + "/")] if main else []
        for each in (*below, name):
            with suppress(SessionNotFound):
                self.store.session(each).delete()


class _Log:
    """A transcript to append to, for one worker at a time.

    It remembers the ids of its entries, which are read once. They hold for one head: whatever
    others do to the session moves that, and they are read again.
    """

    def __init__(
        self, store: Store, name: str, agent: str | None, main: str | None, lane: Lane
    ) -> None:
        self.lane = lane
        self._store, self._name, self._agent, self._main = store, name, agent, main
        self._session: Session | None = None
        self._known: _Known | None = None

    def append(self, entries: list[Entry]) -> None:
        while True:
            session, known = self._look()
            new = known.without_repeats(entries)
            if len(new) < len(entries) and session.head != known.head:
                self._known = None  # nobody knows that they are there still
                continue
            if not new:
                return
            self._known = None  # until it is known to be written
            with suppress(HeadMoved):
                known.head = session.append("entries", *new, **self._fields(known, new))
                self._known = known
                return

    def _look(self) -> tuple[Session, _Known]:
        if self._session is None:
            self._session = self._store.session(self._name, agent=self._agent, parent=self._main)
        while self._known is None:
            head = self._session.refresh()
            with suppress(NotFound):  # deleted since: look again
                entries = (_entries(self._session, head) or []) if head else []
                kept = head.meta.get(_SUMMARY) if head else None
                self._known = _Known(head, entries, kept or _fold(None, self._name, entries))
        return self._session, self._known

    def _fields(self, known: _Known, new: Sequence[Entry]) -> Fields:
        fields: Fields = {}
        kind = new[-1].get("type")
        if isinstance(kind, str) and kind:
            fields["trigger"] = kind
        known.note(new)
        if tokens := known.count(new):
            fields["usage"] = Usage(tokens)
        if self._main is None:
            known.summary = _fold(known.summary, self._name, new)
            fields["meta"] = {_SUMMARY: known.summary}
        return fields


class _Known:
    """What is known of a transcript at one head."""

    def __init__(
        self, head: Checkpoint | None, entries: list[Entry], summary: dict[str, Any]
    ) -> None:
        self.head, self.summary = head, summary
        self._ids: set[str] = set()
        self._message: tuple[Any, int] = (None, 0)
        self.note(entries)
        self.count(entries)

    def without_repeats(self, entries: list[Entry]) -> list[Entry]:
        seen: set[str] = set()
        new = []
        for entry in entries:
            id = entry.get("uuid")
            if isinstance(id, str):
                if id in self._ids or id in seen:
                    continue
                seen.add(id)
            new.append(entry)
        return new

    def note(self, entries: Sequence[Entry]) -> None:
        self._ids.update(id for entry in entries if isinstance(id := entry.get("uuid"), str))

    def count(self, entries: Sequence[Entry]) -> int:
        """Tokens that these entries tell of. Each block of a message tells of all of it so far."""
        total = 0
        for entry in entries:
            message = entry.get("message")
            if entry.get("type") != "assistant" or not isinstance(message, dict):
                continue
            usage, id = message.get("usage"), message.get("id")
            if not isinstance(usage, dict):
                continue
            tokens = sum(n for name in _TOKENS if type(n := usage.get(name)) is int)
            before = self._message[1] if id is not None and id == self._message[0] else 0
            total += max(tokens - before, 0)
            self._message = (id, max(tokens, before))
        return total


def _entries(session: Session, revision: Checkpoint | None = None) -> list[Entry] | None:
    """What a session holds, if it is one of ours; None if it does not exist."""
    try:
        state = session.load(revision)
    except NotFound:
        if revision is not None:
            raise
        return None
    entries = state.get("entries") if type(state) is dict and len(state) == 1 else None
    if type(entries) is not list:
        raise InvalidRequest(
            f"session {session.name!r} is no transcript of the Claude Agent SDK",
            hint='its state would be {"entries": […]}; use another store or project key',
        )
    return entries


def _checked(entries: Any) -> list[Entry]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequest("entries must be a list of dicts")
    return [*entries]


def _fold(before: dict[str, Any] | None, id: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """What the SDK makes of entries; it alone knows what it means."""
    key: SessionKey = {"project_key": "", "session_id": id}
    prev: SessionSummaryEntry | None = None
    if before is not None:
        prev = {"session_id": id, "mtime": 0, "data": before}
    return fold_session_summary(prev, key, cast("list[SessionStoreEntry]", entries))["data"]


def _mtime(head: Checkpoint | None) -> int:
    return 0 if head is None else int(head.created_at.timestamp() * 1000)


# -- names ---------------------------------------------------------------------------------------


def _name(key: SessionKey | SessionListSubkeysKey) -> str:
    """The session's name. What could be taken for a separator in it is escaped."""
    if not isinstance(key, dict):
        raise InvalidRequest(f"a key is wanted, not {type(key).__name__}")
    subpath: Any = key.get("subpath")
    if subpath is None:
        return _join(key)
    if not isinstance(subpath, str) or not subpath:
        raise InvalidRequest(f"subpath must be a non-empty string, not {subpath!r}")
    return f"{_join(key)}/{subpath}"


def _join(key: SessionKey | SessionListSubkeysKey) -> str:
    return "/".join([_escape(part, key.get(part)) for part in ("project_key", "session_id")])


def _escape(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a non-empty string, not {value!r}")
    return value.replace("%", "%25").replace("/", "%2F")


def _unescape(text: str) -> str:
    return text.replace("%2F", "/").replace("%25", "%")
