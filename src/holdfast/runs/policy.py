"""When a run takes a checkpoint, besides the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.errors import InvalidRequest

Event = Literal["llm", "tool", "turn"]
"""A step has returned, a tool has returned, a turn has ended."""


class Moment(NamedTuple):
    """What a policy decides by."""

    event: Event
    turn: int
    seconds: float
    """Since the last checkpoint, or since the run began."""


class Policy:
    """Policies are combined with `|`: a checkpoint is taken when one of them wants it."""

    def wants(self, moment: Moment) -> bool:
        raise NotImplementedError

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _Either(self, other)


@dataclass(frozen=True)
class _Either(Policy):
    left: Policy
    right: Policy

    def wants(self, moment: Moment) -> bool:
        return self.left.wants(moment) or self.right.wants(moment)


@dataclass(frozen=True)
class AfterToolCall(Policy):
    """After each tool call, and at the end of each turn."""

    def wants(self, moment: Moment) -> bool:
        return moment.event in ("tool", "turn")


@dataclass(frozen=True)
class AfterLLMResponse(Policy):
    """After each step, and at the end of each turn."""

    def wants(self, moment: Moment) -> bool:
        return moment.event in ("llm", "turn")


@dataclass(frozen=True)
class EveryN(Policy):
    """At the end of every so many turns. After a crash those since then are gone through again."""

    n: int = 1

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise InvalidRequest(f"EveryN needs a number from 1 on, not {self.n!r}")

    def wants(self, moment: Moment) -> bool:
        return moment.event == "turn" and moment.turn > 0 and moment.turn % self.n == 0


@dataclass(frozen=True)
class EverySeconds(Policy):
    """After the first event that comes so long after the last checkpoint."""

    seconds: float

    def __post_init__(self) -> None:
        if type(self.seconds) not in (int, float) or not 0 < self.seconds < float("inf"):
            raise InvalidRequest(f"EverySeconds needs a number above 0, not {self.seconds!r}")

    def wants(self, moment: Moment) -> bool:
        return moment.seconds >= self.seconds


@dataclass(frozen=True)
class Never(Policy):
    """Only when the run ends, or is told to."""

    def wants(self, moment: Moment) -> bool:  # noqa: ARG002 - whatever it is
        return False
