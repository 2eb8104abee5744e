"""Conversations of pydantic-ai.

A conversation is the session of its name: `{"messages": [entry, …]}`, and below "run" what a run
has added since the last save. The conversation's record lies in the metadata of each checkpoint.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Mapping, Sequence
from functools import partial
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

from holdfast import ids, lineage
from holdfast.adapters.forking import fork_with
from holdfast.adapters.hosting import Host, Hosted
from holdfast.checkpoint import Checkpoint
from holdfast.effects import forward
from holdfast.errors import (
    HeadMoved,
    InvalidRequest,
    NotFound,
    SessionExists,
    SessionNotFound,
    UnsupportedFormat,
)
from holdfast.model import ToolCall, Usage
from holdfast.operations import Operator
from holdfast.writing import Writer

if TYPE_CHECKING:
    import os

    from pydantic_ai.messages import ToolCallPart

    from holdfast.effects import Effect, Scene
    from holdfast.fields import Fields
    from holdfast.session import Session
    from holdfast.store import Store

_META = "pydantic_ai"
_RECORD, _USAGE = TypeAdapter(ConversationRecord), TypeAdapter(RunUsage)
_REMEMBERED = 1_000


class _Moved(Exception):
    """The session is not as it was when this was planned."""


class Noted(NamedTuple):
    """What the head of a conversation's session says about it."""

    record: ConversationRecord | None = None
    run: Mapping[str, Any] | None = None
    """A run whose messages are not saved yet: its id and scope, and whether these are the whole
    history, in place of the stored one."""
    usage: RunUsage = RunUsage()
    """As far as checkpoints have told of it."""

    def meta(self) -> dict[str, Any]:
        record = None if self.record is None else _RECORD.dump_python(self.record)
        if record is not None:
            record["updated_at"] = record["updated_at"].isoformat()
        run = None if self.run is None else dict(self.run)
        return {_META: {"record": record, "run": run, "usage": _USAGE.dump_python(self.usage)}}


