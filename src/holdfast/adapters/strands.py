"""Strands agents on holdfast: storage for snapshots, and sessions that survive a crash in a tool.

`HoldfastSessionManager("trip-42", "agents.db")` is all an agent needs. `HoldfastStorage` is what it
is built on, for whatever takes a strands.storage.Storage.
"""

from __future__ import annotations

import builtins
import json
import threading
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from strands import Agent
from strands.hooks import MessageAddedEvent
from strands.middleware import ExecuteToolStage, ToolResultEvent
from strands.session import SnapshotSessionManager
from strands.storage import Storage
from strands.types.session import decode_bytes_values, encode_bytes_values

from holdfast.adapters.forking import fork_with
from holdfast.adapters.hosting import Closing, Host, Hosted
from holdfast.checkpoint import Checkpoint
from holdfast.errors import (
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    NotFound,
    NotSerializable,
    SessionExists,
)
from holdfast.model import ToolCall, Usage

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator

    from strands.hooks import HookRegistry
    from strands.middleware import ExecuteToolContext, MiddlewareNext
    from strands.session.snapshot_session_manager import SaveLatestStrategy
    from strands.types.agent import LocalAgent
    from strands.types.events import TypedEvent

    from holdfast.fields import Fields
    from holdfast.session import Session
    from holdfast.store import Store

_META = "strands"
"""What the key is called under which a checkpoint tells how its bytes are made of its state."""

_STYLES: dict[str, dict[str, Any]] = {
    "json": {"ensure_ascii": False},
    "compact json": {"ensure_ascii": False, "separators": (",", ":")},
    "ascii json": {},
}
"""Ways to write JSON. Bytes that none of them makes are kept as they are."""

_HISTORY, _LATEST = "immutable_history/", "snapshot_latest.json"


class HoldfastStorage(Hosted, Storage):
    """A strands Storage: each key is a session of that name, each write a checkpoint of it.

    JSON is stored as the value that it stands for, so that a write costs what changed; what is read
    has the very bytes that were written. The last of several writers wins, and what the others
    wrote stays in the session's history. Durable when `write` returns.
    """

    def __init__(self, store: Store | str | os.PathLike[str]) -> None:
        self.host = Host(store)

    async def write(self, key: str, data: bytes) -> None:
        await self.host.call(self._write, key, data)

    async def read(self, key: str) -> bytes | None:
        return await self.host.call(self._read, key)

    async def delete(self, key: str) -> None:
        """Hide it at once; `undo` brings it back until gc has freed it."""
        await self.host.call(self._delete, key)

    async def list(self, query: str) -> builtins.list[str]:
        return await self.host.call(self._list, query)

    def session(self, key: str) -> Session:
        """The session behind a key. Raises InvalidRequest if it is not of this storage."""
        session = self.store.session(key, agent=_agent(key))
        head = session.head
        if head is not None and _style(session, head) is None:
            raise InvalidRequest(
                f"session {key!r} was not written by strands",
                hint="use another session_id, or another store",
            )
        return session

    def _write(self, key: str, data: bytes) -> None:
        if not isinstance(data, bytes):
            raise InvalidRequest(f"bytes are wanted for {key!r}, not {type(data).__name__}")
        session = self.session(key)
        style, value = _decode(data)
        while True:
            fields = _fields(style, value, session.head)
            try:
                if not session.exists() and _HISTORY in key:
                    self._keep(session, key, value, fields)
                else:
                    session.save(value, **fields)
                return
            except (HeadMoved, SessionExists):  # the last one wins
                session.refresh()
            except NotSerializable:  # nested deeper than states may be
                if style == "bytes":
                    raise
                style, value = "bytes", {"bytes": data}

    def _keep(self, session: Session, key: str, value: Any, fields: Fields) -> None:
        """Begin a session with a snapshot that shares its data with the latest one."""
        latest = self.session(key.partition(_HISTORY)[0] + _LATEST)
        if latest.head is None:
            session.save(value, **fields)
        else:
            fork_with(latest, key, value, **fields)

    def _read(self, key: str) -> bytes | None:
        session = self.session(key)
        try:
            checkpoint = session.get()
            style, value = _style(session, checkpoint), session.load(checkpoint)
        except NotFound:
            return None
        return _encode(style or "json", value)

    def _delete(self, key: str) -> None:
        session = self.session(key)
        try:
            session.delete()
        except NotFound:
            return

    def _list(self, prefix: str) -> builtins.list[str]:
        keys = []
        if prefix and (head := (exact := self.store.session(prefix)).head) is not None:
            keys += [prefix] if _style(exact, head) is not None else []
        for info in self.store.sessions(after=prefix or None):
            if not info.name.startswith(prefix):
                break
            session = self.store.session(info.name)
            if info.head is not None and _style(session, info.head) is not None:
                keys.append(info.name)
        return sorted(keys)


