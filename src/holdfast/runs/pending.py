"""Open calls and questions of runs, and the answers to them, from any process."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.errors import (
    UNREADABLE,
    AlreadyDecided,
    Conflict,
    InvalidRequest,
    NotFound,
    SessionBusy,
    SessionNotFound,
)
from holdfast.format import records
from holdfast.history import journal as journals
from holdfast.history import leases, lineage
from holdfast.history.journal import WAIT, Call, Calls, Journal, ended, now_us
from holdfast.model import NOTHING, time_of
from holdfast.runs.messages import shortened
from holdfast.storage.contract import StaleHead
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterator

    from holdfast.errors import HoldfastError
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader


class Pending(NamedTuple):
    """A call that has not ended, or a question that a run waits for."""

    session: str
    """The name of the session."""
    key: str
    """The key for resolve() and answer(). They also take the whole Pending."""
    name: str
    """The name of the tool, step or question."""
    state: Literal["running", "in doubt", "waiting"]
    """A live worker makes the call ("running"), the worker died during it ("in doubt"), or the run
    waits for an answer ("waiting")."""
    arguments: Any
    """The arguments of the call, or the prompt of the question."""
    idempotency_key: str
    """The key that current_key() returns in the call, for every attempt."""
    run: str
    """The id of the run."""
    turn: int
    """The turn in which it began."""
    since: dt.datetime
    """The time at which the call began."""


class MadeCall(NamedTuple):
    """A tool call, step or question of a run, as the journal has recorded it."""

    session: str
    """The name of the session."""
    id: str
    """The key of the call. For a tool call, this is the id that the model has given it."""
    name: str
    """The name of the tool, step or question."""
    arguments: Any
    """The arguments of the call."""
    result: Any
    """The recorded result; None if there is none."""
    success: bool | None
    """None while the call has not ended."""
    error: str | None
    """Type and text of the error: "ValueError: no such flight"."""
    started: dt.datetime
    """When the call began."""
    duration: float | None
    """Seconds from begin to end. None while the call has not ended."""
    run: str
    """The id of the run that made the call."""
    turn: int
    """The turn in which it was made."""
    kind: Literal["tool", "step", "wait"]
    """What was called; a "wait" is a question."""


def of_session(reader: Reader, number: int, name: str) -> list[Pending]:
    """Return the open calls and questions of one session."""
    calls = journals.all_calls(journals.read(reader, number))
    if not calls.open():
        return []
    _, head = lineage.read_head(reader, number)
    active = leases.holder(reader, number, head)
    run, since = (active[1].run, active[1].since) if active else (None, 0)
    return listed(calls, name, lambda call: call.run == run and call.number >= since)


def listed(calls: Calls, session: str, running: Callable[[Call], bool]) -> list[Pending]:
    """Return the calls that have not ended.

    Each is listed by its key, or by its idempotency key if a newer call has the same key.
    """
    newest = {key_of(call): call for call in _by_number(calls)}
    return [
        Pending(
            session, key_of(call) if newest[key_of(call)] is call else call.idempotency_key,
            call.name, _state(call, running=running(call)), call.arguments, call.idempotency_key,
            call.run, call.turn, time_of(call.started_us),
        )
        for call in calls.open()
    ]  # fmt: skip


def _by_number(calls: Calls) -> list[Call]:
    return sorted(calls.all.values(), key=lambda call: call.number)


def _state(call: Call, *, running: bool) -> Literal["running", "in doubt", "waiting"]:
    if call.kind == "wait":
        return "waiting"
    return "running" if running else "in doubt"


def made(reader: Reader, number: int, name: str) -> Iterator[MadeCall]:
    """Yield all calls and questions of a session."""
    for call in journals.all_calls(journals.read(reader, number)).all.values():
        over = call.status not in ("started", "rerun") or call.failure is not None
        yield MadeCall(
            name, call.key, call.name, call.arguments, call.result,
            call.status == "done" if over else None, call.error, time_of(call.started_us),
            None if call.ended_us is None else (call.ended_us - call.started_us) / 1e6,
            call.run, call.turn, call.kind,
        )  # fmt: skip


def answer(backend: Backend, number: int, session: str, to: str | Pending, value: Any) -> None:
    """Write the answer to a question; see Session.answer."""
    journals.encoded(value, "answer")
    journal, asked = Journal(backend, number, None), None
    while True:
        with open_reader(backend) as reader:
            if reader.head(number) is None:
                raise SessionNotFound(f"session {session!r} was deleted")
            journal.catch_up(reader)
        if asked is None:  # only once: a later question of this name is a different one
            otherwise = f"session {session!r} does not wait for {_key(to)!r}"
            asked = _find(journal, "wait", to, otherwise)
        _check_open(journal, asked)
        with suppress(StaleHead):
            journal.offer(ended(asked.number, "done", now_us(), result=value), None)
            return


class Verdict:
    """A decision about a call in doubt. Raises InvalidRequest unless exactly one is given."""

    def __init__(self, result: Any, action: str | None) -> None:
        statuses: dict[str, journals.CallStatus] = {"rerun": "rerun", "skip": "skipped"}
        if (result is NOTHING) == (action is None) or (
            action is not None and action not in statuses
        ):
            raise InvalidRequest(
                "give either the call's result or an action",
                hint='resolve(key, result), or resolve(key, action="rerun" | "skip")',
            )
        self.status = "done" if action is None else statuses[action]
        self.more = {"result": result} if action is None else {}


def resolve(
    backend: Backend, number: int, session: str, of: str | Pending, verdict: Verdict
) -> None:
    """Write the decision about a call in doubt; see Session.resolve."""
    journals.encoded(verdict.more.get("result"), "result")
    journal, call = Journal(backend, number, None), None
    while True:
        with open_reader(backend) as reader:
            journal.catch_up(reader)
            if call is None:
                otherwise = f"no call {_key(of)!r} of session {session!r} is in doubt"
                call = _find(journal, "call", of, otherwise)
            _check_open(journal, call)
            lease = reader.lease(number)
            _, head = lineage.read_head(reader, number)
            active = leases.holder(reader, number, head)
        if active is not None and active[1].run == call.run:
            raise SessionBusy(
                f"session {session!r} is run by process {active[1].owner.pid}, which may call "
                f"{_key(of)!r} itself",
                hint="it asks when it comes to that, or run(takeover=True)",
            )
        with suppress(StaleHead):  # try again: the journal or the lease has changed
            token = None if lease is None else lease.token
            journal.offer(ended(call.number, verdict.status, now_us(), **verdict.more), token)
            return


def key_of(call: Call) -> str:
    """Return the key that pending() shows. Each question of a run has its own."""
    if call.kind != "wait":
        return call.key
    turn = f"@{call.turn}" if call.turn else ""
    return call.name + turn + call.key.removeprefix(WAIT + call.name)


STOPPED = "SIGTERM"
"""The reason of a run that was halted by this signal."""


def halt_reason(call: Call) -> str:
    """Return the reason of the halt of a run that waits for a decision about this call."""
    if call.kind == "wait":
        return f"waiting for {call.name!r}"
    return f"{call.key!r} was begun and may have had its effect"


def _key(wanted: str | Pending) -> str:
    return wanted.key if isinstance(wanted, Pending) else wanted


def _find(
    journal: Journal, kind: Literal["wait", "call"], wanted: str | Pending, otherwise: str
) -> Call:
    """Return the call or question that `wanted` names.

    A string is an idempotency key, or a key (the newest call of it counts), or a name that only one
    open call has. Ended calls are found as well, if they belong to the newest run. A Pending names
    the attempt that it was listed for, even if the call was begun again. Raises NotFound with the
    message `otherwise`, or InvalidRequest if a name is ambiguous.
    """
    if isinstance(wanted, Pending):
        for call in journal.calls.attempts():
            found = call.idempotency_key, time_of(call.started_us), call.kind == "wait"
            if found == (wanted.idempotency_key, wanted.since, kind == "wait"):
                return call
        raise NotFound(otherwise)
    calls = [c for c in _by_number(journal.calls) if (c.kind == "wait") == (kind == "wait")]
    for call in calls:
        if wanted == call.idempotency_key:
            return call
    open_ = [call for call in calls if call.status == "started"]
    recent = [call for call in calls if call.run == calls[-1].run]
    keyed = [call for call in calls if key_of(call) == wanted][-1:]
    if keyed and (keyed[0] in open_ or keyed[0] in recent):
        return keyed[0]
    named = [call for call in open_ if call.name == wanted]
    named = [call for call in named if call.run == named[-1].run]
    if len(named) > 1:
        keys = ", ".join(map(key_of, named))
        raise InvalidRequest(f"{wanted!r} names {len(named)} of them", hint=f"say which: {keys}")
    named = named or [call for call in recent if call.name == wanted]
    if named:
        return named[-1]
    known = [*dict.fromkeys(map(key_of, open_))]
    near = get_close_matches(str(wanted), known) or known
    raise NotFound(otherwise, hint=f"there is {', '.join(near[:5])}" if near else None)


def _check_open(journal: Journal, call: Call) -> None:
    """Raise AlreadyDecided if a call has ended, and Conflict if it was begun again."""
    key = key_of(call)
    if call.status == "started":
        if journal.calls.all[call.id] is not call:
            raise Conflict(f"{key!r} was begun again", hint="session.pending() lists it")
        return
    result = call.result
    stands = {"skipped": "it is left out", "rerun": "it is to be made again", "failed": "it failed"}
    said = stands.get(call.status, f"{shortened(result)} stands")
    what = "is answered already" if call.kind == "wait" else "is no longer in doubt"
    raise AlreadyDecided(
        f"{key!r} {what}: {said}", key=key, outcome=call.status, result=journals.fresh(result)
    )


def all_pending(reader: Reader) -> Iterator[tuple[str, list[Pending] | HoldfastError]]:
    """Yield each session that ever had a run: with its open calls, or an error if unreadable."""
    for lease in leases.all_leases(reader):
        found = reader.session_by_number(lease.session)
        if found is None or found.is_deleted:
            continue
        name = records.decode_name(found.name)
        try:
            yield name, of_session(reader, lease.session, name)
        except UNREADABLE as e:
            yield name, e
