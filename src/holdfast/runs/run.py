"""A run: one execution over a session, which goes on where it was after a crash.

It is a series of turns, each from one checkpoint to the next. After a crash the turn that was
interrupted starts again from the checkpoint that it started from (its base); what was recorded of
it comes back from the journal and is not done again.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from holdfast import fields as fielding
from holdfast.errors import (
    Fenced,
    InDoubt,
    InvalidRequest,
    NotFound,
    NotSerializable,
    StepChanged,
    StepFailed,
)
from holdfast.logs import logger
from holdfast.model import RunMark, Status, ToolCall, Usage
from holdfast.models import revive
from holdfast.runs import failures, options
from holdfast.runs import journal as journals
from holdfast.runs import messages as talking
from holdfast.runs import pending as pendings
from holdfast.runs.journal import Call, Journal, ended, now_us, started
from holdfast.runs.morph import morph
from holdfast.runs.opening import open_run
from holdfast.runs.options import Done
from holdfast.runs.policy import EveryN, Moment, Policy
from holdfast.runs.signals import Halt

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.runs.opening import Opened
    from holdfast.runs.pending import Pending
    from holdfast.runs.policy import Event
    from holdfast.session import Session


current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("holdfast call", default=None)
"""The call that is being made."""


class RunCore:
    """What runs do, whoever calls them: in threads or in a loop."""

    def __init__(
        self,
        session: Session,
        *,
        policy: Policy | None = None,
        name: str | None = None,
        state: Any = None,
        takeover: bool = False,
        resume: bool | None = None,
    ) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidRequest(f"not a policy: {policy!r}", hint="AfterToolCall(), EveryN(5), …")
        if name is not None:
            options.check_name("the name of a run", name)
        self._given, self._options = session, {
            "name": name, "state": state, "takeover": takeover, "resume": resume,
        }  # fmt: skip
        self._policy = policy or EveryN(1)
        self._saved_at = time.monotonic()
        self._lock = threading.RLock()
        self._opened: Opened | None = None
        self._pid = os.getpid()
        self._lost = self._over = False
        self._turn = 0
        self._base = 0
        self._parent: int | None = None
        """The checkpoint to go on from, if that is not the head."""
        self._looping = False
        self._state: Any = None
        self._usage = Usage()
        self._ordinals: dict[tuple[int, str], int] = {}
        self._flying: dict[str, Call | None] = {}
        """The calls that are being made; None for one that is not yet noted as begun."""
        self._visited: set[str] = set()
        self.resumed = False
        """Whether this goes on with a run that was interrupted."""
        self.removed: tuple[str, ...] = ()
        """Keys of calls that were recorded, but that the code has not asked for again."""

    # -- beginning and end ---------------------------------------------------------------------

    def open(self) -> None:
        if self._opened is not None:
            raise InvalidRequest("a run is entered once", hint="session.run() makes another one")
        opened = open_run(self._given, lost=self._lose, **self._options)
        self._opened, self.resumed = opened, opened.resumed
        self._turn, self._base = opened.turn, opened.base
        self._parent = opened.base if opened.base != opened.head else None
        self._state = opened.first_state
        self._keep_calls()

    def _lose(self) -> None:
        self._lost = True
        self._given.lease_event("lost")

    @property
    def _ours(self) -> Opened:
        """What the run has, while it is active and this worker's."""
        if self._opened is None or self._over:
            raise InvalidRequest("the run is not active", hint="with session.run() as run: …")
        if os.getpid() != self._pid:
            raise InvalidRequest("a run cannot be used on the other side of a fork")
        if self._lost:
            raise Fenced(f"session {self._given.name!r} was taken over by another worker")
        return self._opened

    @property
    def _journal(self) -> Journal:
        return self._ours.journal

    def close(self, error: BaseException | None) -> bool:
        """Take the last checkpoint and let the session go; whether `error` is dealt with."""
        opened = self._opened
        if opened is None or self._over:
            return False
        try:
            if self._lost or os.getpid() != self._pid or isinstance(error, Fenced):
                return False
            if error is None:
                self._finish("completed", None, None)
            elif isinstance(error, Halt):
                self._finish("halted", error.reason, error.hint)
            elif isinstance(error, InDoubt):
                self._finish("halted", error.message, error.hint)
            elif not isinstance(error, Exception):  # Ctrl-C, the end of the program, cancellation
                self._finish("halted", type(error).__name__, None)
            else:
                self._note_failure(error)
                self._finish("failed", f"{type(error).__name__}: {error}", None)
        finally:
            self._over = True
            opened.let_go()
        return isinstance(error, Halt)

    def _note_failure(self, error: BaseException) -> None:
        """The step that has ended the run is tried again when it is resumed."""
        for number in failures.sources(error, self._ours.token):
            self._journal.note(ended(number, "rerun", now_us()))

    def _finish(self, status: Status, reason: str | None, hint: str | None) -> None:
        complete = status == "completed"
        if complete:
            self._check_loop()
            self._note_removed(self._turn)
        fields: Fields = {"status": status, "trigger": "run"}
        if reason:
            fields["reason"] = reason
        if not complete:
            fields["hint"] = hint or "run() resumes it"
            _, dangling = talking.repaired(self._state)
            fields["pending"] = [*self._pending(), *dangling]
        opened = self._ours
        opened.part(complete=complete)
        try:
            self._save(None if complete else self._base, fields)
        except NotSerializable as e:
            self._finish_without_state(fields, e)
            if complete:
                raise
        self._given.lease_event("given back")

    def _finish_without_state(self, fields: Fields, error: NotSerializable) -> None:
        """The end of a run whose state cannot be stored: with the one that it goes on from."""
        logger.warning("the state of session %r is not saved: %s", self._given.name, error.message)
        if fields["status"] == "completed":
            fields["status"], fields["reason"] = "failed", f"NotSerializable: {error.message}"
        fields.setdefault("hint", "run() resumes it")
        self._ours.part(complete=False)
        self._save_state(self._ours.state_at(self._base), self._base, fields)

    def _check_loop(self) -> None:
        if self._turn and not self._looping:
            raise StepChanged(
                f"the run was in turn {self._turn}, but the code has not entered run.turns()"
            )

    # -- turns ---------------------------------------------------------------------------------

    def enter_loop(self) -> None:
        """What was done outside the loop before is over, if there were turns already."""
        with self._lock:
            opened = self._ours
            if self._looping:
                raise InvalidRequest("a run has one loop over its turns")
            self._note_removed(0)
            self._looping = True
            if self._turn:
                self._state = morph(self._state, opened.state_at(opened.base))
                self._visited.clear()
            else:
                self._begin_turn()

    def end_turn(self) -> None:
        with self._lock:
            self._note_removed(self._turn)
            if self._is_wanted("turn"):
                self._base = self._save(None, {"trigger": "turn"}).seq
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn += 1
        self._visited.clear()
        self._keep_calls()

    def _keep_calls(self) -> None:
        """Of the journal in memory: what this turn, or code outside the loop, may ask for."""
        calls = self._ours.journal.calls.all
        run, turn = self._ours.held.run, self._turn
        for where in [w for w in list(calls) if w[0] != run or 0 < w[1] < turn]:
            del calls[where]

    def _note_removed(self, turn: int) -> None:
        found = [
            call.key for (_, of, _), call in list(self._journal.calls.all.items())
            if of == turn and call.key not in self._visited and call.kind != "wait"
        ]  # fmt: skip
        if found and self.resumed:
            self.removed += tuple(found)
            logger.warning("turn %d no longer asks for %s", turn, ", ".join(found))

    # -- state ---------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self._ours.held.run

    @property
    def pending(self) -> list[Pending]:
        """What this run waits for, and its calls that have no end: under way, or in doubt."""
        self._journal.refresh()  # somebody may have answered
        name, begun = self._given.name, [*map(id, self._begun())]
        calls = self._journal.calls.open()
        return [pendings.told(call, name, running=id(call) in begun) for call in calls]

    @property
    def session(self) -> Session:
        """The session that is run. It is written through the run alone."""
        return self._given

    @property
    def turn(self) -> int:
        return self._turn

    @property
    def state(self) -> Any:
        """The state, to be changed in place. A checkpoint takes it as it is then."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def add_usage(self, usage: Usage | None = None, *, tokens: int = 0, cost: float = 0.0) -> None:
        """What was spent since the last checkpoint; the next one carries it."""
        spent = usage or Usage(tokens, cost)
        fielding.check_usage(spent)
        with self._lock:
            self._usage = self._usage + spent

    def take_checkpoint(self, event: str | None = None, fields: Fields | None = None) -> Checkpoint:
        with self._lock:
            chosen: Fields = {**(fields or {})}
            if event is not None:
                chosen.setdefault("trigger", event)
            return self._save(self._base, chosen)

    def _save(self, base: int | None, fields: Fields) -> Checkpoint:
        return self._save_state(self._state, base, fields)

    def _save_state(self, state: Any, base: int | None, fields: Fields) -> Checkpoint:
        opened = self._ours
        given = fields.get("usage")
        if self._usage != Usage() and (given is None or isinstance(given, Usage)):
            fields["usage"] = self._usage + (given or Usage())
        if "pending" not in fields:
            fields["pending"] = self._pending()
        mark = RunMark(opened.held.run, self._turn, base)
        saved = opened.handle.save_of_run(state, mark, self._parent, fields)
        self._parent, self._usage = None, Usage()
        self._saved_at = time.monotonic()
        return saved

    def _pending(self) -> list[ToolCall]:
        """Tool calls that are being made."""
        calls = [call for call in self._begun() if call.kind == "tool"]
        return [ToolCall(call.key, call.name, call.arguments) for call in calls]

    def _begun(self) -> list[Call]:
        return [call for call in list(self._flying.values()) if call is not None]

    def _is_wanted(self, event: Event) -> bool:
        return self._policy.wants(Moment(event, self._turn, time.monotonic() - self._saved_at))

    def _after(self, event: Event) -> None:
        with self._lock:
            if not self._over and self._is_wanted(event):
                self._save(self._base, {"trigger": "tool_call" if event == "tool" else event})

    # -- calls ---------------------------------------------------------------------------------

    def prepare(
        self,
        kind: Literal["step", "tool"],
        name: str,
        key: str | None,
        arguments: Any,
        *,
        on_doubt: str,
        on_change: str,
        verify: Callable[[str], Done | None] | None,
    ) -> Call:
        """A call that is noted as begun; or one that is over, with its result."""
        options.check_options(name, key, on_doubt, on_change)
        encoded = journals.encoded(arguments, "arguments")
        digest = sha256(encoded).hexdigest()
        with self._lock:
            key = self._key(name, key)
            if key in self._flying:
                raise InvalidRequest(
                    f"{key!r} is being called already", hint="concurrent steps need key=…"
                )
            opened = self._ours
            run, journal = opened.held.run, opened.journal
            turn = self._turn if self._looping else 0
            self._visited.add(key)
            where = run, turn, key
            known = journal.calls.all.get(where)
            if known is not None and self._is_over(known, digest, on_doubt, on_change):
                return known
            self._flying[key] = None
        try:
            if known is not None and known.outcome == "started" and verify is not None:
                verdict = verify(known.idempotency_key)
                if isinstance(verdict, Done):
                    journal.end(known, verdict.result)
                    self._flying.pop(key, None)
                    return journal.calls.all[known.where]
                if verdict is not None:
                    raise InvalidRequest(f"verify returns Done(result) or None, not {verdict!r}")
            elif known is not None and known.outcome == "started" and on_doubt == "ask":
                raise InDoubt(
                    f"{key!r} was begun and may have had its effect",
                    key=key, idempotency_key=known.idempotency_key,
                )  # fmt: skip
            call = journal.begin(kind, where, name, digest, arguments, encoded)
        except BaseException:
            self._flying.pop(key, None)
            raise
        self._flying[key] = call
        return call

    def _key(self, name: str, key: str | None) -> str:
        if key is not None:
            return key
        turn = self._turn if self._looping else 0
        ordinal = self._ordinals[turn, name] = self._ordinals.get((turn, name), 0) + 1
        return f"{name}#{ordinal}"

    def _is_over(self, call: Call, digest: str, on_doubt: str, on_change: str) -> bool:
        """Whether nothing has to be called, and nothing to be found out."""
        if call.outcome == "rerun":
            return False
        if call.digest != digest and on_change == "raise":
            raise StepChanged(f"{call.key!r} was called with other arguments before")
        if call.outcome == "started":
            if on_doubt == "skip":
                self._journal.note(ended(call.number, "skipped", now_us()))
                return True
            return False
        return call.digest == digest or on_change == "reuse"

    def recorded(self, call: Call, as_: type[Any] | None) -> Any:
        """What a call has returned, or raised, before."""
        if call.outcome == "failed":
            error = StepFailed(call.error or "")
            failures.mark(error, self._ours.token, call.number)
            raise error
        kept = journals.fresh(call.result)
        return kept if as_ is None or kept is None else revive(kept, as_)

    def succeed(self, call: Call, result: Any, as_: type[Any] | None) -> Any:
        """Note a result, and return it as it comes back after a crash: with no other types."""
        try:
            kept = self._ours.journal.end(call, result)
        finally:
            self._flying.pop(call.key, None)
        self._after("tool" if call.kind == "tool" else "llm")
        return kept if as_ is None or kept is None else revive(kept, as_)

    def fail(self, call: Call, error: BaseException) -> None:
        """Whatever ended the call. What is no error of its own (Ctrl-C) leaves it in doubt."""
        self._flying.pop(call.key, None)
        if isinstance(error, Exception) and not self._lost:
            self._journal.note(
                ended(call.number, "failed", now_us(), error=str(error), type=type(error).__name__)
            )
            failures.mark(error, self._ours.token, call.number)

    def withdraw(self, call: Call) -> None:
        """What was noted as begun, but never was: nothing of it is in doubt."""
        self._flying.pop(call.key, None)
        if not self._lost:
            self._journal.note(ended(call.number, "rerun", now_us()))

    def stream(self, key: str, chunk: Any) -> None:
        for call in self._begun():
            if key in (call.key, call.name):
                self._journal.note(journals.streamed(call.number, chunk))
                return
        raise NotFound(f"no call {key!r} is being made", hint=", ".join(self._flying) or None)

    def partials(self, key: str) -> list[Any]:
        """What was streamed of a call that was interrupted."""
        for call in list(self._journal.calls.all.values()):
            if key in (call.key, call.name) and call.partial:
                return list(call.partial)
        return []

    def wait(self, name: str, prompt: Any) -> Any:
        """The answer, if there is one; otherwise Halt."""
        options.check_name("the name of an answer", name)
        with self._lock:
            run, turn = self._ours.held.run, self._turn if self._looping else 0
            where = (run, turn, f"wait:{name}")
            self._journal.refresh()
            call = self._journal.calls.all.get(where)
            if call is None:
                journals.encoded(prompt, "prompt")
                self._journal.note(started("wait", where, name, "", prompt))
            elif call.outcome == "done":
                return call.result
        raise Halt(f"waiting for {name!r}", f"session.answer({name!r}, …), then run again")
