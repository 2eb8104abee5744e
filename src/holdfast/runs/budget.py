"""Budgets: limits on the tokens, the cost and the turns of a run."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.errors import InvalidRequest
from holdfast.history.token_usage import Charge, Ledger, added, most
from holdfast.model import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.history.journal import Call
    from holdfast.model import Record

_META = "over_budget"
"""The key in the meta of the checkpoint at which a run was halted by its budget."""


class BudgetSpent(NamedTuple):
    """The limit that has halted a run."""

    limit: Literal["cost", "tokens", "turns"]
    """The limit that is spent: "cost", "tokens" or "turns"."""
    allowed: float
    """The value of that limit."""
    spent: float
    """What the run has spent of it."""

    @property
    def summary(self) -> str:
        """Return one line, such as "over budget: $1.02 of $1 spent"."""
        spent, allowed = (f"{n:,.12g}" for n in (self.spent, self.allowed))
        if self.limit == "cost":
            return f"over budget: ${spent} of ${allowed} spent"
        return f"over budget: {spent} of {allowed} {self.limit} spent"

    @classmethod
    def read(cls, extra: dict[str, Any]) -> BudgetSpent | None:
        """Read it from the fields of a checkpoint; None if no budget has halted the run there."""
        found = extra.get("meta", {}).get(_META)
        fits = extra.get("trigger") == "budget" and type(found) is list and len(found) == 3
        return cls(*found) if fits else None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the checkpoint at which the run is halted."""
        return {"trigger": "budget", "meta": {_META: [*self]}}


@dataclass(frozen=True)
class Budget:
    """Limits of a run: `session.run(budget=Budget(cost=1.00, turns=20))`.

    A limit is spent as soon as the run has used that much. The run is then halted before its next
    step, tool call or turn; what has begun is finished, so a run can exceed its budget by the calls
    that are in progress. The last checkpoint has the status "halted" and the trigger "budget", and
    `run.over_budget` is a BudgetSpent. A run with a larger budget, or without one, continues there.

    All attempts count: what a run had spent before a crash is not forgotten, and is not counted
    twice. Child sessions do not count; give their runs budgets of their own. The budget is not
    stored, so each run() needs it.
    """

    cost: float | None = None
    """The limit of the cost; None means no limit."""
    tokens: int | None = None
    """The limit of all tokens; None means no limit."""
    turns: int | None = None
    """The limit of the turns; None means no limit."""

    def __post_init__(self) -> None:
        for name in ("tokens", "turns"):
            limit = getattr(self, name)
            if limit is not None and (type(limit) is not int or limit < 0):
                raise _invalid(f"{name} must be a number from 0 on, not {limit!r}")
        if self.cost is not None and (
            type(self.cost) not in (int, float) or not math.isfinite(self.cost) or self.cost < 0
        ):
            raise _invalid(f"cost must be a number from 0 on, not {self.cost!r}")
        if self.cost is None and self.tokens is None and self.turns is None:
            raise _invalid("at least one limit is needed")

    def exceeded(self, usage: Usage, turns: int) -> BudgetSpent | None:
        """Return the first limit that is spent, or None."""
        if self.cost is not None and usage.cost >= self.cost:
            return BudgetSpent("cost", self.cost, usage.cost)
        if self.tokens is not None and usage.tokens >= self.tokens:
            return BudgetSpent("tokens", self.tokens, usage.tokens)
        if self.turns is not None and turns >= self.turns:
            return BudgetSpent("turns", self.turns, turns)
        return None


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"not a budget: {why}", hint="Budget(cost=1.00, tokens=100_000, turns=20)"
    )


class Bill:
    """The usage of all attempts at a run. Each call counts once."""

    def __init__(self, rows: Iterable[Record], calls: Iterable[Call], run: str, base: int) -> None:
        """`rows` and `calls` are those of earlier attempts; `base` is where the turn starts."""
        journaled = {call.number: Charge(run, call.usage, 0) for call in calls if call.run == run}
        ledger = Ledger(rows, journaled)
        self._base = base
        attempts = ledger.outside.pop((run, base), {})
        self._outside = {attempt: charge.usage for attempt, charge in attempts.items()}
        self._settled = added(charge.usage for charge in ledger.charges() if charge.run == run)

    def add_call(self, usage: Usage) -> None:
        """Add the usage of a call that has ended. Calls with a recorded end are in it already."""
        self._settled += usage

    def add_outside(self, base: int, attempt: int, usage: Usage) -> None:
        """Add usage that belongs to no call, once a checkpoint records it."""
        if base != self._base:
            self._settled, self._outside, self._base = self.total(attempt, Usage()), {}, base
        self._outside[attempt] = self._outside.get(attempt, Usage()) + usage

    def total(self, attempt: int, unsaved: Usage) -> Usage:
        """Return everything, with the usage that no checkpoint of this attempt records yet."""
        own = self._outside.get(attempt, Usage()) + unsaved
        return self._settled + functools.reduce(most, self._outside.values(), own)
