"""Storage and sessions for Strands agents.

`HoldfastSessionManager("trip-42", "agents.db")` makes an agent durable. It is built on
`HoldfastStorage`, which works wherever Strands takes a `strands.storage.Storage`.
"""

from __future__ import annotations

import builtins
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from strands import Agent
from strands.hooks import MessageAddedEvent
from strands.middleware import ExecuteToolStage, ToolResultEvent
from strands.session import SnapshotSessionManager
from strands.storage import Storage
from strands.storage.storage import _EPHEMERAL
from strands.types.exceptions import StorageError
from strands.types.session import decode_bytes_values, encode_bytes_values

from holdfast import Checkpoint, Session, Store, ToolCall, Usage
from holdfast.adapters.base import (
    Host,
    Hosted,
    find_meta,
    foreign_session,
    read_head,
    retried_on,
    sessions_below,
    value_at,
)
from holdfast.adapters.tool_log import ToolLog
from holdfast.errors import (
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    NotFound,
    NotSerializable,
    SessionExists,
)

if TYPE_CHECKING:
    from strands.hooks import HookRegistry
    from strands.middleware import ExecuteToolContext, MiddlewareNext
    from strands.session.snapshot_session_manager import SaveLatestStrategy
    from strands.types.agent import LocalAgent
    from strands.types.events import TypedEvent


P = ParamSpec("P")
T = TypeVar("T")

_META = "strands"
"""The key in a checkpoint's meta. Its `style` says how the bytes are made from the state."""

_STYLES: dict[str, dict[str, Any]] = {
    "json": {"ensure_ascii": False},
    "compact json": {"ensure_ascii": False, "separators": (",", ":")},
    "ascii json": {},
}
"""Options of json.dumps(). Data that none of them makes has the style "text" or "bytes"."""

