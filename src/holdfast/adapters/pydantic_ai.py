"""A store for conversations of pydantic-ai, and a capability that saves a run in progress.

`HoldfastConversationStore("agents.db")` keeps conversations. An agent with the capability
`HoldfastCheckpoints` stores each message and each result of a tool before the run continues.

A conversation is a session of the same name with the state `{"messages": [entry, …]}`. The messages
that a run has added since the last save are in the state's "run". The conversation's record is in
the meta of each checkpoint.
"""

from __future__ import annotations

import copy
import datetime as dt
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_ai import RunContext, ToolReturn
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
)
from pydantic_ai.exceptions import ToolFailedError, ToolRetryError
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RunUsage

from holdfast import Checkpoint, Session, Store, ToolCall, Usage
from holdfast.adapters.base import Host, Hosted, find_meta, foreign_session, retried_on
from holdfast.adapters.tool_log import ToolLog
from holdfast.errors import (
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    NotFound,
    SessionExists,
    SessionNotFound,
    UnsupportedFormat,
)

if TYPE_CHECKING:
    from pydantic_ai._agent_graph import AgentNode
    from pydantic_ai.capabilities import (
        NodeResult,
        ValidatedToolArgs,
        WrapRunHandler,
        WrapToolExecuteHandler,
    )
    from pydantic_ai.models import ModelRequestContext
    from pydantic_ai.run import AgentRunResult
    from pydantic_ai.tools import ToolDefinition

    Scope = str | Callable[[RunContext[Any]], str | None] | None

_META = "pydantic_ai"
_RECORD, _USAGE = TypeAdapter(ConversationRecord), TypeAdapter(RunUsage)
_REMEMBERED = 1_000


class _ConversationMeta(NamedTuple):
    """The meta of the checkpoints of a conversation."""

    record: ConversationRecord | None = None
    run: Mapping[str, Any] | None = None
    """The run whose messages are not saved yet: its `id` and `scope`. If `whole` is true, they are
    the whole history, instead of the stored one."""
    usage: RunUsage = RunUsage()
    """The usage that the checkpoints have counted so far."""

    def to_data(self) -> dict[str, Any]:
        record = None if self.record is None else _RECORD.dump_python(self.record)
        if record is not None:
            record["updated_at"] = record["updated_at"].isoformat()
        run = None if self.run is None else dict(self.run)
        return {_META: {"record": record, "run": run, "usage": _USAGE.dump_python(self.usage)}}


