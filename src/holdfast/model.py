"""Plain data classes of the public API, such as Usage, ToolCall and Operation."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Status = Literal["in_progress", "completed", "failed", "halted"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "failed", "halted")
DAMAGED = "damaged"
"""The `kind` of an operation whose row cannot be read."""
NOTHING: Any = object()
"""The default of an argument for which None is a value."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def time_of(us: int) -> dt.datetime:
    """Return the time that is `us` microseconds after the start of 1970, in UTC."""
    return _EPOCH + dt.timedelta(microseconds=us)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and cost of a checkpoint since its parent."""

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.tokens + other.tokens, self.cost + other.cost)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model requested and that has no result yet."""

    id: str
    name: str
    arguments: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)


class RunMark(NamedTuple):
    """The run of a checkpoint, and the turn in it."""

    id: str
    turn: int
    base: int | None
    """The seq of the checkpoint that the turn started from; None at the end of a turn."""


class Record(NamedTuple):
    """The fields of a stored checkpoint."""

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
    """The seq of the parent's parent, used when the parent's record is damaged."""
    damaged: str | None = None

    @property
    def is_fork(self) -> bool:
        """Return whether the parent is in another session."""
        return "origin" in self.extra

    @property
    def own_parent(self) -> int | None:
        """Return the seq of the parent if it is in the same session, otherwise None."""
        return None if self.is_fork else self.parent_seq


def deleted(details: dict[str, Any]) -> int:
    """Return how many checkpoints an operation with these details deletes."""
    runs = [*details.get("runs", ()), *details.get("held", ())]
    return int(details.get("checkpoints", 0) + sum(high - low for low, high in runs))


class Operation(NamedTuple):
    """An entry of the operation log: a rewind, tag, label, deletion, repair, undo or redo."""

    session: str
    number: int
    kind: str
    created_us: int
    details: dict[str, Any]
    forks: tuple[str, ...] = ()
    """Sessions that were forked from the deleted checkpoints; set only by `delete()`.

    The data that they share with the deleted checkpoints is kept.
    """

    @property
    def created_at(self) -> dt.datetime:
        return time_of(self.created_us)

    @property
    def summary(self) -> str:
        """Return one line that describes the operation. It names checkpoints by their `seq`."""
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
        count = self.deleted
        if "session" in d and "checkpoints" not in d:  # older stores did not count them
            return "the session deleted"
        if "session" in d:
            return f"the session deleted, with {count} checkpoint{'s' * (count != 1)}"
        return (
            f"checkpoint {[*d['runs'], *d['held']][0][0]} deleted"
            if count == 1
            else f"{count} checkpoints deleted"
        )

    @property
    def deleted(self) -> int:
        """Return how many checkpoints it deleted; 0 if they were not counted."""
        return deleted(self.details)

    @property
    def way_back(self) -> str:
        """Return one line on how to reverse the operation."""
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
