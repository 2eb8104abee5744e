"""Plain data classes of the public API, such as Usage, ToolCall and Operation."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from holdfast import provider_usage
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

Status = Literal["in_progress", "completed", "failed", "halted"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "failed", "halted")
DAMAGED = "damaged"
"""The `kind` of an operation whose row cannot be read."""
NOTHING: Any = object()
"""The default of an argument for which None is a value."""


class Restart(Enum):
    """The type of RESTART."""

    RESTART = "restart"


RESTART = Restart.RESTART
"""Yielded by Session.stream() in place of a chunk: the chunks before it no longer count."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def time_of(us: int) -> dt.datetime:
    """Return the time that is `us` microseconds after the start of 1970, in UTC."""
    return _EPOCH + dt.timedelta(microseconds=us)


class UsageFields(TypedDict, total=False):
    """The fields of a Usage, as keywords."""

    input: int
    output: int
    cached: int
    reasoning: int
    cost: float
    model: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and cost, for example of the model calls between a checkpoint and its parent.

    `tokens` is `input + output`, unless it is given: some sources only know the total. Models of
    all providers are counted in the same way; of() reads their own usage objects.

    A cost is rounded to 12 significant digits, here and nowhere else. So sums of costs show no
    digits that only come from binary arithmetic: 0.1 + 0.2 is 0.3.

    Raises InvalidRequest if a field has a wrong type.
    """

    input: int = 0
    """All input tokens, also those that were read from a cache or written to it."""
    output: int = 0
    """All output tokens, also those for reasoning."""
    cached: int = 0
    """The part of `input` that was read from a cache."""
    reasoning: int = 0
    """The part of `output` that the model spent on reasoning."""
    cost: float = 0.0
    """The cost, in the currency that the agent counts in."""
    model: str | None = None
    """The name of the model. None if it is unknown, or if `parts` name several."""
    tokens: int = field(default=NOTHING)
    """All tokens."""
    parts: tuple[Usage, ...] = ()
    """The usage of each model, if this is a sum over several. Use by_model() to read it."""

    def __post_init__(self) -> None:
        if self.tokens is NOTHING and type(self.input) is type(self.output) is int:
            object.__setattr__(self, "tokens", self.input + self.output)
        for name in ("input", "output", "cached", "reasoning", "tokens"):
            if type(getattr(self, name)) is not int:
                raise _not_usage(f"{name} must be a whole number, not {getattr(self, name)!r}")
        if type(self.cost) is float:
            object.__setattr__(self, "cost", float(f"{self.cost:.12g}"))
        elif type(self.cost) is not int:
            raise _not_usage(f"the cost must be an int or a float, not {self.cost!r}")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise _not_usage(f"the model must be a name, not {self.model!r}")

    @classmethod
    def of(cls, usage: Any, **more: Unpack[UsageFields]) -> Usage:
        """Return the usage that a dict or an object of a provider describes.

        `usage` is a Usage; a dict with its fields; or a usage object of OpenAI (both APIs),
        Anthropic or Gemini, as an object or a dict. Each is converted to the fields above: for
        Anthropic, `input` also counts the tokens of the cache, and for Gemini, `output` also counts
        those for thoughts. Other fields can be added, as these objects have no cost and no model:

            Usage.of(response.usage, model=response.model, cost=0.0021)

        Everything that takes a Usage also takes what of() takes. Raises InvalidRequest if it is not
        a usage, if a count is negative, or if a part is larger than the whole. A cost may be
        negative, as a refund is.
        """
        found = usage if isinstance(usage, Usage) else cls(**provider_usage.fields(usage))
        known: dict[str, Any] = {k: v for k, v in more.items() if v is not None}
        if known:
            found = replace(found, parts=(), **known)
        if not math.isfinite(found.cost):  # one NaN or infinity would spoil every sum
            raise _not_usage(f"the cost must be a number, not {found.cost!r}")
        if min(found.input, found.output, found.cached, found.reasoning) < 0:
            raise _not_usage("a number of tokens is negative")
        for part, whole in (("cached", "input"), ("reasoning", "output")):
            if getattr(found, part) > getattr(found, whole):
                raise _not_usage(f"{part} is a part of {whole}, and cannot be larger")
        if found.tokens < found.input + found.output:
            raise _not_usage("tokens is the total, and cannot be less than input + output")
        return found

    def by_model(self) -> dict[str | None, Usage]:
        """Return the usage of each model. The key None has the usage of unknown models."""
        return {part.model: part for part in self._split()}

    def _split(self) -> tuple[Usage, ...]:
        return self.parts or ((self,) if self.tokens or self.cost else ())

    def __add__(self, other: Usage) -> Usage:
        if self.model == other.model and not self.parts and not other.parts:
            return self._plus(other)
        parts: dict[str | None, Usage] = {}
        for part in (*self._split(), *other._split()):
            before = parts.get(part.model)
            parts[part.model] = part if before is None else before._plus(part)
        if len(parts) < 2:
            return next(iter(parts.values()), Usage())
        total = self._plus(other)
        return replace(
            total, model=None, parts=tuple(parts[name] for name in sorted(parts, key=_by_name))
        )

    def _plus(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input, self.output + other.output, self.cached + other.cached,
            self.reasoning + other.reasoning, self.cost + other.cost, self.model,
            self.tokens + other.tokens,
        )  # fmt: skip


def _by_name(model: str | None) -> str:
    return model or ""


def _not_usage(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"not a usage: {why}", hint='Usage(input=1200, output=80, cost=0.0021, model="…")'
    )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model requested and that has no result yet."""

    id: str
    """The id that the model has given to the call."""
    name: str
    """The name of the tool."""
    arguments: Any = None
    """The arguments, usually a dict."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """More facts about the call."""


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
    """An entry of the operation log: a rewind, new name, tag, label, deletion, repair or undo."""

    session: str
    """The name of the session."""
    number: int
    """Its number among the operations of the session."""
    kind: str
    """The kind, such as "rewind", "tag", "delete" or "undo"."""
    created_us: int
    """Microseconds since 1970, in UTC."""
    details: dict[str, Any]
    """The details, which depend on the kind."""
    forks: tuple[str, ...] = ()
    """Sessions that were forked from the deleted checkpoints; set only by `delete()`.

    The data that they share with the deleted checkpoints is kept.
    """

    @property
    def created_at(self) -> dt.datetime:
        """When it was done, by the clock of the machine that did it."""
        return time_of(self.created_us)

    @property
    def summary(self) -> str:
        """Return one line that describes the operation. It names checkpoints by their `seq`."""
        d = self.details
        match self.kind:
            case "damaged":
                return f"unknown: {d['damage']}"
            case "repair" if d["from"] == d["to"]:
                return "undo() works again, but not for what was done before"
            case "repair":
                return f"the head moved from checkpoint {d['from']}, which is damaged, to {d['to']}"
            case "rewind" if "adopted" in d:
                moved = f"the head moved from checkpoint {d['from'] or 'none'} to {d['to']}"
                return f"the fork {d['adopted']!r} adopted: {moved}"
            case "rewind":
                return f"the head moved from checkpoint {d['from'] or 'none'} to {d['to']}"
            case "rename":
                return f"the session renamed from {d['from']!r} to {d['to']!r}"
            case "tag":
                verb = "no longer tagged" if "removed" in d else "tagged"
                return f"checkpoint {d['seq']} {verb} {_list(d.get('removed', d['tags']))}"
            case "label" if d["label"] is None:
                return f"checkpoint {d['seq']} no longer labelled {d['was']!r}"
            case "label":
                return f"checkpoint {d['seq']} labelled {d['label']!r}"
            case "undo":
                return f"the {d['what']} undone"
            case "redo":
                return f"the {d['what']} redone"
        count = self.deleted
        if "session" in d and "checkpoints" not in d:  # older stores did not count them
            return "the session deleted"
        if "session" in d:
            return f"the session deleted, with {count} checkpoint{'s' * (count != 1)}"
        if "to" in d:
            return f"checkpoint {d['from']}, the head, deleted; the head moved to {d['to']}"
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
                return "none: what it did is unknown"
            case "rewind" | "repair":
                return f"undo() moves the head back to {d['from'] or 'none'}"
            case "rename":
                return f"undo() names the session {d['from']!r} again"
            case "tag" if "removed" in d:
                return "undo() puts the tags back"
            case "tag":
                return "undo() removes the tags"
            case "label" if d["was"] is None:
                return "undo() removes the label"
            case "label":
                return f"undo() puts the label {d['was']!r} back"
            case "undo" if d.get("aside"):
                return "prune() deletes them again"
            case "undo":
                return "redo()"
            case "redo":
                return "undo()"
        return "undo(), until gc() has freed it"


def _list(names: list[str]) -> str:
    return ", ".join([repr(name) for name in names]) or "with nothing new"