class HoldfastConversationStore(Hosted, ConversationStore):
    """Keeps conversations in a store. A change is durable when its method returns.

    Each entry is written once. A deleted conversation disappears at once, and `undo` restores it
    until gc has freed it. A fork shares its history with the original.
    """

    def __init__(self, store: Store | str | os.PathLike[str]) -> None:
        self.host = Host(store)
        self._lock = threading.Lock()
        self._homes: dict[str, str] = {}
        """The conversations of the entries that were read or named last."""

    async def load(
        self, conversation_id: str, *, limit: int | None = None, scope: str | None = None
    ) -> Conversation | None:
        """Return a conversation with the messages of an unfinished run, or None.

        If it ends in tool calls, agent.run(conversation=…) without a prompt makes these calls.
        """
        while True:
            found = await super().load(conversation_id, limit=limit, scope=scope)
            meta, messages = await self.host.call(self._unsaved, conversation_id)
            revision = None if meta.record is None else meta.record.revision
            if revision != (found.revision if found is not None else None):
                if meta.record is not None and scope not in (None, meta.record.scope):
                    return None
                continue  # another writer saved or deleted it between both reads
            if meta.run is None or (found is None and scope not in (None, meta.run["scope"])):
                return found
            if found is None:
                found = Conversation(conversation_id=conversation_id)
            if meta.run["whole"]:
                found = Conversation(conversation_id=conversation_id, revision=found.revision)
            if messages:  # they answer the calls that the saved conversation waits for
                found.messages.extend(messages)
                found.deferred_tool_requests = None
            found.usage = meta.usage
            return found

    async def interrupted(self) -> list[str]:
        """Return the ids of conversations with an unfinished run, even one that is still active."""
        return await self.host.call(
            lambda: [id for id, meta in self._all() if meta.run is not None]
        )

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        meta = await self.host.call(lambda: self.read_meta(self.session(conversation_id)))
        return meta.record

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        records = [meta.record for _, meta in await self.host.call(self._all) if meta.record]
        found = [record for record in records if scope is None or record.scope == scope]
        return sorted(found, key=lambda record: record.updated_at, reverse=True)[:limit]

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Write the record and all new entries, or nothing. Messages of an unfinished run go."""
        await self.host.call(self._write, record, list(new_entries), expected_revision)

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        await self.host.call(self._delete, conversation_id, expected_revision)

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        return (await self.read_history(entry_id, limit=1))[0]

    async def read_history(
        self, head_id: str | None, *, limit: int | None = None
    ) -> list[ConversationEntry]:
        """Return an entry and those before it, oldest first.

        If the conversation of the entry is not known, all conversations are searched.
        """
        if head_id is None or limit == 0:
            return []
        return await self.host.call(self._history, head_id, limit)

    # -- in a worker ---------------------------------------------------------------------------

    def session(self, conversation_id: str, agent: str | None = None) -> Session:
        return self.store.session(conversation_id, agent=agent)

    def read_meta(self, session: Session, head: Checkpoint | None = None) -> _ConversationMeta:
        """Return the meta at the head. Raises InvalidRequest if the session holds other data."""
        head = head or session.head
        if head is None:
            return _ConversationMeta()
        meta = _meta(session, head)
        if meta is None:
            raise foreign_session(session, "conversation of pydantic-ai", "conversation_id")
        if meta.record is not None:
            with self._lock:
                for entry_id in (meta.record.head_id, *meta.record.branches):
                    if entry_id is not None:
                        self._homes[entry_id] = session.name
                for forgotten in list(self._homes)[:-_REMEMBERED]:
                    del self._homes[forgotten]
        return meta

    def _all(self) -> list[tuple[str, _ConversationMeta]]:
        found = []
        for info in self.store.sessions():
            meta = info.head and _meta(self.session(info.name), info.head)
            if meta:
                found.append((info.name, meta))
        return found

    def _unsaved(self, conversation_id: str) -> tuple[_ConversationMeta, list[ModelMessage]]:
        session = self.session(conversation_id)
        head = session.head
        if head is None:
            return _ConversationMeta(), []
        meta = self.read_meta(session, head)
        if meta.run is None:
            return meta, []
        try:
            return meta, _load_messages(session.load(head)["run"]["messages"])
        except NotFound:  # deleted between both reads
            return _ConversationMeta(), []

    def _history(self, head_id: str, limit: int | None) -> list[ConversationEntry]:
        items: list[Any] | None = None
        if (home := self._homes.get(head_id)) is not None:
            items = _chain(self._items(home), head_id, limit)
        if items is None:
            for name, meta in self._all():
                if meta.record and (items := _chain(self._items(name), head_id, limit)):
                    break
        if not items:
            raise NotFound(f"no conversation has an entry {head_id!r}")
        messages = _load_messages([item["message"] for item in items])
        return [
            ConversationEntry(
                id=item["id"], parent_id=item["parent_id"], message=message, kind=item["kind"]
            )
            for item, message in zip(items, messages, strict=True)
        ]

    def _items(self, conversation_id: str) -> list[Any]:
        try:
            state = self.session(conversation_id).load()
        except NotFound:
            return []
        return list(state["messages"])

    @retried_on(HeadMoved, SessionExists)
    def _write(
        self, record: ConversationRecord, entries: list[ConversationEntry], expected: str | None
    ) -> None:
        items = [
            {
                "id": entry.id,
                "parent_id": entry.parent_id,
                "kind": entry.kind,
                "message": _dump_messages([entry.message])[0],
            }
            for entry in entries
        ]
        session = self.session(record.conversation_id)
        before = self.read_meta(session)
        if (before.record.revision if before.record else None) != expected:
            raise ConversationConflict(record.conversation_id)
        fields: dict[str, Any] = {
            "trigger": _trigger(record, before.record, entries),
            "status": "completed",
            "usage": _usage_since(before.usage, record.usage),
            "meta": _ConversationMeta(record, None, record.usage).to_data(),
        }
        waiting = record.deferred_tool_requests
        if waiting is not None:
            fields["status"], fields["reason"] = "halted", "waiting for the results of tools"
            fields["pending"] = [_to_tool_call(c) for c in (*waiting.calls, *waiting.approvals)]
        if self._has_head(session, record, before.record, entries):
            session.patch(
                append={"messages": items} if items or before == _ConversationMeta() else {},
                drop=["run"] if before.run is not None else [],
                **fields,
            )
        else:
            self._fork(record, fields)

    def _has_head(
        self,
        session: Session,
        record: ConversationRecord,
        before: ConversationRecord | None,
        entries: list[ConversationEntry],
    ) -> bool:
        """Return whether the record's newest entry is in its session or among the new entries."""
        known = {None, *(entry.id for entry in entries)}
        if before is not None:
            known |= {before.head_id, *before.branches}
        return record.head_id in known or any(
            item["id"] == record.head_id for item in self._items(session.name)
        )

    def _fork(self, record: ConversationRecord, fields: dict[str, Any]) -> None:
        """Write a new conversation that starts with the history of another one."""
        source = record.forked_from or self._homes.get(record.head_id or "")
        if source is None or self.session(record.conversation_id).exists():
            raise ConversationConflict(record.conversation_id)
        items = _chain(self._items(source), record.head_id, None)
        if not items:
            raise ConversationConflict(record.conversation_id)
        self.session(source).fork(record.conversation_id, state={"messages": items}, **fields)

    @retried_on(HeadMoved, SessionNotFound)
    def _delete(self, conversation_id: str, expected: str) -> None:
        session = self.session(conversation_id)
        head = session.head
        record = self.read_meta(session, head).record
        if head is None or record is None or record.revision != expected:
            raise ConversationConflict(conversation_id)
        session.delete(expect=head)


