"""The nouns as plain data: what lists, history and saves hand to a caller."""

from __future__ import annotations

import datetime as dt
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast import ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Status = Literal["in_progress", "completed", "failed", "halted"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "failed", "halted")
DAMAGED = "damaged"
"""The kind of an operation that cannot be read."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a checkpoint cost since its parent."""

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.tokens + other.tokens, self.cost + other.cost)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that was asked for and has no result yet."""

    id: str
    name: str
    arguments: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)


class RunMark(NamedTuple):
    """Where in a run a checkpoint was taken."""

    id: str
    turn: int
    base: int | None
    """The seq of the checkpoint that the turn goes back to; None at the end of a turn."""


class Record(NamedTuple):
    """What a checkpoint's row holds, read but not yet dressed up."""

    seq: int
    id: bytes
    step: int
    created_us: int
    operation: str
    parent: bytes | None
    parent_seq: int | None
    extra: dict[str, Any]
    hash: bytes
    state_hash: Callable[[], bytes]
    size: int
    added: int
    skip: int | None
    """The seq of the parent's parent, to step over a parent that is damaged."""
    damaged: str | None = None


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
        return _EPOCH + dt.timedelta(microseconds=self._record.created_us)

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
        """Bytes of state that taking it wrote to the store."""
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


class Operation(NamedTuple):
    """A change of head or annotation that is not itself a checkpoint."""

    session: str
    number: int
    kind: str
    created_us: int
    details: dict[str, Any]

    @property
    def created_at(self) -> dt.datetime:
        return _EPOCH + dt.timedelta(microseconds=self.created_us)

    @property
    def summary(self) -> str:
        """What was done. Checkpoints are named by their `seq`."""
        d = self.details
        match self.kind:
            case "damaged":
                return f"unknown: {d['damage']}"
            case "repair" if d["from"] == d["to"]:
                return "undo() made possible again, but for what was done before"
            case "repair":
                return f"the head moved off checkpoint {d['from']}, which is damaged, to {d['to']}"
            case "rewind":
                return f"the head moved from checkpoint {d['from'] or 'none'} to {d['to']}"
            case "tag":
                return f"checkpoint {d['seq']} tagged {_list(d['tags'])}"
            case "label":
                return f"checkpoint {d['seq']} labelled {d['label']!r}"
            case "undo":
                return f"the {d['what']} taken back"
            case "redo":
                return f"the {d['what']} done again"
        if "session" in d:
            return "the session deleted"
        runs = [*d["runs"], *d["held"]]
        count = sum(high - low for low, high in runs)
        return f"checkpoint {runs[0][0]} deleted" if count == 1 else f"{count} checkpoints deleted"

    @property
    def way_back(self) -> str:
        """What it takes to have it as it was before."""
        d = self.details
        match self.kind:
            case "damaged":
                return "none: nobody knows what it did"
            case "rewind" | "repair":
                return f"undo() moves the head to {d['from'] or 'none'} again"
            case "tag":
                return "undo() removes the tags"
            case "label" if d["was"] is None:
                return "undo() removes the label"
            case "label":
                return f"undo() puts the label {d['was']!r} back"
            case "undo":
                return "redo()"
            case "redo":
                return "undo()"
        return "undo(), until gc() has freed it"


def _list(names: list[str]) -> str:
    return ", ".join([repr(name) for name in names]) or "with nothing new"