class HoldfastConversationStore(Hosted, ConversationStore):
    """Conversations in a store, each entry written once; durable when a call returns.

    A conversation deleted here is hidden at once, with its entries, and `undo` brings it back until
    gc has freed it. A fork has entries of its own, which cost nothing.
    """

    def __init__(self, store: Store | str | os.PathLike[str]) -> None:
        self.host = Host(store)
        self._lock = threading.Lock()
        self._homes: dict[str, str] = {}
        """Of the entries that were read about last: which conversation has them."""

    async def load(
        self, conversation_id: str, *, limit: int | None = None, scope: str | None = None
    ) -> Conversation | None:
        """As ConversationStore.load(), with what an unfinished run has added since the last save.

        If that ends in tool calls, agent.run(conversation=…) without a prompt goes on with them.
        """
        while True:
            found = await super().load(conversation_id, limit=limit, scope=scope)
            noted, messages = await self.host.call(self._unsaved, conversation_id)
            revision = None if noted.record is None else noted.record.revision
            if revision != (found.revision if found is not None else None):
                if noted.record is not None and scope not in (None, noted.record.scope):
                    return None
                continue  # saved or deleted meanwhile
            if noted.run is None or (found is None and scope not in (None, noted.run["scope"])):
                return found
            if found is None:
                found = Conversation(conversation_id=conversation_id)
            if noted.run["whole"]:
                found = Conversation(conversation_id=conversation_id, revision=found.revision)
            if messages:  # then what it was waiting for has been answered
                found.messages.extend(messages)
                found.deferred_tool_requests = None
            found.usage = noted.usage
            return found

    async def interrupted(self) -> list[str]:
        """Conversations with a run that has not come to its end, here or in another process."""
        return await self.host.call(
            lambda: [id for id, noted in self._all() if noted.run is not None]
        )

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        noted = await self.host.call(lambda: self.look(self.session(conversation_id)))
        return noted.record

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        records = [noted.record for _, noted in await self.host.call(self._all) if noted.record]
        found = [record for record in records if scope is None or record.scope == scope]
        return sorted(found, key=lambda record: record.updated_at, reverse=True)[:limit]

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """The record and all new entries, or nothing; what an unfinished run had added goes."""
        await self.host.call(self._write, record, list(new_entries), expected_revision)

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        await self.host.call(self._delete, conversation_id, expected_revision)

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        return (await self.read_history(entry_id, limit=1))[0]

    async def read_history(
        self, head_id: str | None, *, limit: int | None = None
    ) -> list[ConversationEntry]:
        """Entries of the conversation that has this one; it is looked for if it is not known."""
        if head_id is None or limit == 0:
            return []
        return await self.host.call(self._history, head_id, limit)

    # -- in a worker ---------------------------------------------------------------------------

    def session(self, conversation_id: str, agent: str | None = None) -> Session:
        return self.store.session(conversation_id, agent=agent)

    def look(self, session: Session, head: Checkpoint | None = None) -> Noted:
        """What is stored. Raises InvalidRequest if the session is of something else."""
        head = head or session.head
        if head is None:
            return Noted()
        noted = _read(session, head)
        if noted is None:
            raise InvalidRequest(
                f"session {session.name!r} is no conversation of pydantic-ai",
                hint="use another conversation_id, or another store",
            )
        if noted.record is not None:
            with self._lock:
                for entry_id in (noted.record.head_id, *noted.record.branches):
                    if entry_id is not None:
                        self._homes[entry_id] = session.name
                for forgotten in list(self._homes)[:-_REMEMBERED]:
                    del self._homes[forgotten]
        return noted

    def _all(self) -> list[tuple[str, Noted]]:
        found = []
        for info in self.store.sessions():
            noted = info.head and _read(self.session(info.name), info.head)
            if noted:
                found.append((info.name, noted))
        return found

    def _unsaved(self, conversation_id: str) -> tuple[Noted, list[ModelMessage]]:
        session = self.session(conversation_id)
        head = session.head
        if head is None:
            return Noted(), []
        noted = self.look(session, head)
        if noted.run is None:
            return noted, []
        try:
            return noted, revive(session.load(head)["run"]["messages"])
        except NotFound:  # deleted meanwhile
            return Noted(), []

    def _history(self, head_id: str, limit: int | None) -> list[ConversationEntry]:
        items: list[Any] | None = None
        if (home := self._homes.get(head_id)) is not None:
            items = _chain(self._items(home), head_id, limit)
        if items is None:
            for name, noted in self._all():
                if noted.record and (items := _chain(self._items(name), head_id, limit)):
                    break
        if not items:
            raise NotFound(f"no conversation has an entry {head_id!r}")
        messages = revive([item["message"] for item in items])
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

    def _write(
        self, record: ConversationRecord, entries: list[ConversationEntry], expected: str | None
    ) -> None:
        items = [
            {"id": e.id, "parent_id": e.parent_id, "kind": e.kind, "message": dump([e.message])[0]}
            for e in entries
        ]
        while True:
            session = self.session(record.conversation_id)
            was = self.look(session)
            if (was.record.revision if was.record else None) != expected:
                raise ConversationConflict(record.conversation_id)
            noted = Noted(record, None, record.usage)
            fields: Fields = {
                "trigger": _trigger(record, was.record, entries),
                "status": "completed" if record.deferred_tool_requests is None else "halted",
                "usage": spent(was.usage, record.usage),
                "meta": noted.meta(),
            }
            if record.deferred_tool_requests is not None:
                fields["reason"] = "waiting for the results of tools"
                waiting = record.deferred_tool_requests
                fields["pending"] = [as_call(c) for c in (*waiting.calls, *waiting.approvals)]
            try:
                if self._has_head(session, record, was.record, entries):
                    session.patch(
                        append={"messages": items} if items or was == Noted() else {},
                        drop=["run"] if was.run is not None else [],
                        **fields,
                    )
                else:
                    self._fork(record, fields)
                return
            except (HeadMoved, SessionExists):
                continue  # whether it matters shows when the record is read again

    def _has_head(
        self,
        session: Session,
        record: ConversationRecord,
        was: ConversationRecord | None,
        entries: list[ConversationEntry],
    ) -> bool:
        """Whether the history that the record points at is in its own session, or is to be."""
        known = {None, *(entry.id for entry in entries)}
        if was is not None:
            known |= {was.head_id, *was.branches}
        return record.head_id in known or any(
            item["id"] == record.head_id for item in self._items(session.name)
        )

    def _fork(self, record: ConversationRecord, fields: Fields) -> None:
        """Begin a conversation with the history of another one."""
        source = record.forked_from or self._homes.get(record.head_id or "")
        if source is None or self.session(record.conversation_id).exists():
            raise ConversationConflict(record.conversation_id)
        items = _chain(self._items(source), record.head_id, None)
        if not items:
            raise ConversationConflict(record.conversation_id)
        fork_with(self.session(source), record.conversation_id, {"messages": items}, **fields)

    def _delete(self, conversation_id: str, expected: str) -> None:
        while True:
            session = self.session(conversation_id)
            head = session.head
            noted = self.look(session, head)
            if head is None or noted.record is None or noted.record.revision != expected:
                raise ConversationConflict(conversation_id)
            try:
                operator = Operator(Writer(self.store, conversation_id))
                operator.run("delete", partial(_delete_at, head=head.id))
                return
            except (_Moved, SessionNotFound):
                continue


