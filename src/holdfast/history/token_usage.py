"""Sum up tokens and cost of a session: on its path, on all branches, and of its children."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import UNREADABLE
from holdfast.format import records
from holdfast.format.records import CHILD_OF
from holdfast.history import journal as journals
from holdfast.history import lineage
from holdfast.model import Usage
from holdfast.storage.rows import PAGE, Address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.storage.reader import Reader

_TOP = b"\xff" * 9


class Totals(NamedTuple):
    """Tokens and cost of a session. No usage is counted twice."""

    path: Usage
    """Usage of this session's checkpoints from the first one to the head."""
    inherited: Usage
    """Usage of the earlier checkpoints, in the sessions that it was forked from."""
    spent: Usage
    """Usage of the whole session, abandoned branches included."""
    children: Usage
    """Usage of its child sessions, of their child sessions, and so on."""
    runs: dict[str, Usage]
    """The part of `spent` that belongs to runs, by run id."""

    @property
    def total(self) -> Usage:
        return self.spent + self.children


def totals(reader: Reader, number: int, name: str) -> Totals:
    path = inherited = Usage()
    _, head = lineage.read_head(reader, number)
    at = Address(number, head.seq) if head.seq else None
    for checkpoint in lineage.line(reader, at, head.parent):
        if checkpoint.session == name:
            path += checkpoint.usage
        else:
            inherited += checkpoint.usage
    spent, runs = _spent(reader, number)
    return Totals(path, inherited, spent, _children(reader, name, {number}), runs)


class Spent(NamedTuple):
    """The parts of the usage of a run's checkpoint.

    Each attempt at a turn starts from the same base and gets the results of recorded calls from the
    journal. So the checkpoints of several attempts name the same calls.
    """

    attempt: int
    base: int
    """The seq of the checkpoint that the turn started from."""
    outside: Usage
    """Usage that belongs to no call."""
    calls: dict[int, Usage]
    """Usage of each call that ended, by the number of the entry that began it. Calls that another
    checkpoint between the base and this one names are left out."""

    @property
    def total(self) -> Usage:
        return added([self.outside, *self.calls.values()])

    def field(self) -> dict[str, Any]:
        """Return the field for the record; an empty dict without usage and calls."""
        if self.outside == Usage() and not self.calls:
            return {}
        calls = [[number, used.tokens, used.cost] for number, used in self.calls.items()]
        return {"spent": [self.attempt, self.base, [self.outside.tokens, self.outside.cost], calls]}

    @classmethod
    def read(cls, extra: dict[str, Any]) -> Spent | None:
        """Read it from the fields of a record; None if the record has none."""
        if "spent" not in extra:
            return None
        attempt, base, outside, calls = extra["spent"]
        return cls(attempt, base, Usage(*outside), {n: Usage(*usage) for n, *usage in calls})


def added(usages: Iterable[Usage]) -> Usage:
    return sum(usages, Usage())


def most(one: Usage, other: Usage) -> Usage:
    """Return the larger number of tokens, and the larger cost."""
    return Usage(max(one.tokens, other.tokens), max(one.cost, other.cost))


def _spent(reader: Reader, number: int) -> tuple[Usage, dict[str, Usage]]:
    """Return the usage of a session, and of each run.

    A call counts once, even if no checkpoint names it. Usage that belongs to no call is added again
    by each attempt at a turn. So only the attempt with the largest sum counts.
    """
    runs: defaultdict[str | None, Usage] = defaultdict(Usage)
    calls = _journaled(reader, number)
    outside: defaultdict[tuple[str, int], defaultdict[int, Usage]]
    outside = defaultdict(lambda: defaultdict(Usage))
    for row in lineage.sound_rows(reader, number):
        extra = row.record.extra
        run, spent = extra.get("run", (None,))[0], Spent.read(extra)
        if spent is None:
            runs[run] += Usage(*extra.get("usage", ()))
            continue
        outside[run, spent.base][spent.attempt] += spent.outside
        for call, usage in spent.calls.items():
            calls[call] = run, most(usage, calls.get(call, (run, Usage()))[1])
    for run, usage in calls.values():
        runs[run] += usage
    for (run, _), attempts in outside.items():
        runs[run] += functools.reduce(most, attempts.values())
    total = added(runs.values())
    return total, {run: usage for run, usage in runs.items() if run is not None}


def _journaled(reader: Reader, number: int) -> dict[int, tuple[str, Usage]]:
    """Return the run and the usage of each call whose end has some, by number."""
    runs: dict[int, str] = {}
    out: dict[int, tuple[str, Usage]] = {}
    try:
        for n, facts in journals.read(reader, number):
            if facts["what"] == "started":
                runs[n] = facts["run"]
            elif facts["what"] in ("done", "failed") and "usage" in facts and facts["of"] in runs:
                out[facts["of"]] = runs[facts["of"]], Usage(*facts["usage"])
    except UNREADABLE:
        pass  # verify() reports it
    return out


def _children(reader: Reader, name: str, seen: set[int]) -> Usage:
    out = Usage()
    high = _TOP
    while page := reader.find_terms(CHILD_OF, records.encode_name(name), b"", high, PAGE):
        for id in page:
            child = int.from_bytes(id, "big")
            found = reader.session_by_number(child)
            if child in seen or found is None or found.is_deleted:
                continue
            seen.add(child)
            out += _spent(reader, child)[0]
            out += _children(reader, records.decode_name(found.name), seen)
        high = page[-1]
    return out
