"""Checkpoint and SessionInfo: the public, read-only views of stored records."""

from __future__ import annotations

import datetime as dt
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from holdfast import ids
from holdfast.errors import Corrupt, UnsupportedFormat
from holdfast.format import records, rows, values
from holdfast.model import Record, RunMark, Status, ToolCall, Usage, time_of

_FORMAT = 1
_STORED = [name for name in Record._fields if name != "state_hash"]
_TYPES = (
    int, bytes, int, int, str, bytes | None, int | None, dict, bytes, int, int, int | None,
    str | None, bytes, str, str | None, tuple, tuple | None,
)  # fmt: skip


class Gap(NamedTuple):
    """The ancestors of a checkpoint, right above it, that are deleted or freed."""

    pruned: int
    ancestor: bytes | None
    """The id of the nearest ancestor above the gap; None if there is none."""


class Checkpoint:
    """An immutable record of a state, of the reason why it was saved, and of its parent.

    It does not hold the state itself; `Session.load` reads that.
    """

    __slots__ = ("_gap", "_label", "_record", "_session", "_summary", "_tags")

    def __init__(
        self,
        session: str,
        record: Record,
        label: str | None,
        tags: tuple[str, ...],
        gap: tuple[int, bytes | None] | None = None,
        summary: str | None = None,
    ) -> None:
        self._session, self._record, self._label, self._tags = session, record, label, tags
        self._gap = None if gap is None else Gap(*gap)
        self._summary = summary

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self._record.id == other._record.id

    def __hash__(self) -> int:
        return hash(self._record.id)

    def __reduce__(self) -> tuple[Any, ...]:
        record = self._record._replace(state_hash=partial(bytes, self._record.state_hash()))
        gap = self._gap and tuple(self._gap)
        return Checkpoint, (self._session, record, self._label, self._tags, gap, self._summary)

    def with_summary(self, summary: str) -> Checkpoint:
        """Return the same checkpoint with a summary."""
        gap = self._gap
        return Checkpoint(self._session, self._record, self._label, self._tags, gap, summary)

    def to_bytes(self) -> bytes:
        """Return all fields as bytes, for another process or machine.

        The state is not included; Session.pack() includes it.
        """
        return rows.seal(rows.LOOSE, 0, values.encode(self._parts()))

    def _parts(self) -> list[Any]:
        r = self._record
        parts = [getattr(r, name) for name in _STORED]
        gap = self._gap and tuple(self._gap)
        return [_FORMAT, *parts, r.state_hash(), self._session, self._label, self._tags, gap]

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Checkpoint:
        """Return the checkpoint that to_bytes() or Session.pack() encoded.

        Raises Corrupt if the bytes are damaged or incomplete, and UnsupportedFormat if another
        version wrote them. Does not check whether a store has this checkpoint.
        """
        return cls._of(_unsealed(data)[: len(_TYPES)])

    @classmethod
    def _of(cls, parts: list[Any]) -> Checkpoint:
        """Return the checkpoint of the parts that _parts() lists after the format."""
        if len(parts) != len(_TYPES) or not all(map(isinstance, parts, _TYPES)):
            raise Corrupt("a checkpoint does not say what it should")
        *facts, state_hash, session, label, tags, gap = parts
        named = dict(zip(_STORED, facts, strict=True))
        record = Record(state_hash=partial(bytes, state_hash), **named)
        try:
            made = cls(session, record, label, tags, gap)
            made._check()
        except (ValueError, TypeError, OverflowError) as e:
            raise Corrupt("a checkpoint does not say what it should") from e
        return made

    def _check(self) -> None:
        """Raise ValueError, TypeError or OverflowError if a field is invalid."""
        records.check_extra(self._record.extra)
        pruned, ancestor = self._gap or Gap(0, None)
        known = [id for id in (self._record.id, self._record.parent, ancestor) if id is not None]
        if (
            any(type(id) is not bytes or len(id) != ids.BYTES for id in known)
            or type(pruned) is not int
            or not all(type(tag) is str for tag in self._tags)
        ):
            raise ValueError("of wrong types")
        _ = self.created_at

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label is not None else ""
        return f"<Checkpoint {self.id} {self.session!r} step {self.step}{label}>"

    @property
    def summary(self) -> str | None:
        """One line on what it changed, such as "assistant: Done" or "plan.budget 900 → 850".

        It is None unless it was asked for, as in `session.history(summary=True)`.
        """
        return self._summary

    @property
    def session(self) -> str:
        """The name of the session that contains it."""
        return self._session

    @property
    def label(self) -> str | None:
        """The label, or None. It can be set later, with Session.label()."""
        return self._label

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, sorted. More can be added later, with Session.tag()."""
        return self._tags

    @property
    def id(self) -> str:
        """The id: 24 characters that begin with the time. No two checkpoints have the same."""
        return ids.to_text(self._record.id)

    @property
    def seq(self) -> int:
        """The number of this checkpoint in its session, in commit order."""
        return self._record.seq

    @property
    def step(self) -> int:
        """The parent's step + 1. Children of the same parent have the same step."""
        return self._record.step

    @property
    def created_us(self) -> int:
        """Microseconds since 1970, in UTC."""
        return self._record.created_us

    @property
    def created_at(self) -> dt.datetime:
        """When it was saved, by the clock of the machine that saved it. `seq` gives the order."""
        return time_of(self._record.created_us)

    @property
    def operation(self) -> str:
        """The operation that made it: save, append, patch or fork."""
        return self._record.operation

    @property
    def parent(self) -> str | None:
        """The parent's id."""
        return None if self._record.parent is None else ids.to_text(self._record.parent)

    @property
    def ancestor(self) -> str | None:
        """The id of the nearest ancestor that is not deleted. This is usually the parent."""
        if self._gap is None:
            return self.parent
        return None if self._gap.ancestor is None else ids.to_text(self._gap.ancestor)

    @property
    def pruned(self) -> int:
        """How many checkpoints between `ancestor` and this one were deleted."""
        return 0 if self._gap is None else self._gap.pruned

    @property
    def parent_session(self) -> str | None:
        """The session that contains the parent. For a fork's first checkpoint it is another one."""
        if self._record.parent is None:
            return None
        origin: str | None = self._record.extra.get("origin")
        return self.session if origin is None else origin

    @property
    def trigger(self) -> str | None:
        """Why it was saved: "manual", "tool_call", …"""
        return self._record.extra.get("trigger")

    @property
    def status(self) -> Status:
        """The status: "in_progress", "completed", "failed" or "halted"."""
        status: Status = self._record.extra.get("status", "in_progress")
        return status

    @property
    def reason(self) -> str | None:
        """The reason for the status."""
        return self._record.extra.get("reason")

    @property
    def agent(self) -> str | None:
        """The name of the agent that saved it, or None."""
        return self._record.extra.get("agent")

    @property
    def usage(self) -> Usage:
        """Tokens and cost since the parent."""
        return records.read_usage(self._record.extra.get("usage", ()))

    @property
    def pending(self) -> tuple[ToolCall, ...]:
        """Tool calls that had no result when it was saved."""
        return tuple(ToolCall(*deepcopy(call)) for call in self._record.extra.get("pending", ()))

    @property
    def hint(self) -> str | None:
        """A note for the worker that resumes from here."""
        return self._record.extra.get("hint")

    @property
    def meta(self) -> dict[str, Any]:
        """A copy of the metadata that was given to save()."""
        return deepcopy(dict(self._record.extra.get("meta", ())))

    @property
    def key(self) -> str | None:
        """An id given by the caller, unique in the session."""
        return self._record.extra.get("key")

    @property
    def adopted(self) -> str | None:
        """The id of the checkpoint of a fork that `Session.adopt` has made it of."""
        return self._record.extra.get("adopted")

    @property
    def child_of(self) -> str | None:
        """The name of the parent session, which this session works for."""
        return self._record.extra.get("child_of")

    @property
    def run(self) -> RunMark | None:
        """The run that saved it; None if no run did."""
        found = self._record.extra.get("run")
        return None if found is None else RunMark(*found)

    @property
    def size(self) -> int:
        """Size of the whole encoded state, in bytes."""
        return self._record.size

    @property
    def added(self) -> int:
        """Bytes of state that this checkpoint wrote: root and new rows, as SQLite stores them.

        The number is the same in every kind of store. Plain files take more, as they are not
        compressed.
        """
        return self._record.added

    @property
    def damaged(self) -> str | None:
        """The damage, if its stored record cannot be read; else None. Lists show it anyway."""
        return self._record.damaged

    @property
    def hash(self) -> str:
        """Hash of the state, the metadata and the parent's hash, and so of the whole history."""
        return self._record.hash.hex()

    @property
    def state_hash(self) -> str:
        """Hash of the state's value, independent of its layout and of the store."""
        return self._record.state_hash().hex()