class HoldfastSessionManager(Closing, SnapshotSessionManager):
    """A SnapshotSessionManager on holdfast that keeps each message and each tool's result.

    A restored agent that is called without a prompt goes on where it was: of the tools that the
    model asked for last, those that had returned give their recorded results and are not run.
    """

    def __init__(
        self,
        session_id: str,
        store: HoldfastStorage | Store | str | os.PathLike[str],
        *,
        save_latest_on: SaveLatestStrategy = "message",
        **options: Any,
    ) -> None:
        self._given = isinstance(store, HoldfastStorage)
        self.storage = store if isinstance(store, HoldfastStorage) else HoldfastStorage(store)
        self._journals: dict[str, _Journal] = {}
        self._failed: HoldfastError | None = None
        super().__init__(session_id, storage=self.storage, save_latest_on=save_latest_on, **options)

    def close(self) -> None:
        """Close the store if it was opened here. Where no loop is running."""
        if not self._given:
            self.storage.close()

    async def aclose(self) -> None:
        """Close the store if it was opened here, when calls made before are finished."""
        if not self._given:
            await self.storage.aclose()

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        super().register_hooks(registry, **kwargs)
        registry.add_callback(MessageAddedEvent, self._tell)

    def initialize(self, agent: LocalAgent, **kwargs: Any) -> None:
        super().initialize(agent, **kwargs)
        if isinstance(agent, Agent):
            key = f"session/{self.session_id}/scopes/agent/{agent.agent_id}/tool_results.json"
            self._journals[agent.agent_id] = _Journal(self.storage, key)
            agent.add_middleware(ExecuteToolStage, self._execute)

    async def _execute(
        self, context: ExecuteToolContext, run: MiddlewareNext[ExecuteToolContext, TypedEvent]
    ) -> AsyncGenerator[TypedEvent, None]:
        """Around a tool: its recorded result, or it runs, and its result is recorded."""
        asked, journal = _Asked.of(context), self._journals[context.agent.agent_id]
        if asked is not None:
            known = await self.storage.host.call(journal.find, asked)
            if known is not None:
                yield ToolResultEvent(known)
                return
        async with aclosing(run(context)) as events:
            async for event in events:
                if asked is not None and isinstance(event, ToolResultEvent):
                    await self._record(journal, asked, event.tool_result)
                yield event

    async def _record(self, journal: _Journal, asked: _Asked, result: Any) -> None:
        if "cancelled" in result:
            return  # it never ran
        try:
            await self.storage.host.call(journal.record, asked, result)
        except HoldfastError as e:
            # Raised here, it would become an error of the tool, which has done its work.
            self._failed = e

    def _tell(self, event: MessageAddedEvent[Any]) -> None:  # noqa: ARG002
        """End the run if a result could not be recorded."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


class _Asked(NamedTuple):
    """A tool that the last message of a conversation asks for."""

    message: str
    tool: Any

    @classmethod
    def of(cls, context: ExecuteToolContext) -> _Asked | None:
        """None if it is called by the program itself."""
        last = context.agent.messages[-1] if context.agent.messages else None
        id = context.tool_use["toolUseId"]
        for tool in _blocks(last, "toolUse"):
            if tool.get("toolUseId") == id:
                named = _name(last) or len(context.agent.messages)
                return cls(str(named), encode_bytes_values(tool))
        return None


class _Journal:
    """Results of the tools that one message asked for: `{"message": …, "results": […]}`."""

    def __init__(self, storage: HoldfastStorage, key: str) -> None:
        self._storage, self._key = storage, key
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._message: str | None = None
        """To which the results belong that are stored."""
        self._known: list[Any] | None = None
        """Results that were there when this began: each is used once, lest retries are in vain."""

    def find(self, asked: _Asked) -> Any:
        with self._lock:
            self._open()
            if self._message == asked.message:
                for each in reversed(self._known or []):
                    if each["tool"] == asked.tool:
                        self._known = [k for k in self._known or [] if k["tool"] != asked.tool]
                        return decode_bytes_values(each["result"])
            return None

    def record(self, asked: _Asked, result: Any) -> None:
        item = {"tool": asked.tool, "result": encode_bytes_values(result)}
        fields: Fields = {"trigger": "tool_call", "status": "completed"}
        fields["meta"] = {_META: {"style": "json"}}
        with self._lock:
            while True:
                session = self._open()
                try:
                    if self._message == asked.message:
                        session.append("results", item, **fields)
                    else:
                        session.save({"message": asked.message, "results": [item]}, **fields)
                        self._message, self._known = asked.message, []
                    return
                except HeadMoved:  # another process runs this session, or somebody rewound it
                    self._session = None

    def _open(self) -> Session:
        if self._session is None:
            session = self._storage.session(self._key)
            try:
                state = session.load()
            except NotFound:
                state = {"message": None, "results": []}
            self._session, self._message = session, state["message"]
            if self._known is None:
                self._known = state["results"]
        return self._session


# -- bytes and states --------------------------------------------------------------------------


def _decode(data: bytes) -> tuple[str, Any]:
    """A state to store for the bytes, and how they are made of it again."""
    try:
        value = json.loads(data)
        for style, options in _STYLES.items():
            if json.dumps(value, **options).encode(errors="surrogatepass") == data:
                return style, value
    except (ValueError, RecursionError):
        pass  # not JSON, or too deep
    try:
        return "text", {"text": data.decode()}
    except UnicodeDecodeError:
        return "bytes", {"bytes": data}


def _encode(style: str, value: Any) -> bytes:
    if style == "bytes":
        return bytes(value["bytes"])
    if style == "text":
        return str(value["text"]).encode()
    if style not in _STYLES:
        raise InvalidRequest(f"written by a newer version, as {style!r}", hint="upgrade holdfast")
    return json.dumps(value, **_STYLES[style]).encode()


def _meta(session: Session, checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What was noted with it, or for a fork with what it was forked from. None if it is foreign."""
    for each in session.history(checkpoint):
        found = each.meta.get(_META)
        if found is not None or each.operation != "fork":
            return found if isinstance(found, Mapping) else None
    return None