# -- runs in progress ------------------------------------------------------------------------------


class HoldfastCheckpoints(Hosted, AbstractCapability[Any]):
    """Saves a run in the session of its conversation: while it is in progress, and at its end.

    A request is durable before it is sent, a response before its tools run, and the result of a
    tool before it is used. A run that continues a loaded conversation whose last response asks for
    tools uses the recorded results, and runs only the tools without one. If another run has written
    to the conversation, ConversationConflict is raised before the run does anything.
    """

    def __init__(
        self,
        conversations: HoldfastConversationStore | Store | str | os.PathLike[str],
        *,
        scope: Scope = None,
    ) -> None:
        if isinstance(conversations, HoldfastConversationStore):
            self.conversations, self.host = conversations, conversations.host.lent()
        else:
            self.conversations = HoldfastConversationStore(conversations)
            self.host = self.conversations.host
        self._scope = scope
        self._run: _UnsavedRun | None = None

    def get_ordering(self) -> CapabilityOrdering:
        return CapabilityOrdering(position="outermost")  # records the results that the model gets

    async def for_run(self, ctx: RunContext[Any]) -> HoldfastCheckpoints:
        bound = copy.copy(self)
        scope = self._scope(ctx) if callable(self._scope) else self._scope
        bound._run = _UnsavedRun(self.conversations, ctx, scope)  # noqa: SLF001
        return bound

    async def before_run(self, ctx: RunContext[Any]) -> None:
        run = self._current()
        await self._call(run.open, list(ctx.messages), copy.copy(ctx.usage))

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        await self._keep(ctx, "model_request")
        return request_context

    async def after_node_run(
        self,
        ctx: RunContext[Any],
        *,
        node: AgentNode[Any],  # noqa: ARG002
        result: NodeResult[Any],
    ) -> NodeResult[Any]:
        if ctx.messages and isinstance(ctx.messages[-1], ModelResponse):
            await self._keep(ctx, "model_response")
        return result

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,  # noqa: ARG002
        args: ValidatedToolArgs,
        handler: WrapToolExecuteHandler,
    ) -> Any:
        run = self._current()
        if not any(call.tool_call_id == each.tool_call_id for each in _requested(ctx.messages)):
            return await handler(args)  # another tool makes this call, not the model
        known = run.log.replay(call.tool_call_id)
        if known is not None:
            return _replay(known["output"])
        await self._keep(ctx, "model_response")
        try:
            result = await handler(args)
        except (ToolRetryError, ToolFailedError) as e:
            await self._call(run.record, call, _failure(e))
            raise
        await self._call(run.record, call, _success(call, result))
        return result

    async def wrap_run(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        handler: WrapRunHandler,
    ) -> AgentRunResult[Any]:
        try:
            return await handler()
        except (ConversationConflict, HoldfastError):
            raise  # the session cannot be written
        except Exception as e:
            await self._call(self._current().fail, f"{type(e).__name__}: {e}")
            raise

    async def after_run(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        result: AgentRunResult[Any],
    ) -> AgentRunResult[Any]:
        await self.conversations.save(result, scope=self._current().scope)
        return result

    def _current(self) -> _UnsavedRun:
        if self._run is None:
            raise InvalidRequest(
                "there is no run", hint="pass it to an agent: capabilities=[HoldfastCheckpoints(…)]"
            )
        return self._run

    async def _keep(self, ctx: RunContext[Any], trigger: str) -> None:
        run = self._current()
        if not run.has(ctx.messages):
            await self._call(run.keep, list(ctx.messages), copy.copy(ctx.usage), trigger)

    async def _call(self, function: Callable[..., None], *args: Any) -> None:
        await self.conversations.host.call(function, *args)