def record_of(checkpoint: Checkpoint) -> Record:
    """Return the record of a checkpoint, for other modules of this package."""
    return checkpoint._record  # noqa: SLF001


def _unsealed(data: bytes | bytearray | memoryview) -> list[Any]:
    """Return the parts of a checkpoint; with those of pack(), also its encoded state."""
    raw = bytes(data) if isinstance(data, bytearray | memoryview) else data
    fields = values.decode_stored(rows.unseal(rows.LOOSE, 0, raw, "a checkpoint")[1])
    if type(fields) is not list or fields[:1] != [_FORMAT]:
        raise UnsupportedFormat("these bytes are not of a checkpoint as this version knows it")
    if len(fields) > len(_TYPES) + 2 or not isinstance(fields[-1], bytes | tuple | None):
        raise Corrupt("a checkpoint does not say what it should")
    return fields[1:]


def pack(checkpoint: Checkpoint, state: Any) -> bytes:
    """Return a checkpoint with its state as bytes; see Session.pack."""
    parts = checkpoint._parts()  # noqa: SLF001
    return rows.seal(rows.LOOSE, 0, values.encode([*parts, values.encode_exact(state)]))


def unpack(data: bytes | bytearray | memoryview) -> tuple[Checkpoint, Any]:
    """Return the checkpoint and the state that Session.pack() encoded.

        checkpoint, state = holdfast.unpack(session.pack("label:draft"))

    Raises Corrupt if the bytes are damaged or have no state, UnsupportedFormat if another version
    wrote them, and TooBig if the state needs more memory than memory_limit() allows. Does not check
    whether a store has this checkpoint.
    """
    *parts, state = _unsealed(data)
    if not isinstance(state, bytes):
        raise Corrupt("these bytes have no state", hint="Session.pack() makes bytes with a state")
    return Checkpoint._of(parts), values.decode_stored(state)  # noqa: SLF001


class SessionInfo(NamedTuple):
    """A session in a list of sessions."""

    name: str
    """The name of the session."""
    agent: str | None
    """The agent that the session was made for, or None."""
    head: Checkpoint | None
    """The head; None if the session has no checkpoint, or if the head cannot be read."""
    checkpoints: int
    """How many checkpoints it has, on all branches."""
    damaged: str | None = None
    """The damage, if its row or its head cannot be read. The other fields are then incomplete."""
    newest: int = 0
    """The highest seq of its checkpoints, deleted ones included."""
    operations: int = 0
    """How many operations it has: rewinds, labels, tags, deletions and undos."""
    forked: bool = False
    """Whether it began as a fork of another session."""
    head_seq: int = 0
    """The seq of the head, also if its record cannot be read. 0 if there is none, or if the damage
    hides it."""
