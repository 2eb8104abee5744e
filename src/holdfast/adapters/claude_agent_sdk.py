"""Transcripts of the Claude Agent SDK: `session_store=HoldfastSessionStore("agents.db")`.

A transcript is a session with the name "project/session". The name of a subagent's transcript is
"project/session/subpath". The state is {"entries": […]}, and each append is one checkpoint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import anyio
from claude_agent_sdk import SessionStore, fold_session_summary

from holdfast import Checkpoint, Session, SessionInfo, Store, Usage
from holdfast.adapters.base import (
    Host,
    Hosted,
    finished,
    foreign_session,
    list_of_dicts,
    read_head,
    retried_on,
    sessions_below,
    value_at,
)
from holdfast.aio import Lane
from holdfast.errors import HeadMoved, InvalidRequest, NotFound, SessionNotFound

if TYPE_CHECKING:
    from claude_agent_sdk import (
        SessionKey,
        SessionListSubkeysKey,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
    )

    Entry = dict[str, Any]

P = ParamSpec("P")
T = TypeVar("T")

_SUMMARY = "summary"
"""The key in a checkpoint's meta. The SDK makes the summary, and lists sessions by it."""
_TOKENS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)
_NO_TOKENS = [0] * len(_TOKENS)
_REMEMBERED = 512
"""How many transcripts are remembered with the ids of their entries."""


def _on_any_loop(
    method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a method work on trio, too: there it runs in a thread with its own asyncio loop."""

    @wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        called = method(*args, **kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with anyio.CancelScope(shield=True):  # a call that is cancelled completes
                return await anyio.to_thread.run_sync(asyncio.run, called)
        return await called

    return run


class HoldfastSessionStore(Hosted, SessionStore):
    """Keeps transcripts in a store: one that you pass in, or a URL, which is opened and closed.

    Entries are durable when append() returns. An entry whose `uuid` is already in the transcript is
    left out. An append that is cancelled completes first. It works on asyncio and on trio.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], *, agent: str | None = "claude"
    ) -> None:
        self.host, self._agent = Host(store), agent
        self._transcripts: dict[str, _Transcript] = {}

    # -- the protocol --------------------------------------------------------------------------

    @_on_any_loop
    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        transcript, new = self._transcript(key), list_of_dicts("entries", entries)
        if new:
            await finished(transcript.lane.call(transcript.append, new))

    @_on_any_loop
    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return the entries, or None for a key that was never written or is deleted."""
        name = _name(key)
        entries = await self.host.call(self._load, name)
        return cast("list[SessionStoreEntry] | None", entries)

    @_on_any_loop
    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """List the main transcripts of a project.

        `mtime` is the time of the head in milliseconds, or 0 if the head is damaged. No two are
        equal: of heads in the same millisecond, the later ones get the next milliseconds.
        """
        found = await self.host.call(lambda: [*self._mains(project_key)])
        times = _mtimes(found)
        return [{"session_id": id, "mtime": times[id]} for id, _ in found]

    @_on_any_loop
    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        return await self.host.call(self._summaries, project_key)

    @_on_any_loop
    async def delete(self, key: SessionKey) -> None:
        """Delete a transcript, and those of its subagents. undo() restores each until gc()."""
        name, main = _name(key), key.get("subpath") is None
        await finished(self.host.call(self._delete, name, main))

    @_on_any_loop
    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        prefix = _name(key) + "/"
        infos = await self.host.call(lambda: [*sessions_below(self.store, prefix)])
        return [info.name[len(prefix) :] for info in infos if info.head or info.damaged]

    @_on_any_loop
    async def aclose(self) -> None:
        """Finish earlier calls, then close the store if it was opened here. Idempotent."""
        await super().aclose()

    # -- behind it -----------------------------------------------------------------------------

    def _transcript(self, key: SessionKey) -> _Transcript:
        name = _name(key)
        found = self._transcripts.pop(name, None)
        if found is None:
            main = None if key.get("subpath") is None else _main_name(key)
            found = _Transcript(self.store, name, self._agent, main, self.host.lane())
            idle = [name for name, each in self._transcripts.items() if not each.lane.calls]
            for old in idle[:-_REMEMBERED]:
                del self._transcripts[old]
        self._transcripts[name] = found  # the dict is ordered by last use
        return found

    def _load(self, name: str) -> list[Entry] | None:
        session = self.store.session(name)
        try:
            return _entries(session, session.load())
        except NotFound:
            return None

    def _mains(self, project_key: str) -> Iterator[tuple[str, SessionInfo]]:
        """Yield the ids and infos of the main transcripts of a project."""
        prefix = _escape("project_key", project_key) + "/"
        for info in sessions_below(self.store, prefix):
            rest = info.name[len(prefix) :]
            if "/" not in rest and (info.head or info.damaged):
                yield _unescape(rest), info

    def _summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        out: list[SessionSummaryEntry] = []
        found = [*self._mains(project_key)]
        times = _mtimes(found)
        for id, info in found:
            if info.head is None:
                continue
            data = info.head.meta.get(_SUMMARY)
            if data is None:  # a fork, or a checkpoint that this adapter did not make
                data = _fold(None, id, self._load(info.name) or [])
            out.append({"session_id": id, "mtime": times[id], "data": data})
        return out

    def _delete(self, name: str, main: bool) -> None:  # noqa: FBT001
        """Delete transcripts, the main one last: after a crash it can be deleted again."""
        below = [info.name for info in sessions_below(self.store, name + "/")] if main else []
        for each in (*below, name):
            with suppress(SessionNotFound):
                self.store.session(each).delete()


class _Transcript:
    """Appends to one transcript, in one worker at a time.

    It reads the ids of the entries once, and again when another writer has moved the head.
    """

    def __init__(
        self, store: Store, name: str, agent: str | None, main: str | None, lane: Lane
    ) -> None:
        self.lane = lane
        self._store, self._name, self._agent, self._main = store, name, agent, main
        self._opened: Session | None = None
        self._contents: _Contents | None = None

    @retried_on(HeadMoved)
    def append(self, entries: list[Entry]) -> None:
        session, contents = self._read()
        new = contents.without_repeats(entries)
        if len(new) < len(entries) and session.head != contents.head:
            # The repeated entries may have been removed since the contents were read.
            self._contents = None
            session, contents = self._read()
            new = contents.without_repeats(entries)
        if not new:
            return
        self._contents = None  # unknown until the write has succeeded
        contents.head = session.append("entries", *new, **self._fields(contents, new))
        self._contents = contents

    def _read(self) -> tuple[Session, _Contents]:
        if self._opened is None:
            self._opened = self._store.session(self._name, agent=self._agent, parent=self._main)
        if self._contents is None:
            head, state = read_head(self._opened)
            entries = [] if head is None else _entries(self._opened, state)
            kept = None if head is None else head.meta.get(_SUMMARY)
            summary = kept or _fold(None, self._name, entries)
            self._contents = _Contents(head, entries, summary)
        return self._opened, self._contents

    def _fields(self, contents: _Contents, new: Sequence[Entry]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        kind = new[-1].get("type")
        if isinstance(kind, str) and kind:
            fields["trigger"] = kind
        if (usage := contents.add(new)).tokens:
            fields["usage"] = usage
        if self._main is None:
            contents.summary = _fold(contents.summary, self._name, new)
            fields["meta"] = {_SUMMARY: contents.summary}
        return fields


class _Contents:
    """The parts of a transcript that the next append needs, at one head."""

    def __init__(
        self, head: Checkpoint | None, entries: list[Entry], summary: dict[str, Any]
    ) -> None:
        self.head, self.summary = head, summary
        self._ids: set[str] = set()
        self._message: tuple[Any, list[int]] = (None, _NO_TOKENS)
        """The id of the newest message, and its tokens by kind."""
        self.add(entries)

    def without_repeats(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries without those whose uuid is in the transcript or comes twice."""
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

    def add(self, entries: Sequence[Entry]) -> Usage:
        """Add entries and return their usage.

        A message may be several entries. Each of them reports the tokens of the message so far.
        """
        total = Usage()
        for entry in entries:
            if isinstance(uuid := entry.get("uuid"), str):
                self._ids.add(uuid)
            usage = value_at(entry, "message", "usage")
            if entry.get("type") != "assistant" or not isinstance(usage, dict):
                continue
            id = value_at(entry, "message", "id")
            before = self._message[1] if id is not None and id == self._message[0] else _NO_TOKENS
            counts = [n if type(n := usage.get(name)) is int else 0 for name in _TOKENS]
            most = [max(pair) for pair in zip(before, counts, strict=True)]
            more = [a - b for a, b in zip(most, before, strict=True)]
            model = value_at(entry, "message", "model")
            known = model if isinstance(model, str) and model else None
            total += Usage.of(dict(zip(_TOKENS, more, strict=True)), model=known)
            self._message = (id, most)
        return total


