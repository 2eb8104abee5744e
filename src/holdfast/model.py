"""The nouns as plain data: what lists, history and saves hand to a caller."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Status = Literal["in_progress", "completed", "failed", "halted"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "failed", "halted")
DAMAGED = "damaged"
"""The kind of an operation that cannot be read."""

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


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


class Operation(NamedTuple):
    """A change of head or annotation that is not itself a checkpoint."""

    session: str
    number: int
    kind: str
    created_us: int
    details: dict[str, Any]

    @property
    def created_at(self) -> dt.datetime:
        return EPOCH + dt.timedelta(microseconds=self.created_us)

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
