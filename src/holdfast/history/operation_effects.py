"""How each kind of operation is applied to a session, and how it is reverted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.errors import (
    UNREADABLE,
    CheckpointNotFound,
    HoldfastError,
    InvalidRequest,
    SessionExists,
)
from holdfast.format import records
from holdfast.format.records import LABEL, TAG, IndexTerm, Tombstone
from holdfast.history import leases, lineage
from holdfast.history.lineage import Parent
from holdfast.history.writer import seal_marks
from holdfast.storage.rows import Address, LeaseRow, MarkKey, NameRow, TombstoneRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.format.records import Head
    from holdfast.storage.reader import Reader

GONE = "gc() has freed it"


@dataclass
class OpContext:
    """The session as an operation finds it when it is planned."""

    reader: Reader
    number: int
    raw_name: bytes
    row: bytes
    head: Head
    lease: LeaseRow | None = None
    """The lease that the session gets if the head moves; None leaves it as it is."""

    @property
    def next(self) -> int:
        """The number of the operation that is being planned."""
        return self.head.operations + 1

    def exists(self, seq: int) -> bool:
        return self.reader.checkpoint(self.number, seq) is not None

    def id(self, seq: int) -> bytes:
        found = self.reader.checkpoint(self.number, seq)
        if found is None:
            raise CheckpointNotFound(f"checkpoint {seq} is not there any more: {GONE}")
        return found.id


@dataclass
class Outcome:
    """The changes that an operation makes to a session."""

    details: dict[str, Any]
    head: int | None = None
    """The seq of the new head; 0 for no head, None if the operation does not set the head."""
    parent: Parent | HoldfastError | None = None
    """The checkpoint at the new head, or the error that reading it raised."""
    notes: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    """The kind to log, if only the plan can know it."""
    last: int | None = None
    """The seq of the newest checkpoint, if the operation adds checkpoints."""


def apply(context: OpContext, kind: str, details: dict[str, Any], seq: int = 0) -> Outcome:
    """Return the outcome of an operation that is done or redone.

    `seq` is the number of the checkpoint to redo; 0 for other operations. Raises InvalidRequest if
    the operation cannot be done, for example because gc freed a checkpoint that it needs.
    """
    if kind in ("rewind", "repair"):
        return _head_to(context, int(details["to"]), details)
    if kind == "tag":
        return Outcome(details, notes=_retag(context, details, "removed", "tags"))
    if kind == "label":
        return Outcome(details, notes=_relabel(context, details, details["was"], details["label"]))
    if kind == "rename":
        return _called(context, str(details["to"]), details)
    if kind in ("delete", "prune"):
        if "session" in details:
            details = _counted(context) | details
            return _rename(context, records.deleted_name(context.number, context.raw_name), details)
        outcome = (
            _head_to(context, int(details["to"]), details) if "to" in details else Outcome(details)
        )
        tombstones = _tombstones(context, details)
        needs = [Address(context.number, row.seq) for row in tombstones]
        outcome.notes = {
            "tombstones": tombstones,
            "needs": [*outcome.notes.get("needs", ()), *needs],
        }
        return outcome
    if seq and kind == "fork":
        return _revive(context, details)
    if seq:
        return _head_to(context, seq, details)
    raise InvalidRequest(f"{kind} cannot be done again")


def revert(context: OpContext, kind: str, details: dict[str, Any], before: int) -> Outcome:
    """Return the outcome of undoing an operation. `before` is the seq of the head before it.

    Raises InvalidRequest if it cannot be undone, for example because gc freed a checkpoint.
    """
    if kind in ("rewind", "repair"):
        return _head_to(context, int(details["from"]), details)
    if kind == "tag":
        return Outcome(details, notes=_retag(context, details, "tags", "removed"))
    if kind == "label":
        return Outcome(details, notes=_relabel(context, details, details["label"], details["was"]))
    if kind == "rename":
        return _called(context, str(details["from"]), details)
    if kind in ("delete", "prune"):
        if "session" in details:
            return _revive(context, details)
        outcome = Outcome(details, notes=_undelete(context, details))
        if "from" in details:  # the head, which the deletion had moved
            outcome.head = int(details["from"])
            outcome.parent = _parent_at(context, outcome.head)
        return outcome
    if kind == "fork":
        if context.head.last > 1:
            raise InvalidRequest(
                "a fork that has checkpoints of its own is not undone",
                hint="delete() the session, which can be undone too",
            )
        return _rename(context, records.deleted_name(context.number, context.raw_name), details)
    return _head_to(context, before, details)


def _head_to(context: OpContext, seq: int, details: dict[str, Any]) -> Outcome:
    """Move the head to a checkpoint; 0 means before the first one.

    Raises InvalidRequest if the checkpoint is deleted or freed.
    """
    if not seq:
        return Outcome(details, head=0)
    if not context.exists(seq):
        raise InvalidRequest(f"the head cannot go to checkpoint {seq}: {GONE}")
    if context.reader.tombstones(context.number, seq, seq):
        raise InvalidRequest(f"the head cannot go to checkpoint {seq}: it was deleted")
    return Outcome(
        details, seq, _parent_at(context, seq), {"needs": [Address(context.number, seq)]}
    )


def _parent_at(context: OpContext, seq: int) -> Parent | HoldfastError | None:
    try:
        return Parent.read(context.reader, Address(context.number, seq)) if seq else None
    except UNREADABLE as e:
        return e


def _relabel(
    context: OpContext, details: dict[str, Any], was: str | None, label: str | None
) -> dict[str, Any]:
    gone = [] if was is None else [(LABEL, records.encode_name(was))]
    return _remark(context, int(details["seq"]), gone, label, ())


def _retag(context: OpContext, details: dict[str, Any], gone: str, new: str) -> dict[str, Any]:
    """Remove the tags under one name of the details, and add those under another."""
    raw = [(TAG, records.encode_name(tag)) for tag in details.get(gone, ())]
    return _remark(context, int(details["seq"]), raw, None, tuple(details.get(new, ())))


def _remark(
    context: OpContext,
    seq: int,
    gone: list[tuple[int, bytes]],
    label: str | None,
    tags: tuple[str, ...],
) -> dict[str, Any]:
    """Remove labels and tags of a checkpoint, by kind and stored text, and add others."""
    id = context.id(seq)
    return {
        "removed_marks": [MarkKey(seq, *mark) for mark in gone],
        "removed_terms": [IndexTerm(*mark, id) for mark in gone],
        "marks": seal_marks(context.number, seq, label, tags, context.next),
        "terms": records.index_terms(id, {}, label, tags),
        "needs": [Address(context.number, seq)],
    }


def _counted(context: OpContext) -> dict[str, int]:
    """Return the number of checkpoints as a detail of the operation.

    Empty if it cannot be read, because a damaged session can be deleted too.
    """
    try:
        return {"checkpoints": lineage.count(context.reader, context.number)}
    except UNREADABLE:
        return {}


def _runs(details: dict[str, Any], name: str) -> Sequence[int]:
    return [seq for low, high in details[name] for seq in range(low, high)]


def _tombstones(context: OpContext, details: dict[str, Any]) -> list[TombstoneRow]:
    """Return tombstones for the checkpoints to delete.

    Skips those that are freed or deleted already: much can happen before a redo().
    """
    boot, uptime = clock.uptime()
    now = time.time_ns() // 1000
    wanted = {seq: name == "held" for name in ("runs", "held") for seq in _runs(details, name)}
    low, high = min(wanted, default=0), max(wanted, default=0)
    deleted = dict(context.reader.tombstones(context.number, low, high))
    out = []
    for seq, held in wanted.items():
        if seq in deleted or not context.exists(seq):
            continue
        tombstone = Tombstone(context.next, now, held, boot, uptime)
        body = records.seal_tombstone(context.number, seq, tombstone)
        out.append(TombstoneRow(seq, body))
    return out


def _undelete(context: OpContext, details: dict[str, Any]) -> dict[str, Any]:
    seqs = [*_runs(details, "runs"), *_runs(details, "held")]
    for seq in seqs:
        if not context.exists(seq):
            raise InvalidRequest(f"checkpoint {seq} cannot come back: {GONE}")
    return {"undeleted": seqs, "needs": [Address(context.number, seq) for seq in seqs]}


def _revive(context: OpContext, details: dict[str, Any]) -> Outcome:
    """Give a deleted session its name back. Raises SessionExists if the name is taken."""
    former = records.former_name(context.number, context.raw_name)
    if former is None:
        raise InvalidRequest("the session is not deleted")
    if context.head.seq and not context.exists(context.head.seq):
        raise InvalidRequest(f"the session cannot come back: {GONE}")
    return _rename(context, former, details)


def _called(context: OpContext, name: str, details: dict[str, Any]) -> Outcome:
    """Give the session another name. The head stays where it is, and a run can be resumed."""
    now = records.decode_name(context.raw_name)
    leases.check_free(context.reader, context.number, now, context.head)
    return Outcome(details, notes={"rename": _renamed(context, records.encode_name(name))})


def _rename(context: OpContext, name: bytes, details: dict[str, Any]) -> Outcome:
    """Give the session another stored name, by which it is deleted or not."""
    row, head = _renamed(context, name), context.head.seq
    return Outcome(details, head, _parent_at(context, head), notes={"rename": row})


def _renamed(context: OpContext, name: bytes) -> NameRow:
    """Return the session's row under another stored name.

    Raises SessionExists if the name is taken. The row keeps the former names, unless the session is
    only deleted or restored: that changes nothing but the first bytes of the stored name.
    """
    found = context.reader.session_by_number(context.number)
    if found is None:
        raise InvalidRequest(f"the session cannot come back: {GONE}")
    if context.reader.session(name) is not None:
        raise SessionExists(f"another session is called {records.decode_name(name)!r}")
    info = records.unseal_session(*found)
    plain = records.former_name(context.number, name) or name
    if plain != found.plain_name:
        former = (*info.former, records.decode_name(found.plain_name))
        info = info._replace(former=tuple(dict.fromkeys(former)))
    return NameRow(name, records.seal_session(context.number, name, info))