def _entries(session: Session, state: Any) -> list[Entry]:
    entries = state.get("entries") if type(state) is dict and len(state) == 1 else None
    if type(entries) is not list:
        raise foreign_session(session, "transcript of the Claude Agent SDK", "project key")
    return entries


def _fold(before: dict[str, Any] | None, id: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the SDK's summary of a transcript: the one before, and new entries."""
    key: SessionKey = {"project_key": "", "session_id": id}
    prev: SessionSummaryEntry | None = None
    if before is not None:
        prev = {"session_id": id, "mtime": 0, "data": before}
    return fold_session_summary(prev, key, cast("list[SessionStoreEntry]", entries))["data"]


def _mtimes(found: Sequence[tuple[str, SessionInfo]]) -> dict[str, int]:
    """Return the times of the heads in milliseconds, each different, by session id."""
    times = {id: 0 for id, info in found if info.head is None}
    heads = [(info.head.created_at, id) for id, info in found if info.head is not None]
    last = 0
    for at, id in sorted(heads):
        last = times[id] = max(int(at.timestamp() * 1000), last + 1)
    return times


# -- names ---------------------------------------------------------------------------------------


def _name(key: SessionKey | SessionListSubkeysKey) -> str:
    """Return the name of the session. Separators within the parts of the key are escaped."""
    if not isinstance(key, dict):
        raise InvalidRequest(f"a key is wanted, not {type(key).__name__}")
    subpath: Any = key.get("subpath")
    if subpath is None:
        return _main_name(key)
    if not isinstance(subpath, str) or not subpath:
        raise InvalidRequest(f"subpath must be a non-empty string, not {subpath!r}")
    return f"{_main_name(key)}/{subpath}"


def _main_name(key: SessionKey | SessionListSubkeysKey) -> str:
    return "/".join([_escape(part, key.get(part)) for part in ("project_key", "session_id")])


def _escape(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a non-empty string, not {value!r}")
    return value.replace("%", "%25").replace("/", "%2F")


def _unescape(text: str) -> str:
    return text.replace("%2F", "/").replace("%25", "%")