class _UnsavedRun:
    """The part of a run that is not saved with its conversation yet.

    It is in the "run" of the session's state: `{"messages": […], "results": {…}}`. The results are
    the entries of a ToolLog with the calls of the last response that have returned.
    """

    def __init__(
        self, conversations: HoldfastConversationStore, ctx: RunContext[Any], scope: str | None
    ) -> None:
        self._conversations, self.scope = conversations, scope
        self._id, self._run_id = ctx.conversation_id or "", ctx.run_id or ""
        self._agent = ctx.agent.name if ctx.agent is not None else None
        self.log = ToolLog()
        self._lock = threading.Lock()
        self._stored: list[ModelMessage] = []
        """The history as it is in the state: of the saved conversation and then of the run."""
        self._saved = 0
        """How many of them are of the saved conversation."""
        self._whole = False
        """Whether the run's messages are the whole history, instead of the saved one."""
        self._begun = False
        """Whether the state has a "run"."""

    def open(self, given: list[ModelMessage], usage: RunUsage) -> None:
        """Compare the history that the run starts with to the stored one.

        Raises ConversationConflict if it does not continue the stored history, including an
        unfinished run.
        """
        self._session = self._conversations.session(self._id, self._agent)
        self._meta = self._conversations.read_meta(self._session)
        record, run = self._meta.record, self._meta.run
        if record is None and run is None:
            return
        state = self._session.load()
        same = _load_messages(_dump_messages(given))  # some types change when they are stored
        last = [i["message"] for i in state["messages"] if record and i["id"] == record.head_id]
        if last and not (run and run["whole"]):
            if not given:
                raise InvalidRequest(
                    f"conversation {self._id!r} has a history, which this run was not given",
                    hint="agent.run(…, conversation=await conversations.load(…))",
                )
            (newest,) = _load_messages(last)
            at = [i for i, message in enumerate(same) if message == newest]
            if not at:
                raise ConversationConflict(self._id)  # of an older revision or another conversation
            self._saved = at[-1] + 1
        self._stored = given[: self._saved]
        if run is not None:
            unsaved = _load_messages(state["run"]["messages"])
            self._stored = given[: self._saved + len(unsaved)]
            if same[self._saved : len(self._stored)] != unsaved:
                raise ConversationConflict(self._id)
            self._whole, self._begun = run["whole"], True
            if len(given) == len(self._stored):
                self.log = ToolLog(state["run"]["results"])
            self._write("resume", usage)

    def has(self, messages: Sequence[ModelMessage]) -> bool:
        """Return whether exactly these messages are stored."""
        return len(messages) == len(self._stored) == self._common(messages)

    def _common(self, messages: Sequence[ModelMessage]) -> int:
        """Return how many messages at the beginning are the stored ones."""
        for i, (new, old) in enumerate(zip(messages, self._stored, strict=False)):
            if new is not old and new != old:
                return i
        return min(len(messages), len(self._stored))

    def keep(self, messages: list[ModelMessage], usage: RunUsage, trigger: str) -> None:
        """Store the history of the run as it is now."""
        with self._lock:
            if self.has(messages):
                return  # two tools of one response ask for it at the same time
            common = self._common(messages)
            if common < self._saved:  # rewritten, for example by a capability that compacts it
                self._saved, self._whole = 0, True
            stored, self._stored = self._stored, messages
            self.log = ToolLog()
            if self._begun and common == len(stored):
                self._write(
                    trigger,
                    usage,
                    append={("run", "messages"): _dump_messages(messages[common:])},
                    set={("run", "results"): {}},
                )
            else:
                run = {"messages": _dump_messages(messages[self._saved :]), "results": {}}
                self._write(trigger, usage, set={"run": run})
            self._begun = True

    def record(self, call: ToolCallPart, result: dict[str, Any]) -> None:
        """Store the result of a tool."""
        id = call.tool_call_id
        with self._lock:
            entry = self.log.end(id, result)
            if self._begun:
                change: Any = {("run", "results", id): entry}
            else:  # a deferred call of the saved conversation
                change = {"run": {"messages": [], "results": self.log.entries}}
            self._write("tool_call", self._meta.usage, set=change)
            self._begun = True

    def fail(self, reason: str) -> None:
        """Store that the run has failed, if anything of it is stored."""
        with self._lock:
            if self._begun:
                self._write("run", self._meta.usage, status="failed", reason=reason)

    def _write(self, trigger: str, usage: RunUsage, **changes: Any) -> None:
        run = {"id": self._run_id, "scope": self.scope, "whole": self._whole}
        meta = _ConversationMeta(self._meta.record, run, usage)
        calls = _requested(self._stored[-1:])
        fields: dict[str, Any] = {
            "trigger": trigger,
            "usage": _usage_since(self._meta.usage, usage, _model(self._stored[-1:])),
            "pending": [_to_tool_call(c) for c in calls if self.log.is_open(c.tool_call_id)],
            "meta": meta.to_data(),
        }
        if self._meta == _ConversationMeta():  # there is no state yet
            changes["append"] = {"messages": []}
        try:
            self._session.patch(**changes, **fields)
        except HeadMoved as e:
            raise ConversationConflict(self._id) from e
        self._meta = meta