_HISTORY, _LATEST = "immutable_history/", "snapshot_latest.json"


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise errors of holdfast and of the system as StorageError."""
    try:
        yield
    except (HoldfastError, OSError) as e:
        raise StorageError(str(e)) from e


class HoldfastStorage(Hosted, Storage):
    """A Storage of Strands. Each key is a session of that name, and each write is a checkpoint.

    JSON is stored as a value, so a write costs what changed. read() returns exactly the bytes that
    were written. A write is durable when write() returns. If several writers write to one key, the
    last one wins, and the session's history has all. Errors are raised as StorageError, with
    holdfast's error as the cause.
    """

    def __init__(self, store: Store | str | os.PathLike[str]) -> None:
        self.host = Host(store)
        if self.store.kind == "memory":
            self._ephemeral = _EPHEMERAL  # makes snapshots contain the data that they need

    async def write(self, key: str, data: bytes) -> None:
        await self._call(self._write, key, data)

    async def read(self, key: str) -> bytes | None:
        return await self._call(self._read, key)

    async def delete(self, key: str) -> None:
        """Delete a key, if it exists. `undo` restores it until gc has freed it."""
        await self._call(self._delete, key)

    async def list(self, query: str) -> builtins.list[str]:
        return await self._call(self._list, query)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with _storage_errors():
            return await self.host.call(function, *args, **kwargs)

    def session(self, key: str) -> Session:
        """Return the session of a key. Raises InvalidRequest if it holds other data."""
        session = self.store.session(key, agent=_agent_id(key))
        head = session.head
        if head is not None and _style(session, head) is None:
            raise foreign_session(session, "key of a Strands storage", "session_id")
        return session

    def _write(self, key: str, data: bytes) -> None:
        if not isinstance(data, bytes):
            raise InvalidRequest(f"bytes are wanted for {key!r}, not {type(data).__name__}")
        style, value = _decode(data)
        try:
            self._save(key, style, value)
        except NotSerializable:  # nested deeper than a state may be
            if style == "bytes":
                raise
            self._save(key, "bytes", {"bytes": data})

    @retried_on(HeadMoved, SessionExists)
    def _save(self, key: str, style: str, value: Any) -> None:
        session = self.session(key)
        fields = _fields(style, value, session.head)
        if _HISTORY in key and not session.exists():
            # An immutable snapshot shares its data with the latest one, if it is a fork of it.
            latest = self.session(key.partition(_HISTORY)[0] + _LATEST)
            if latest.head is not None:
                latest.fork(key, state=value, **fields)
                return
        session.save(value, **fields)

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
        with suppress(NotFound):
            session.delete()

    def _list(self, prefix: str) -> builtins.list[str]:
        found = [
            (self.store.session(info.name), info.head)
            for info in sessions_below(self.store, prefix)
        ]
        if prefix:
            exact = self.store.session(prefix)
            found.append((exact, exact.head))
        keys = [s.name for s, head in found if head is not None and _style(s, head) is not None]
        return sorted(keys)


class HoldfastSessionManager(Hosted, SnapshotSessionManager):
    """A SnapshotSessionManager that stores each message and each result of a tool in holdfast.

    A restored agent that is called without a prompt continues with the tools that the model asked
    for last. Tools that had returned give their recorded results and are not run again.
    """

    def __init__(
        self,
        session_id: str,
        store: HoldfastStorage | Store | str | os.PathLike[str],
        *,
        save_latest_on: SaveLatestStrategy = "message",
        **options: Any,
    ) -> None:
        if isinstance(store, HoldfastStorage):
            self.storage, self.host = store, store.host.lent()
        else:
            self.storage = HoldfastStorage(store)
            self.host = self.storage.host
        self._results: dict[str, _ToolResults] = {}
        """By the ids of agents."""
        self._failure: StorageError | None = None
        """The result of a tool could not be recorded; see _record()."""
        super().__init__(session_id, storage=self.storage, save_latest_on=save_latest_on, **options)

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        super().register_hooks(registry, **kwargs)
        registry.add_callback(MessageAddedEvent, self._raise_failure)

    def initialize(self, agent: LocalAgent, **kwargs: Any) -> None:
        super().initialize(agent, **kwargs)
        if isinstance(agent, Agent):
            key = f"session/{self.session_id}/scopes/agent/{agent.agent_id}/tool_results.json"
            self._results[agent.agent_id] = _ToolResults(self.storage, key)
            agent.add_middleware(ExecuteToolStage, self._execute)

    async def _execute(
        self, context: ExecuteToolContext, run: MiddlewareNext[ExecuteToolContext, TypedEvent]
    ) -> AsyncGenerator[TypedEvent, None]:
        """Return the recorded result of a tool, or run the tool and record its result."""
        call, results = _Call.requested(context), self._results[context.agent.agent_id]
        if call is not None:
            with _storage_errors():
                known = await self.host.call(results.find, call)
            if known is not None:
                yield ToolResultEvent(known)
                return
        async with aclosing(run(context)) as events:
            async for event in events:
                if call is not None and isinstance(event, ToolResultEvent):
                    await self._record(results, call, event.tool_result)
                yield event

    async def _record(self, results: _ToolResults, call: _Call, result: Any) -> None:
        if "cancelled" in result:
            return  # the tool never ran
        try:
            with _storage_errors():
                await self.host.call(results.record, call, result)
        except StorageError as e:
            # Strands would give an error raised here to the model, as if the tool had failed.
            self._failure = e

    def _raise_failure(self, event: MessageAddedEvent[Any]) -> None:  # noqa: ARG002
        """End the agent's run if a result could not be recorded."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class _Call(NamedTuple):
    """A tool call that the last message of a conversation asks for."""

    message: str
    """The id of that message, or its position if it has none."""
    tool_use: Any

    @classmethod
    def requested(cls, context: ExecuteToolContext) -> _Call | None:
        """Return the call that is to be executed, or None if the program makes it by itself."""
        messages = context.agent.messages
        last = messages[-1] if messages else None
        for tool_use in _blocks(last, "toolUse"):
            if tool_use.get("toolUseId") == context.tool_use["toolUseId"]:
                message = _tracking_id(last) or len(messages)
                return cls(str(message), encode_bytes_values(tool_use))
        return None

    @property
    def id(self) -> str:
        return str(self.tool_use["toolUseId"])


