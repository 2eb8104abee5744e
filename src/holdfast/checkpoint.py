"""A checkpoint, and a session in a list: what callers are told of what is stored."""

from __future__ import annotations

import datetime as dt
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from holdfast import ids
from holdfast.codec import records, rows, values
from holdfast.errors import Corrupt, UnsupportedFormat
from holdfast.model import EPOCH, Record, RunMark, Status, ToolCall, Usage

_FORMAT = 1
_STORED = [name for name in Record._fields if name != "state_hash"]
_TYPES = (
    int, bytes, int, int, str, bytes | None, int | None, dict, bytes, int, int, int | None,
    str | None, bytes, str, str | None, tuple, tuple | None,
)  # fmt: skip


class Checkpoint:
    """An immutable record: what the state was, why it was taken, and its parent."""

    __slots__ = ("_gap", "_label", "_record", "_session", "_tags")

    def __init__(
        self,
        session: str,
        record: Record,
        label: str | None,
        tags: tuple[str, ...],
        gap: tuple[int, bytes | None] | None = None,
    ) -> None:
        self._session, self._record, self._label, self._tags = session, record, label, tags
        self._gap = gap

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self._record.id == other._record.id

    def __hash__(self) -> int:
        return hash(self._record.id)

    def __reduce__(self) -> tuple[Any, ...]:
        record = self._record._replace(state_hash=partial(bytes, self._record.state_hash()))
        return Checkpoint, (self._session, record, self._label, self._tags, self._gap)

    def to_bytes(self) -> bytes:
        """All that it says, as bytes for another process or machine; not its state."""
        r = self._record
        parts = [getattr(r, name) for name in _STORED]
        parts += [r.state_hash(), self._session, self._label, self._tags, self._gap]
        return rows.seal(rows.LOOSE, 0, values.encode([_FORMAT, *parts]))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Checkpoint:
        """What to_bytes() was called of; Corrupt if these are not all of its bytes.

        They are not looked up: whether a store has such a checkpoint is for the store to tell.
        """
        raw = bytes(data) if isinstance(data, bytearray | memoryview) else data
        fields = values.decode(rows.unseal(rows.LOOSE, 0, raw, "a checkpoint")[1])
        if type(fields) is not list or fields[:1] != [_FORMAT]:
            raise UnsupportedFormat("these bytes are not of a checkpoint as this version knows it")
        if len(fields) != len(_TYPES) + 1 or not all(map(isinstance, fields[1:], _TYPES)):
            raise Corrupt("a checkpoint does not say what it should")
        *facts, state_hash, session, label, tags, gap = fields[1:]
        named = dict(zip(_STORED, facts, strict=True))
        record = Record(state_hash=partial(bytes, state_hash), **named)
        made = cls(session, record, label, tags, gap)
        try:
            made._check()
        except (ValueError, TypeError, OverflowError) as e:
            raise Corrupt("a checkpoint does not say what it should") from e
        return made

    def _check(self) -> None:
        """Raise ValueError, TypeError or OverflowError unless all that it says can be told."""
        records.check_extra(self._record.extra)
        pruned, ancestor = (0, None) if self._gap is None else self._gap
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
    def session(self) -> str:
        """The name of the session it lies in."""
        return self._session

    @property
    def label(self) -> str | None:
        return self._label

    @property
    def tags(self) -> tuple[str, ...]:
        return self._tags

    @property
    def id(self) -> str:
        return ids.to_text(self._record.id)

    @property
    def seq(self) -> int:
        """The number of this checkpoint in its session, in commit order."""
        return self._record.seq

    @property
    def step(self) -> int:
        """The parent's step + 1: siblings share one."""
        return self._record.step

    @property
    def created_at(self) -> dt.datetime:
        """When it was taken, by the clock of the machine that took it. Order is `seq`."""
        return EPOCH + dt.timedelta(microseconds=self._record.created_us)

    @property
    def operation(self) -> str:
        """What made it: save, append, patch or fork."""
        return self._record.operation

    @property
    def parent(self) -> str | None:
        """The parent's id."""
        return None if self._record.parent is None else ids.to_text(self._record.parent)

    @property
    def ancestor(self) -> str | None:
        """The id of the nearest ancestor that is not deleted: the parent, mostly."""
        if self._gap is None:
            return self.parent
        return None if self._gap[1] is None else ids.to_text(self._gap[1])

    @property
    def pruned(self) -> int:
        """How many checkpoints between `ancestor` and this one were deleted."""
        return 0 if self._gap is None else self._gap[0]

    @property
    def parent_session(self) -> str | None:
        """The session the parent lies in: another one for the first checkpoint of a fork."""
        if self._record.parent is None:
            return None
        origin: str | None = self._record.extra.get("origin")
        return self.session if origin is None else origin

    @property
    def trigger(self) -> str | None:
        """Why it was taken: "manual", "tool_call", …"""
        return self._record.extra.get("trigger")

    @property
    def status(self) -> Status:
        status: Status = self._record.extra.get("status", "in_progress")
        return status

    @property
    def reason(self) -> str | None:
        """Why the status is what it is."""
        return self._record.extra.get("reason")

    @property
    def agent(self) -> str | None:
        return self._record.extra.get("agent")

    @property
    def usage(self) -> Usage:
        tokens, cost = self._record.extra.get("usage", (0, 0.0))
        return Usage(tokens, cost)

    @property
    def pending(self) -> tuple[ToolCall, ...]:
        """Tool calls without a result when it was taken."""
        return tuple(ToolCall(*deepcopy(call)) for call in self._record.extra.get("pending", ()))

    @property
    def hint(self) -> str | None:
        """A note for whoever resumes from here."""
        return self._record.extra.get("hint")

    @property
    def meta(self) -> dict[str, Any]:
        return deepcopy(dict(self._record.extra.get("meta", ())))

    @property
    def key(self) -> str | None:
        """An external id, unique in the session."""
        return self._record.extra.get("key")

    @property
    def child_of(self) -> str | None:
        """The session that this one works for."""
        return self._record.extra.get("child_of")

    @property
    def run(self) -> RunMark | None:
        """The run that took it, if one did."""
        found = self._record.extra.get("run")
        return None if found is None else RunMark(*found)

    @property
    def size(self) -> int:
        """Bytes of the whole state, encoded."""
        return self._record.size

    @property
    def added(self) -> int:
        """Bytes of state that taking it wrote: new rows, sealed as SQLite keeps them, and the root.

        The same in every kind of store, though plain files, which are not compressed, take more.
        """
        return self._record.added

    @property
    def damaged(self) -> str | None:
        """What is wrong with its stored record, if it cannot be read. It is listed all the same."""
        return self._record.damaged

    @property
    def hash(self) -> str:
        """Covers state, metadata and, through the parent's hash, all of history."""
        return self._record.hash.hex()

    @property
    def state_hash(self) -> str:
        """Depends on the state's value alone, wherever and however it is stored."""
        return self._record.state_hash().hex()


class SessionInfo(NamedTuple):
    """A line in the list of sessions."""

    name: str
    agent: str | None
    head: Checkpoint | None
    checkpoints: int
    """How many there are in it, on all branches."""
    damaged: str | None = None
    """Set when its row or its head cannot be read: what is wrong. The rest is what is known."""