# -- messages and metadata -------------------------------------------------------------------------


def _trigger(
    record: ConversationRecord, before: ConversationRecord | None, entries: list[ConversationEntry]
) -> str:
    if entries:
        return "turn"
    if before is None:
        return "fork" if record.forked_from else "save"
    return "save" if record.head_id == before.head_id else "branch"


def _meta(session: Session, head: Checkpoint) -> _ConversationMeta | None:
    """Return the meta of a checkpoint, or None if it is not of a conversation.

    The head of a fork may have none. Then it is that of the original, with the fork's id.
    """
    found = find_meta(session, head, _META)
    if found is None:
        return None
    checkpoint, data = found
    try:
        meta = _ConversationMeta(
            _RECORD.validate_python(data["record"]) if data["record"] else None,
            data["run"],
            _USAGE.validate_python(data["usage"]),
        )
    except (KeyError, ValidationError) as e:
        raise UnsupportedFormat(
            f"session {session.name!r} was not written by this version: {e}"
        ) from e
    if meta.record is not None:
        if checkpoint is not head:
            meta.record.forked_from = meta.record.conversation_id
            meta.record.forked_at = meta.record.head_id
        meta.record.conversation_id = session.name
    return meta


def _chain(items: list[Any], head_id: str | None, limit: int | None) -> list[Any] | None:
    """Return an item and those before it, oldest first; None if it is not among them."""
    known = {item["id"]: item for item in items}
    found: list[Any] = []
    while head_id is not None and (limit is None or len(found) < limit):
        if head_id not in known:
            return None
        found.append(known[head_id])
        head_id = found[-1]["parent_id"]
    return found[::-1]


