"""Policies: when a run or an Autosave takes checkpoints, besides the one at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.errors import InvalidRequest

Event = Literal["llm", "tool", "turn"]
"""A step has returned, a tool has returned, or a turn has ended."""
TRIGGERS: dict[str, str] = {"llm": "llm", "tool": "tool_call", "turn": "turn"}
"""The trigger of a checkpoint, by its event."""


class Moment(NamedTuple):
    """The situation in which a policy decides."""

    event: Event
    """What has happened: "llm" (a step has returned), "tool" (a tool has returned) or "turn"."""
    turn: int
    """The number of the turn."""
    seconds: float
    """Seconds since the last checkpoint, or since the start of the run."""


class Policy:
    """Decides when a run or an Autosave takes checkpoints. Subclasses implement wants().

    Policies are combined with `|`: a checkpoint is taken when one of them wants it.
    """

    def wants(self, moment: Moment) -> bool:
        """Return whether to take a checkpoint now."""
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
    """A checkpoint after each tool call, and at the end of each turn."""

    def wants(self, moment: Moment) -> bool:
        """Return whether a tool has returned, or a turn has ended."""
        return moment.event in ("tool", "turn")


@dataclass(frozen=True)
class AfterLLMResponse(Policy):
    """A checkpoint after each step, and at the end of each turn."""

    def wants(self, moment: Moment) -> bool:
        """Return whether a step has returned, or a turn has ended."""
        return moment.event in ("llm", "turn")


@dataclass(frozen=True)
class EveryN(Policy):
    """A checkpoint at the end of every `n`-th turn.

    After a crash, the turns since the last checkpoint run again.
    """

    n: int = 1
    """A checkpoint is saved at the end of every n-th turn."""

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise InvalidRequest(f"EveryN needs a number from 1 on, not {self.n!r}")

    def wants(self, moment: Moment) -> bool:
        """Return whether this turn is one of those that get a checkpoint."""
        return moment.event == "turn" and moment.turn > 0 and moment.turn % self.n == 0


@dataclass(frozen=True)
class EverySeconds(Policy):
    """A checkpoint after the first event at least `seconds` after the last checkpoint."""

    seconds: float
    """The shortest time between two checkpoints."""

    def __post_init__(self) -> None:
        if type(self.seconds) not in (int, float) or not 0 < self.seconds < float("inf"):
            raise InvalidRequest(f"EverySeconds needs a number above 0, not {self.seconds!r}")

    def wants(self, moment: Moment) -> bool:
        """Return whether enough time has passed since the last checkpoint."""
        return moment.seconds >= self.seconds


@dataclass(frozen=True)
class Never(Policy):
    """No checkpoint, except at the end of the run and when the code calls run.checkpoint()."""

    def wants(self, moment: Moment) -> bool:  # noqa: ARG002 - the same for every moment
        """Return False."""
        return False


def policy_of(given: Policy | None) -> Policy:
    """Return the policy, by default EveryN(1). Raises InvalidRequest if it is no policy."""
    if given is not None and not isinstance(given, Policy):
        raise InvalidRequest(f"not a policy: {given!r}", hint="AfterToolCall(), EveryN(5), …")
    return given or EveryN(1)
