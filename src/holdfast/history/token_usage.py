"""Sum up tokens and cost: of a session, of its runs and children, and of a store.

Every sum is computed from the records and the journal when it is asked for; none is stored.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids
from holdfast.errors import UNREADABLE
from holdfast.format import records
from holdfast.format.records import CHILD_OF
from holdfast.history import journal as journals
from holdfast.history import lineage
from holdfast.model import Usage
from holdfast.storage.rows import PAGE, Address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.model import Record
    from holdfast.storage.reader import Reader

_TOP = b"\xff" * 9


class Totals(NamedTuple):
    """Tokens and cost of a session. No usage is counted twice."""

    path: Usage
    """Usage of this session's checkpoints from the first one to the head."""
    inherited: Usage
    """Usage of the earlier checkpoints, in the sessions that it was forked from."""
    spent: Usage
    """Usage of the whole session, abandoned branches included. `spent.by_model()` splits it."""
    children: Usage
    """Usage of its child sessions, of their child sessions, and so on."""
    runs: dict[str, Usage]
    """The part of `spent` that belongs to runs, by run id."""

    @property
    def total(self) -> Usage:
        """The usage of the session and of its child sessions."""
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
    return Totals(path, inherited, spent, _children(reader, number, {number}), runs)


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
        calls = [[number, *records.usage_fields(used)] for number, used in self.calls.items()]
        return {"spent": [self.attempt, self.base, records.usage_fields(self.outside), calls]}

    @classmethod
    def read(cls, extra: dict[str, Any]) -> Spent | None:
        """Read it from the fields of a record; None if the record has none."""
        if "spent" not in extra:
            return None
        attempt, base, outside, calls = extra["spent"]
        used = {number: records.read_usage(usage) for number, *usage in calls}
        return cls(attempt, base, records.read_usage(outside), used)


def added(usages: Iterable[Usage]) -> Usage:
    return sum(usages, Usage())


def most(one: Usage, other: Usage) -> Usage:
    """Return the larger number of tokens, and the larger cost.

    If the models differ, return the usage that cost more, because each belongs to its models.
    """
    if one.model != other.model or one.parts or other.parts:
        return max(one, other, key=lambda usage: (usage.cost, usage.tokens))
    larger = one if one.tokens >= other.tokens else other
    return replace(larger, cost=max(one.cost, other.cost))


class Charge(NamedTuple):
    """Usage that counts once, with the run that spent it (None for no run) and its time."""

    run: str | None
    usage: Usage
    at_us: int


def _larger(one: Charge, other: Charge) -> Charge:
    return one._replace(usage=most(one.usage, other.usage))


class Ledger:
    """The usage that records and a journal contain, in the parts that count once.

    A call counts once, even if no checkpoint names it. Usage that belongs to no call is added again
    by each attempt at a turn. So only the attempt with the largest sum counts.
    """

    def __init__(self, rows: Iterable[Record], calls: dict[int, Charge]) -> None:
        self.calls = calls
        """By the number of the entry that began the call."""
        self.outside: dict[tuple[str | None, int], dict[int, Charge]] = {}
        """Usage that belongs to no call: by run and base, and then by attempt."""
        self.plain: list[Charge] = []
        """Usage of checkpoints that no run saved."""
        for record in rows:
            self._add(record)

    def _add(self, record: Record) -> None:
        extra, at = record.extra, record.created_us
        run, spent = extra.get("run", (None,))[0], Spent.read(extra)
        if spent is None:
            if "usage" in extra:
                self.plain.append(Charge(run, records.read_usage(extra["usage"]), at))
            return
        attempts = self.outside.setdefault((run, spent.base), {})
        before = attempts.get(spent.attempt, Charge(run, Usage(), at))
        attempts[spent.attempt] = before._replace(usage=before.usage + spent.outside)
        for number, usage in spent.calls.items():
            known = self.calls.get(number, Charge(run, usage, at))
            self.calls[number] = Charge(run, most(usage, known.usage), known.at_us)

    def charges(self) -> Iterator[Charge]:
        yield from self.plain
        yield from self.calls.values()
        for attempts in self.outside.values():
            yield functools.reduce(_larger, attempts.values())


def charges(reader: Reader, number: int, *, adopted: bool = True) -> Iterator[Charge]:
    """Yield the usage of a session, each part of it once. Rows that cannot be read are left out.

    Unless `adopted`, leave out the checkpoints that it has adopted from a fork that still has them.
    """
    rows = (row.record for row in lineage.sound_rows(reader, number))
    if not adopted:
        rows = (record for record in rows if not _is_elsewhere(reader, record))
    return Ledger(rows, _journaled(reader, number)).charges()


def _is_elsewhere(reader: Reader, record: Record) -> bool:
    """Return whether a checkpoint was adopted from one that a session still has."""
    id = ids.from_text(record.extra.get("adopted", ""))
    found = reader.find_ids(id, id, 1) if id else []
    return any(not lineage.is_deleted(reader, row.session) for row in found)


def _spent(reader: Reader, number: int) -> tuple[Usage, dict[str, Usage]]:
    """Return the usage of a session, and of each run."""
    runs: defaultdict[str | None, Usage] = defaultdict(Usage)
    for charge in charges(reader, number):
        runs[charge.run] += charge.usage
    total = added(runs.values())
    return total, {run: usage for run, usage in runs.items() if run is not None}


def _journaled(reader: Reader, number: int) -> dict[int, Charge]:
    """Return the usage of each call whose end has some, by number."""
    runs: dict[int, str] = {}
    out: dict[int, Charge] = {}
    try:
        for n, facts in journals.read(reader, number):
            if facts["what"] == "started":
                runs[n] = facts["run"]
            elif facts["what"] in ("done", "failed") and "usage" in facts and facts["of"] in runs:
                usage = records.read_usage(facts["usage"])
                out[facts["of"]] = Charge(runs[facts["of"]], usage, facts["at"])
    except UNREADABLE:
        pass  # verify() reports it
    return out


def _children(reader: Reader, parent: int, seen: set[int]) -> Usage:
    out = Usage()
    for child in _sessions_for(reader, parent):
        found = reader.session_by_number(child)
        if child in seen or found is None or found.is_deleted:
            continue
        seen.add(child)
        out += _spent(reader, child)[0]
        out += _children(reader, child, seen)
    return out


def _sessions_for(reader: Reader, parent: int) -> Iterator[int]:
    """Yield the sessions that were saved as children of a session, under any of its names."""
    for name in lineage.names(reader, parent):
        high = _TOP
        while page := reader.find_terms(CHILD_OF, name, b"", high, PAGE):
            yield from [int.from_bytes(id, "big") for id in page]
            high = page[-1]
