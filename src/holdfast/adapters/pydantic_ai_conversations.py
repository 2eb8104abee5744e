"""Conversations of pydantic-ai.

A conversation is a session of the same name with the state `{"messages": [entry, …]}`. The messages
that a run has added since the last save are in the state's "run". The conversation's record is in
the meta of each checkpoint.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
)
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter
from pydantic_ai.usage import RunUsage

from holdfast import ToolCall, Usage
from holdfast.adapters.base import Host, Hosted, find_meta, foreign_session, retried_on
from holdfast.errors import (
    HeadMoved,
    NotFound,
    SessionExists,
    SessionNotFound,
    UnsupportedFormat,
)

if TYPE_CHECKING:
    import os

    from pydantic_ai.messages import ToolCallPart

    from holdfast import Checkpoint, Session, Store

_META = "pydantic_ai"
_RECORD, _USAGE = TypeAdapter(ConversationRecord), TypeAdapter(RunUsage)
_REMEMBERED = 1_000


class ConversationMeta(NamedTuple):
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

    def read_meta(self, session: Session, head: Checkpoint | None = None) -> ConversationMeta:
        """Return the meta at the head. Raises InvalidRequest if the session holds other data."""
        head = head or session.head
        if head is None:
            return ConversationMeta()
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

    def _all(self) -> list[tuple[str, ConversationMeta]]:
        found = []
        for info in self.store.sessions():
            meta = info.head and _meta(self.session(info.name), info.head)
            if meta:
                found.append((info.name, meta))
        return found

    def _unsaved(self, conversation_id: str) -> tuple[ConversationMeta, list[ModelMessage]]:
        session = self.session(conversation_id)
        head = session.head
        if head is None:
            return ConversationMeta(), []
        meta = self.read_meta(session, head)
        if meta.run is None:
            return meta, []
        try:
            return meta, load_messages(session.load(head)["run"]["messages"])
        except NotFound:  # deleted between both reads
            return ConversationMeta(), []

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
        messages = load_messages([item["message"] for item in items])
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
                "message": dump_messages([entry.message])[0],
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
            "usage": usage_since(before.usage, record.usage),
            "meta": ConversationMeta(record, None, record.usage).to_data(),
        }
        waiting = record.deferred_tool_requests
        if waiting is not None:
            fields["status"], fields["reason"] = "halted", "waiting for the results of tools"
            fields["pending"] = [to_tool_call(c) for c in (*waiting.calls, *waiting.approvals)]
        if self._has_head(session, record, before.record, entries):
            session.patch(
                append={"messages": items} if items or before == ConversationMeta() else {},
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


def _trigger(
    record: ConversationRecord, before: ConversationRecord | None, entries: list[ConversationEntry]
) -> str:
    if entries:
        return "turn"
    if before is None:
        return "fork" if record.forked_from else "save"
    return "save" if record.head_id == before.head_id else "branch"


def _meta(session: Session, head: Checkpoint) -> ConversationMeta | None:
    """Return the meta of a checkpoint, or None if it is not of a conversation.

    The head of a fork may have none. Then it is that of the original, with the fork's id.
    """
    found = find_meta(session, head, _META)
    if found is None:
        return None
    checkpoint, data = found
    try:
        meta = ConversationMeta(
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


def dump_messages(messages: Sequence[ModelMessage]) -> list[Any]:
    """Return messages as plain data. Times are text, which is easier to read and to find."""
    items: list[Any] = ModelMessagesTypeAdapter.dump_python(list(messages))
    for item in items:
        for each in (item, *item["parts"]):
            if isinstance(each.get("timestamp"), dt.datetime):
                each["timestamp"] = each["timestamp"].isoformat()
    return items


def load_messages(items: list[Any]) -> list[ModelMessage]:
    return ModelMessagesTypeAdapter.validate_python(items)


def to_tool_call(part: ToolCallPart) -> ToolCall:
    return ToolCall(part.tool_call_id, part.tool_name, part.args)


def usage_since(before: RunUsage, now: RunUsage) -> Usage:
    cost = float(now.cost or 0) - float(before.cost or 0)
    return Usage(max(0, now.total_tokens - before.total_tokens), max(0.0, cost))
