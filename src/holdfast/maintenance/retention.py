"""Retention rules: decide which checkpoints of a session to keep, and delete the others.

`keep_last` and `keep_every` select checkpoints; `max_age` and `max_bytes` limit the selection. Some
checkpoints are protected from these rules: the head, checkpoints with forks, the base of an open
run, damaged checkpoints and, by default, those with a tag or a label. `session_ttl` deletes whole
sessions, with their protected checkpoints.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock, ids
from holdfast.errors import UNREADABLE, InvalidRequest, SessionBusy, SessionNotFound, require_count
from holdfast.format import records
from holdfast.history import leases, lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.history.operation_effects import apply
from holdfast.history.oplog import Operator
from holdfast.history.writer import Writer
from holdfast.log import logger

if TYPE_CHECKING:
    from holdfast.format.records import Head
    from holdfast.history.operation_effects import OpContext, Outcome
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository

_UNITS = {
    "s|secs?|seconds?": 1,
    "m|mins?|minutes?": 60,
    "h|hrs?|hours?": 3600,
    "d|days?": 86_400,
    "w|weeks?": 7 * 86_400,
}
_PERIODS: dict[str, Callable[[dt.datetime], object]] = {
    "hour": lambda t: (t.date(), t.hour),
    "day": lambda t: t.date(),
    "week": lambda t: t.isocalendar()[:2],
    "month": lambda t: (t.year, t.month),
}


def duration(text: str) -> float | None:
    """Return the seconds of a text such as "90s", "15 min", "12h" or "4w"; None for any other."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-zA-Z]+)", text)
    if match is None:
        return None
    sizes = (size for unit, size in _UNITS.items() if re.fullmatch(unit, match[2].lower()))
    return next((float(match[1]) * size for size in sizes), None)