def _trigger(
    record: ConversationRecord, was: ConversationRecord | None, entries: list[ConversationEntry]
) -> str:
    if entries:
        return "turn"
    if was is None:
        return "fork" if record.forked_from else "save"
    return "save" if record.head_id == was.head_id else "branch"


def _delete_at(scene: Scene, head: str) -> Effect:
    """Delete the session if this is its head."""
    row = lineage.read_row(scene.reader, lineage.Place(scene.number, scene.head.seq))
    if ids.to_text(row.record.id) != head:
        raise _Moved
    return forward(scene, "delete", {"session": True})


def _read(session: Session, head: Checkpoint) -> Noted | None:
    """What a checkpoint says, or for a fork the one that it was forked from; None if foreign."""
    for each in [head] if _META in head.meta else session.history(head):
        found = each.meta.get(_META)
        if isinstance(found, Mapping):
            try:
                noted = Noted(
                    _RECORD.validate_python(found["record"]) if found["record"] else None,
                    found["run"],
                    _USAGE.validate_python(found["usage"]),
                )
            except (KeyError, ValidationError) as e:
                raise UnsupportedFormat(
                    f"session {session.name!r} was not written by this version: {e}"
                ) from e
            if noted.record is not None and each is not head:
                noted.record.forked_from = noted.record.conversation_id
                noted.record.forked_at = noted.record.head_id
            if noted.record is not None:
                noted.record.conversation_id = session.name
            return noted
        if each.operation != "fork":
            return None
    return None


def _chain(items: list[Any], head_id: str | None, limit: int | None) -> list[Any] | None:
    """The items up to this one, in order; None if it is not among them."""
    known = {item["id"]: item for item in items}
    found: list[Any] = []
    while head_id is not None and (limit is None or len(found) < limit):
        if head_id not in known:
            return None
        found.append(known[head_id])
        head_id = found[-1]["parent_id"]
    return found[::-1]


def dump(messages: Sequence[ModelMessage]) -> list[Any]:
    """As plain data; times as text, which is easier to read and to look for."""
    items: list[Any] = ModelMessagesTypeAdapter.dump_python(list(messages))
    for item in items:
        for each in (item, *item["parts"]):
            if isinstance(each.get("timestamp"), dt.datetime):
                each["timestamp"] = each["timestamp"].isoformat()
    return items


def revive(items: list[Any]) -> list[ModelMessage]:
    return ModelMessagesTypeAdapter.validate_python(items)


def as_call(part: ToolCallPart) -> ToolCall:
    return ToolCall(part.tool_call_id, part.tool_name, part.args)


def spent(before: RunUsage, now: RunUsage) -> Usage:
    cost = float(now.cost or 0) - float(before.cost or 0)
    return Usage(max(0, now.total_tokens - before.total_tokens), max(0.0, cost))