class _ToolResults:
    """Results of the tool calls of one message, in a session with this state:

        {"message": "…", "results": {…}}

    `message` is that of the calls, and `results` are the entries of a ToolLog.
    """

    def __init__(self, storage: HoldfastStorage, key: str) -> None:
        self._storage, self._key = storage, key
        self._lock = threading.Lock()
        self._opened: tuple[Session, str | None, ToolLog] | None = None
        """The session, the message and its log, unless another writer came first."""

    def find(self, call: _Call) -> Any:
        """Return the result of a call that ended before this agent was restored, or None."""
        with self._lock:
            _, message, log = self._open()
            entry = log.replay(call.id, call.tool_use) if message == call.message else None
            return None if entry is None else decode_bytes_values(entry["output"])

    @retried_on(HeadMoved)
    def record(self, call: _Call, result: Any) -> None:
        fields: dict[str, Any] = {"trigger": "tool_call", "status": "completed"}
        fields["meta"] = {_META: {"style": "json"}}
        with self._lock:
            session, message, log = self._open()
            self._opened = None  # unknown until the write has succeeded
            if message != call.message:
                log = ToolLog()
            entry = log.end(call.id, encode_bytes_values(result), call=call.tool_use)
            if message == call.message:
                session.patch(set={("results", call.id): entry}, **fields)
            else:
                session.save({"message": call.message, "results": log.entries}, **fields)
            self._opened = session, call.message, log

    def _open(self) -> tuple[Session, str | None, ToolLog]:
        if self._opened is None:
            session = self._storage.session(self._key)
            head, state = read_head(session)
            stored = {"message": None, "results": {}} if head is None else state
            self._opened = session, stored["message"], ToolLog(stored["results"])
        return self._opened


# -- bytes and states ------------------------------------------------------------------------------


def _decode(data: bytes) -> tuple[str, Any]:
    """Return a style, and the state that becomes these bytes in that style."""
    try:
        value = json.loads(data)
        for style, options in _STYLES.items():
            if json.dumps(value, **options).encode(errors="surrogatepass") == data:
                return style, value
    except (ValueError, RecursionError):
        pass  # not JSON, or nested too deeply
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


def _style(session: Session, checkpoint: Checkpoint) -> str | None:
    """Return the style of a checkpoint, or None if this adapter did not write it."""
    found = find_meta(session, checkpoint, _META)
    return None if found is None else found[1].get("style")


# -- fields of checkpoints -------------------------------------------------------------------------


def _agent_id(key: str) -> str | None:
    """Return the agent's id in a key such as session/…/scopes/agent/<id>/snapshots/…"""
    _, found, rest = key.partition("/scopes/agent/")
    return rest.split("/")[0] or None if found else None


def _fields(style: str, value: Any, head: Checkpoint | None) -> dict[str, Any]:
    """Return the fields of the checkpoint for a value, which may be a snapshot of an agent."""
    messages = value_at(value, "data", "messages")
    if not isinstance(messages, list) or style not in _STYLES:
        return {"trigger": "write", "meta": {_META: {"style": style}}}
    last = messages[-1] if messages else None
    requested = _blocks(last, "toolUse")
    fields: dict[str, Any] = {
        "trigger": "message" if messages else "write",
        "pending": [
            ToolCall(str(call.get("toolUseId")), str(call.get("name")), call.get("input"))
            for call in requested
        ],
        "usage": _new_usage(messages, head),
        "meta": {_META: {"style": style, "last": _tracking_id(last)}},
    }
    if value_at(value, "data", "interrupt_state", "activated"):
        fields["status"], fields["reason"] = "halted", "waiting for an answer"
    elif value_at(last, "role") == "assistant" and not requested:
        fields["status"] = "completed"
    return fields


def _new_usage(messages: list[Any], head: Checkpoint | None) -> Usage:
    """Return the usage of the messages that came after the head."""
    last = None if head is None else value_at(head.meta, _META, "last")
    usage = Usage()
    for message in reversed(messages):
        if last is not None and _tracking_id(message) == last:
            break
        input, output, total = [
            max(n, 0) if type(n := value_at(message, "metadata", "usage", name)) is int else 0
            for name in ("inputTokens", "outputTokens", "totalTokens")
        ]
        usage += Usage(input, output, tokens=max(total, input + output))
    return usage


def _tracking_id(message: Any) -> Any:
    return value_at(message, "tracking_id")


def _blocks(message: Any, kind: str) -> list[Any]:
    """Return the blocks of one kind in a message."""
    content = value_at(message, "content")
    blocks = content if isinstance(content, list) else []
    return [b[kind] for b in blocks if isinstance(value_at(b, kind), dict)]
