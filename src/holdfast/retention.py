"""Retention: which checkpoints may go, and why.

`keep_last` and `keep_every` choose what stays; `max_age` and `max_bytes` limit it. The head, what
others were forked from, and (unless told otherwise) what has a tag or a label always stays.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import leases, lineage
from holdfast.checkpoint import Checkpoint
from holdfast.codec import records
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.backends.base import Reader
    from holdfast.codec.records import Head

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_PERIODS: dict[str, Callable[[dt.datetime], object]] = {
    "hour": lambda t: (t.date(), t.hour),
    "day": lambda t: t.date(),
    "week": lambda t: t.isocalendar()[:2],
    "month": lambda t: (t.year, t.month),
}


def seconds(value: Any, name: str) -> float:
    """A length of time: a timedelta, or text such as "90s", "15m", "12h", "30d", "4w"."""
    if isinstance(value, dt.timedelta):
        found = value.total_seconds()
    else:
        match = (
            re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value) if isinstance(value, str) else None
        )
        if match is None:
            raise InvalidRequest(
                f"{name} must be a timedelta or text, not {value!r}", hint='such as "30d" or "12h"'
            )
        found = float(match[1]) * _UNITS[match[2]]
    if found <= 0:
        raise InvalidRequest(f"{name} must be more than nothing, not {value!r}")
    return found


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep of a session. A checkpoint goes unless each rule that is set lets it stay."""

    keep_last: int | None = None
    """The newest so many,"""
    keep_every: int | str | None = None
    """and every so many steps, or the newest of each "hour", "day", "week" or "month"."""
    max_age: str | dt.timedelta | None = None
    """Nothing older. What goes by its age alone is freed a day later: a clock may be wrong."""
    max_bytes: int | None = None
    """Of a session: the oldest go until what the others have written is no more than this."""
    store_bytes: int | None = None
    """The same for all sessions of a store together."""
    session_ttl: str | dt.timedelta | None = None
    """Whole sessions go when nothing was saved in them for so long."""
    keep_tagged: bool = True
    keep_labelled: bool = True

    def __post_init__(self) -> None:
        rules = [f.name for f in fields(self) if f.default is None]
        if all(getattr(self, name) is None for name in rules):
            raise InvalidRequest("a Retention needs a rule", hint="Retention(keep_last=100)")
        for name in ("keep_last", "max_bytes", "store_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequest(f"{name} must be a number from 1 on, not {value!r}")
        every = self.keep_every
        if isinstance(every, str):
            if every not in _PERIODS:
                raise InvalidRequest(f"unknown period {every!r}", hint=", ".join(_PERIODS))
        elif every is not None and (type(every) is not int or every < 1):
            raise InvalidRequest(f"keep_every must be a number from 1 on, not {every!r}")
        for name in ("max_age", "session_ttl"):
            value = getattr(self, name)
            if value is not None:
                seconds(value, name)

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        shown = [f"{name}={value}" for name, value in given if not (value is None or value is True)]
        return ", ".join(shown)


def check(rule: Any) -> None:
    if not isinstance(rule, Retention):
        raise InvalidRequest(f"not a rule: {rule!r}", hint="Retention(keep_last=100)")


class Verdict(NamedTuple):
    """What becomes of a checkpoint, and why."""

    checkpoint: Checkpoint
    keep: bool
    reason: str
    protected: bool = False
    """It stays whatever the rules say."""
    by_age: bool = False
    """It goes for its age alone."""


class Plan(NamedTuple):
    """What a rule does to a session."""

    session: str
    verdicts: tuple[Verdict, ...]
    whole: str | None = None
    """Why the whole session goes, if it does."""

    @property
    def removed(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if not v.keep)

    @property
    def kept(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.keep)

    def __str__(self) -> str:
        if self.whole is not None:
            return f"session {self.session!r}: all of it goes: {self.whole}"
        head = f"session {self.session!r}: {len(self.removed)} of {len(self.verdicts)} go"
        lines = [head]
        for v in self.verdicts:
            what = "keep" if v.keep else "drop"
            lines.append(f"  {what}  step {v.checkpoint.step}  {v.checkpoint.id}  {v.reason}")
        return "\n".join(lines)


def plan(
    reader: Reader, session: int, name: str, head: Head, rule: Retention, now_us: int | None = None
) -> Plan:
    """Decide on every checkpoint of a session from its record alone; no state is loaded."""
    now_us = time.time_ns() // 1000 if now_us is None else now_us
    found = list(_all(reader, session, name, head))
    if rule.session_ttl is not None and found:
        idle = now_us - max(c._record.created_us for c in found)
        if idle > seconds(rule.session_ttl, "session_ttl") * 1e6:
            return Plan(name, (), f"nothing was saved for {rule.session_ttl}")
    forks = {seq for seq, _ in reader.forks(session, 1, records.MAX_SEQ)}
    bases = leases.needed(reader, session, head)
    chosen = _chosen(found, rule)
    verdicts = [
        Verdict(c, keep=True, reason="a run goes on from it", protected=True)
        if c.seq in bases and c.seq != head.seq
        else _verdict(c, head, forks, chosen, rule, now_us)
        for c in found
    ]
    if rule.max_bytes is not None:
        verdicts = _within(verdicts, rule.max_bytes, "max_bytes")
    return Plan(name, tuple(verdicts))


def _all(reader: Reader, session: int, name: str, head: Head) -> Iterator[Checkpoint]:
    low = 1
    while low <= head.last:
        page, low = lineage.listing(reader, session, name, low, head.last)
        yield from page


def _chosen(found: list[Checkpoint], rule: Retention) -> dict[int, str] | None:
    """Why each stays that keep_last and keep_every choose; None if neither is set."""
    if rule.keep_last is None and rule.keep_every is None:
        return None
    why: dict[int, str] = {}
    if rule.keep_every is not None:
        why |= _every(found, rule.keep_every)
    if rule.keep_last is not None:
        why |= {c.seq: f"one of the last {rule.keep_last}" for c in found[-rule.keep_last :]}
    return why


def _every(found: Iterable[Checkpoint], every: int | str) -> dict[int, str]:
    if isinstance(every, int):
        return {c.seq: f"every {every} steps" for c in found if c.step % every == 0}
    newest: dict[object, int] = {}
    for c in found:
        newest[_PERIODS[every](c.created_at)] = c.seq
    return dict.fromkeys(newest.values(), f"the newest of its {every}")


def _verdict(
    c: Checkpoint,
    head: Head,
    forks: set[int],
    chosen: dict[int, str] | None,
    rule: Retention,
    now_us: int,
) -> Verdict:
    if c.seq == head.seq:
        return Verdict(c, keep=True, reason="the head", protected=True)
    if c.seq in forks:
        return Verdict(c, keep=True, reason="a session was forked from it", protected=True)
    if c.damaged:
        return Verdict(c, keep=True, reason="damaged: repair() or delete() it", protected=True)
    if rule.keep_tagged and c.tags:
        return Verdict(c, keep=True, reason=f"tagged {', '.join(c.tags)}", protected=True)
    if rule.keep_labelled and c.label is not None:
        return Verdict(c, keep=True, reason=f"labelled {c.label!r}", protected=True)
    if chosen is not None and c.seq not in chosen:
        return Verdict(c, keep=False, reason=f"not kept by {rule}")
    if rule.max_age is not None:
        age = (now_us - c._record.created_us) / 1e6
        if age > seconds(rule.max_age, "max_age"):
            return Verdict(c, keep=False, reason=f"older than {rule.max_age}", by_age=True)
    return Verdict(c, keep=True, reason=chosen[c.seq] if chosen else "no rule against it")


def _within(verdicts: list[Verdict], limit: int, name: str) -> list[Verdict]:
    """Let the oldest go until the rest fits; what is protected stays, and counts."""
    total = sum(v.checkpoint.added for v in verdicts if v.keep)
    out = []
    for v in verdicts:
        if v.keep and total > limit and not v.protected:
            total -= v.checkpoint.added
            out.append(Verdict(v.checkpoint, keep=False, reason=f"over {name}={limit}"))
        else:
            out.append(v)
    return out


def within_store(plans: list[Plan], limit: int) -> list[Plan]:
    """Plans of all sessions, so that all together fit: the oldest of any session go first."""
    everything = sorted(
        ((when, n, v) for n, p in enumerate(plans) for when, v in _in_order(p.verdicts)),
        key=lambda entry: entry[:2],
    )
    fitted = _within([v for _, _, v in everything], limit, "store_bytes")
    out: list[list[Verdict]] = [[] for _ in plans]
    for (_, n, _), v in zip(everything, fitted, strict=True):
        out[n].append(v)
    return [p._replace(verdicts=tuple(vs)) for p, vs in zip(plans, out, strict=True)]


def _in_order(verdicts: Iterable[Verdict]) -> Iterator[tuple[int, Verdict]]:
    """Each with its time, but none before that of an earlier one: the order is that of commits."""
    when = 0
    for v in verdicts:
        when = max(when, v.checkpoint._record.created_us)
        yield when, v


def runs(plan: Plan) -> dict[str, Any]:
    """The details of an operation that carries out a plan."""
    out: dict[str, list[list[int]]] = {"runs": [], "held": []}
    for v in plan.removed:
        into = out["held" if v.by_age else "runs"]
        seq = v.checkpoint.seq
        if into and into[-1][1] == seq:
            into[-1][1] = seq + 1
        else:
            into.append([seq, seq + 1])
    return out