def _dump_messages(messages: Sequence[ModelMessage]) -> list[Any]:
    """Return messages as plain data. Times are text, which is easier to read and to find."""
    items: list[Any] = ModelMessagesTypeAdapter.dump_python(list(messages))
    for item in items:
        for each in (item, *item["parts"]):
            if isinstance(each.get("timestamp"), dt.datetime):
                each["timestamp"] = each["timestamp"].isoformat()
    return items


def _load_messages(items: list[Any]) -> list[ModelMessage]:
    return ModelMessagesTypeAdapter.validate_python(items)


def _to_tool_call(part: ToolCallPart) -> ToolCall:
    return ToolCall(part.tool_call_id, part.tool_name, part.args)


def _model(messages: Sequence[ModelMessage]) -> str | None:
    """Return the model that has given the last of these messages, if one has."""
    return next((m.model_name for m in messages if isinstance(m, ModelResponse)), None) or None


def _usage_since(before: RunUsage, now: RunUsage, model: str | None = None) -> Usage:
    cost = float(now.cost or 0) - float(before.cost or 0)
    input = max(0, now.input_tokens - before.input_tokens)
    output = max(0, now.output_tokens - before.output_tokens)
    cached = max(0, now.cache_read_tokens - before.cache_read_tokens)
    return Usage(
        input,
        output,
        min(cached, input),
        cost=max(0.0, cost),
        model=model if input or output else None,
    )


# -- results of tools ------------------------------------------------------------------------------


def _requested(messages: Sequence[ModelMessage]) -> list[ToolCallPart]:
    """Return the calls that the last response asks for."""
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            return message.tool_calls
    return []


def _success(call: ToolCallPart, result: Any) -> dict[str, Any]:
    """Return a result as data. Its message is the one that the model gets."""
    returned = result if isinstance(result, ToolReturn) else ToolReturn(return_value=result)
    parts: list[Any] = [
        ToolReturnPart(
            tool_name=call.tool_name,
            content=returned.return_value,
            tool_call_id=call.tool_call_id,
            metadata=returned.metadata,
        )
    ]
    if returned.content is not None:
        parts.append(UserPromptPart(content=returned.content))
    return {
        "outcome": "returned",
        "message": _dump_messages([ModelRequest(parts=parts)])[0],
        "tools": returned.tools,
    }


def _failure(error: ToolRetryError | ToolFailedError) -> dict[str, Any]:
    if isinstance(error, ToolRetryError):
        outcome, part = "retried", error.tool_retry
    else:
        outcome, part = "failed", error.tool_failed
    return {
        "outcome": outcome,
        "message": _dump_messages([ModelRequest(parts=[part])])[0],
        "tools": None,
    }


def _replay(recorded: dict[str, Any]) -> ToolReturn[Any]:
    """Return or raise what the tool returned or raised."""
    (message,) = _load_messages([recorded["message"]])
    parts: list[Any] = list(message.parts)
    if recorded["outcome"] == "retried":
        raise ToolRetryError(parts[0])
    if recorded["outcome"] == "failed":
        raise ToolFailedError(parts[0])
    return ToolReturn(
        return_value=parts[0].content,
        content=parts[1].content if len(parts) > 1 else None,
        metadata=parts[0].metadata,
        tools=recorded["tools"],
    )
