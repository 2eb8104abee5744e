"""What runs have left open, and answers to it, from any process."""

from __future__ import annotations

import datetime as dt
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast import leases, lineage
from holdfast.errors import InvalidRequest, NotFound, SessionBusy
from holdfast.runs import journal as journals
from holdfast.runs.journal import Call, Journal, ended, now_us

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Backend, Reader

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _time(us: int) -> dt.datetime:
    return _EPOCH + dt.timedelta(microseconds=us)


class Pending(NamedTuple):
    """A call without an end, or something that a run waits for."""

    session: str
    key: str
    """What resolve() or answer() take."""
    name: str
    state: Literal["running", "in doubt", "waiting"]
    arguments: Any
    """Of the call; or the prompt."""
    idempotency_key: str
    run: str
    turn: int
    since: dt.datetime
    partial: tuple[Any, ...]


class MadeCall(NamedTuple):
    """What a run has called: a tool, a step, or what it waited for."""

    session: str
    id: str
    name: str
    arguments: Any
    result: Any
    success: bool | None
    """None while it has no end."""
    error: str | None
    started: dt.datetime
    duration: float | None
    """Seconds."""
    run: str
    turn: int
    kind: Literal["tool", "step", "wait"]


def of_session(reader: Reader, number: int, name: str) -> list[Pending]:
    calls = journals.all_calls(journals.read(reader, number)).open()
    if not calls:
        return []
    _, head = lineage.read_head(reader, number)
    active = leases.holder(reader, number, head)
    run, since = (active[1].run, active[1].since) if active else (None, 0)
    return [told(call, name, running=call.run == run and call.number >= since) for call in calls]


def told(call: Call, session: str, *, running: bool) -> Pending:
    """A call without an end, which is being made or not."""
    state: Literal["running", "in doubt", "waiting"] = "in doubt"
    if call.kind == "wait":
        state = "waiting"
    elif running:
        state = "running"
    return Pending(
        session, _shown(call), call.name, state, call.arguments, call.idempotency_key, call.run,
        call.turn, _time(call.started_us), tuple(call.partial),
    )  # fmt: skip


def made(reader: Reader, number: int, name: str) -> Iterator[MadeCall]:
    for call in journals.all_calls(journals.read(reader, number)).all.values():
        over = call.outcome not in ("started", "rerun")
        yield MadeCall(
            name, call.key, call.name, call.arguments, call.result,
            call.outcome == "done" if over else None, call.error, _time(call.started_us),
            None if call.ended_us is None else (call.ended_us - call.started_us) / 1e6,
            call.run, call.turn, call.kind,
        )  # fmt: skip


def answer(backend: Backend, number: int, session: str, name: str, value: Any) -> None:
    with backend.reader() as reader:
        journal = Journal(backend, number, None)
        journal.catch_up(reader)
        waiting = [call for call in journal.calls.open() if call.kind == "wait"]
        call = _find(waiting, name, f"session {session!r} does not wait for {name!r}")
    journals.encoded(value, "answer")
    journal.note(ended(call.number, "done", now_us(), result=value))


NOTHING: Any = object()
"""Where None may be meant."""


class Verdict:
    """What became of a call in doubt, in somebody's words."""

    def __init__(self, result: Any, *, rerun: bool, skip: bool) -> None:
        said = [result is not NOTHING, rerun is True, skip is True]
        if sum(said) != 1:
            raise InvalidRequest(
                "say what became of the call", hint="one of result=…, rerun=True, skip=True"
            )
        self.outcome: journals.Outcome = "done" if said[0] else "rerun" if said[1] else "skipped"
        self.more = {"result": result} if said[0] else {}


def resolve(backend: Backend, number: int, session: str, key: str, verdict: Verdict) -> None:
    with backend.reader() as reader:
        journal = Journal(backend, number, None)
        journal.catch_up(reader)
        open_ = [call for call in journal.calls.open() if call.kind != "wait"]
        call = _find(open_, key, f"no call {key!r} of session {session!r} is in doubt")
        _, head = lineage.read_head(reader, number)
        active = leases.holder(reader, number, head)
        if active is not None and active[1].run == call.run:
            raise SessionBusy(
                f"session {session!r} is run by process {active[1].owner.pid}, which may call "
                f"{key!r} itself",
                hint="it asks when it comes to that, or run(takeover=True)",
            )
    journal.note(ended(call.number, verdict.outcome, now_us(), **verdict.more))


def _shown(call: Call) -> str:
    """What a call is known by outside: a run may wait for one thing once a turn."""
    return call.name if call.kind == "wait" else call.key


def _find(calls: list[Call], wanted: str, otherwise: str) -> Call:
    """The newest of this key, idempotency key, or (if there is only one) name."""
    for call in reversed(calls):
        if wanted in (_shown(call), call.idempotency_key):
            return call
    named = [call for call in calls if call.name == wanted]
    if len(named) == 1:
        return named[0]
    known = [*dict.fromkeys(_shown(call) for call in calls)]
    near = get_close_matches(str(wanted), known) or known
    raise NotFound(otherwise, hint=f"there is {', '.join(near[:5])}" if near else None)