def seconds(value: Any, name: str) -> float:
    """Return the seconds of a timedelta, or of a text such as "90s", "15 min", "12h" or "30 days".

    Raises InvalidRequest, which mentions `name`, for any other value and for values of 0 or less.
    """
    hint = 'a timedelta, or a number with a unit: "90s", "15m", "12h", "30 days" or "4w"'
    if isinstance(value, dt.timedelta):
        found: float | None = value.total_seconds()
    else:
        found = duration(value) if isinstance(value, str) else None
    if found is None:
        raise InvalidRequest(f"{name} is not a length of time: {value!r}", hint=hint)
    if found <= 0:
        raise InvalidRequest(f"{name} must be more than nothing, not {value!r}")
    return found


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule that says which checkpoints of a session to keep.

    A checkpoint is kept only if every limit allows it. `keep_last` and `keep_every` together keep
    the checkpoints that either of them selects. Protected checkpoints, such as the head and those
    with forks, are always kept; only `session_ttl` deletes them, with their session. Raise
    InvalidRequest if no limit is set, or if a value is not valid.
    """

    keep_last: int | None = None
    """Keep the newest N checkpoints."""
    keep_every: int | str | None = None
    """Keep every Nth step, or the newest of each "hour", "day", "week" or "month"."""
    max_age: str | dt.timedelta | None = None
    """Delete older checkpoints.

    If age is the only reason, gc frees them a day later, because a clock may be wrong.
    """
    max_bytes: int | None = None
    """Delete the oldest checkpoints of a session until the rest has added at most N bytes."""
    store_bytes: int | None = None
    """The same limit for all sessions of a store together."""
    session_ttl: str | dt.timedelta | None = None
    """Delete a whole session when nothing was saved in it for this long."""
    keep_tagged: bool = True
    """Protect checkpoints that have a tag."""
    keep_labelled: bool = True
    """Protect checkpoints that have a label."""
    exact: bool = False
    """Prune after every save of open(…, retention=…). Otherwise a session may have a few more."""

    def __post_init__(self) -> None:
        rules = [f.name for f in fields(self) if f.default is None]
        if all(getattr(self, name) is None for name in rules):
            raise InvalidRequest("a Retention needs a rule", hint="Retention(keep_last=100)")
        for name in ("keep_last", "max_bytes", "store_bytes"):
            value = getattr(self, name)
            if value is not None:
                require_count(name, value)
        every = self.keep_every
        if isinstance(every, str):
            if every not in _PERIODS:
                raise InvalidRequest(f"unknown period {every!r}", hint=", ".join(_PERIODS))
        elif every is not None:
            require_count("keep_every", every)
        for name in ("max_age", "session_ttl"):
            value = getattr(self, name)
            if value is not None:
                seconds(value, name)

    def __str__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in fields(self) if f.name != "exact"]
        return ", ".join([f"{f.name}={value}" for f, value in given if value != f.default])


def check(rule: Any) -> None:
    """Raise InvalidRequest unless `rule` is a Retention."""
    if not isinstance(rule, Retention):
        raise InvalidRequest(f"not a rule: {rule!r}", hint="Retention(keep_last=100)")


class Verdict(NamedTuple):
    """Whether a checkpoint is kept, and the reason."""

    checkpoint: Checkpoint
    """The checkpoint."""
    keep: bool
    """Whether it is kept."""
    reason: str
    """The rule that decided it."""
    protected: bool = False
    """The checkpoint is kept even if a limit would delete it."""
    by_age: bool = False
    """Its age is the only reason to delete the checkpoint."""


class Plan(NamedTuple):
    """The decisions of a rule on every checkpoint of a session."""

    session: str
    """The name of the session."""
    verdicts: tuple[Verdict, ...]
    """What happens to each checkpoint, and why."""
    whole: str | None = None
    """The reason why the whole session is deleted; None if it is not."""

    @property
    def removed(self) -> tuple[Verdict, ...]:
        """The verdicts on the checkpoints that are deleted."""
        return tuple(v for v in self.verdicts if not v.keep)

    @property
    def deleted(self) -> int:
        """How many checkpoints are deleted."""
        return len(self.removed)

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """The verdicts on the checkpoints that are kept."""
        return tuple(v for v in self.verdicts if v.keep)

    def __str__(self) -> str:
        if self.whole is not None:
            return f"session {self.session!r}: all of it goes ({self.deleted}): {self.whole}"
        head = f"session {self.session!r}: {self.deleted} of {len(self.verdicts)} go"
        lines = [head]
        for v in self.verdicts:
            what = "keep" if v.keep else "drop"
            lines.append(f"  {what}  step {v.checkpoint.step}  {v.checkpoint.id}  {v.reason}")
        return "\n".join(lines)


def plan(reader: Reader, session: int, name: str, head: Head, rule: Retention) -> Plan:
    """Decide which checkpoints of a session to keep, from their records. No state is loaded."""
    now_us = time.time_ns() // 1000
    found = list(_all(reader, session, name, head))
    if rule.session_ttl is not None and found:
        idle = now_us - max(c.created_us for c in found)
        if idle > seconds(rule.session_ttl, "session_ttl") * 1e6:
            why = f"nothing was saved for {rule.session_ttl}"
            return Plan(name, tuple([Verdict(c, keep=False, reason=why) for c in found]), why)
    forks = {seq for seq, _ in reader.forks(session, 1, records.MAX_SEQ)}
    bases = leases.needed(reader, session, head)
    chosen = _chosen(found, rule)
    verdicts = [
        _verdict(c, _protection(c, head, bases, forks, rule), chosen, rule, now_us) for c in found
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
    """Return the reason for each seq that keep_last or keep_every selects; None without either."""
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


def _protection(
    c: Checkpoint, head: Head, bases: set[int], forks: set[int], rule: Retention
) -> str | None:
    """Return why a checkpoint is protected from the limits; None if it is not."""
    if c.seq == head.seq:
        return "the head"
    if c.seq in bases:
        return "a run goes on from it"
    if c.seq in forks:
        return "a session was forked from it"
    if c.damaged:
        return "damaged: repair() or delete() it"
    if rule.keep_tagged and c.tags:
        return f"tagged {', '.join(c.tags)}"
    if rule.keep_labelled and c.label is not None:
        return f"labelled {c.label!r}"
    return None


def _verdict(
    c: Checkpoint,
    protection: str | None,
    chosen: dict[int, str] | None,
    rule: Retention,
    now_us: int,
) -> Verdict:
    if protection is not None:
        return Verdict(c, keep=True, reason=protection, protected=True)
    if chosen is not None and c.seq not in chosen:
        return Verdict(c, keep=False, reason=f"not kept by {rule}")
    if rule.max_age is not None:
        age = (now_us - c.created_us) / 1e6
        if age > seconds(rule.max_age, "max_age"):
            return Verdict(c, keep=False, reason=f"older than {rule.max_age}", by_age=True)
    return Verdict(c, keep=True, reason=chosen[c.seq] if chosen else "no rule against it")


def _within(verdicts: list[Verdict], limit: int, name: str) -> list[Verdict]:
    """Delete the oldest checkpoints until the kept ones have added at most `limit` bytes.

    Protected checkpoints are kept, and their bytes count.
    """
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
    """Limit the bytes of all plans together: delete the oldest checkpoints of any session first."""
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
    """Yield each verdict with a time that never decreases, so that the order of commits is kept.

    A clock that was set back may have given a later checkpoint an earlier time.
    """
    when = 0
    for v in verdicts:
        when = max(when, v.checkpoint.created_us)
        yield when, v


def _runs(decided: Plan) -> dict[str, Any]:
    """Return the details of a prune operation: ranges of seqs to delete, each half-open.

    `held` has the ranges deleted by age alone, `runs` all others.
    """
    out: dict[str, list[list[int]]] = {"runs": [], "held": []}
    for v in decided.removed:
        into = out["held" if v.by_age else "runs"]
        seq = v.checkpoint.seq
        if into and into[-1][1] == seq:
            into[-1][1] = seq + 1
        else:
            into.append([seq, seq + 1])
    return out


# -- pruning -------------------------------------------------------------------------------------


def prune(
    operator: Operator, rule: Retention, *, dry_run: bool = False, logged: bool = True
) -> Plan:
    """Delete the checkpoints of a session that a rule does not keep; see Session.prune.

    If not `logged`, undo() skips the operation; deleting a whole session is always logged.
    """
    check(rule)
    plans: list[Plan] = []

    def decide(context: OpContext) -> Outcome | None:
        found = plan(context.reader, context.number, operator.name, context.head, rule)
        plans.append(found)
        return None if dry_run or not found.removed else _removal(context, found)

    operator.attempt("prune", decide, logged=logged)
    return plans[-1]


def prune_store(
    repository: Repository, sessions: Iterable[str], rule: Retention, *, dry_run: bool = False
) -> list[Plan]:
    """Prune several sessions, including the rule `store_bytes`; see Store.prune."""
    check(rule)
    operators: list[Operator] = []
    plans: list[Plan] = []
    for name in sessions:
        with _leaving_alone(name):
            operator = Operator(Writer(repository, name))
            plans.append(prune(operator, rule, dry_run=True))
            operators.append(operator)
    if rule.store_bytes is not None:
        plans = within_store(plans, rule.store_bytes)
    if dry_run:
        return plans
    done: list[Plan] = []
    batch = ids.to_text(ids.new_id())
    for operator, each in zip(operators, plans, strict=True):
        with _leaving_alone(each.session):
            if each.removed:
                carry_out(operator, each, rule, batch)
            done.append(each)
    return done


def carry_out(operator: Operator, decided: Plan, rule: Retention, batch: str) -> None:
    """Delete the checkpoints that a plan removes, by an operation that undo() can take back.

    `batch` is an id that all operations of one prune of the store have.

    Checkpoints that have become protected since are kept. A whole session is deleted only if the
    rule still says so.
    """
    chosen = {v.checkpoint.seq for v in decided.removed}

    def decide(context: OpContext) -> Outcome | None:
        now = plan(context.reader, context.number, operator.name, context.head, rule)
        if decided.whole is not None:
            return None if now.whole is None else _removal(context, now, batch=batch)
        verdicts = [
            v if v.protected else v._replace(keep=v.checkpoint.seq not in chosen)
            for v in now.verdicts
        ]
        now = now._replace(verdicts=tuple(verdicts), whole=None)
        return _removal(context, now, batch=batch) if now.removed else None

    operator.attempt("prune", decide)


def _removal(context: OpContext, decided: Plan, **more: str) -> Outcome:
    if decided.whole is None:
        return apply(context, "prune", _runs(decided) | more)
    outcome = apply(context, "delete", {"session": True, "hold": [*clock.uptime()]} | more)
    outcome.kind = "delete"
    return outcome


@contextmanager
def _leaving_alone(session: str) -> Iterator[None]:
    """Log a warning and skip a session that is damaged, busy or deleted."""
    try:
        yield
    except (*UNREADABLE, SessionBusy, SessionNotFound) as e:
        logger.warning("session %r is not pruned: %s", session, e.message)