def _style(session: Session, checkpoint: Checkpoint) -> str | None:
    found = checkpoint.meta.get(_META) or _meta(session, checkpoint)
    return found["style"] if isinstance(found, Mapping) and "style" in found else None


# -- what a snapshot tells ---------------------------------------------------------------------


def _agent(key: str) -> str | None:
    """The agent's id in keys such as session/…/scopes/agent/<id>/snapshots/…"""
    _, found, rest = key.partition("/scopes/agent/")
    return rest.split("/")[0] or None if found else None


def _fields(style: str, value: Any, head: Checkpoint | None) -> Fields:
    data = value.get("data") if isinstance(value, dict) else None
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(messages, list) or style not in _STYLES:
        return {"trigger": "write", "meta": {_META: {"style": style}}}
    last = messages[-1] if messages else None
    asked = _blocks(last, "toolUse")
    noted: dict[str, Any] = {"style": style, "last": _name(last)}
    fields: Fields = {
        "trigger": "message" if messages else "write",
        "pending": [_call(tool) for tool in asked],
        "usage": Usage(_tokens(messages, head)),
        "meta": {_META: noted},
    }
    paused = data.get("interrupt_state")
    if isinstance(paused, dict) and paused.get("activated"):
        fields["status"], fields["reason"] = "halted", "waiting for an answer"
    elif isinstance(last, dict) and last.get("role") == "assistant" and not asked:
        fields["status"] = "completed"
    return fields


def _tokens(messages: builtins.list[Any], head: Checkpoint | None) -> int:
    """What the messages cost that are new since the head."""
    known = (head.meta.get(_META) or {}).get("last") if head is not None else None
    tokens = 0
    for message in reversed(messages):
        if known is not None and _name(message) == known:
            break
        metadata = message.get("metadata") if isinstance(message, dict) else None
        usage = metadata.get("usage") if isinstance(metadata, dict) else None
        count = usage.get("totalTokens") if isinstance(usage, dict) else None
        tokens += count if type(count) is int and count > 0 else 0
    return tokens


def _call(tool: Any) -> ToolCall:
    return ToolCall(str(tool.get("toolUseId")), str(tool.get("name")), tool.get("input"))


def _name(message: Any) -> Any:
    return message.get("tracking_id") if isinstance(message, dict) else None


def _blocks(message: Any, kind: str) -> builtins.list[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    return [b[kind] for b in blocks if isinstance(b, dict) and isinstance(b.get(kind), dict)]
