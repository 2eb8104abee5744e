"""The state and the rules of runs, shared by Run and AsyncRun.

A run is a series of turns, each from one checkpoint to the next. After a crash, the interrupted
turn starts again from its base, the checkpoint that it started from. Results of its calls that the
journal has recorded are reused, not computed again.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypedDict, cast

from holdfast.errors import (
    UNREADABLE,
    Fenced,
    HoldfastError,
    InDoubt,
    InvalidRequest,
    NotSerializable,
    StepChanged,
    StepFailed,
    require_count,
    require_text,
)
from holdfast.format import values as format_values
from holdfast.format.typed_states import to_model
from holdfast.history import checkpoint_fields as fielding
from holdfast.history import journal as journals
from holdfast.history.journal import WAIT, Call, Journal, ended, now_us
from holdfast.history.token_usage import Spent, added, most
from holdfast.log import logger
from holdfast.model import RunMark, Status, ToolCall, Usage
from holdfast.runs import pending as pendings
from holdfast.runs.budget import Budget
from holdfast.runs.checkpoint_policy import TRIGGERS, Moment, policy_of
from holdfast.runs.messages import DENIED, called, closed_state, tool_call
from holdfast.runs.pending import STOPPED
from holdfast.runs.resume import lease_event, open_run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.model import UsageFields
    from holdfast.runs.budget import BudgetSpent
    from holdfast.runs.checkpoint_policy import Event
    from holdfast.runs.pending import Pending
    from holdfast.runs.resume import Opened, RunOptions, RunTarget


OnDoubt = Literal["rerun", "skip", "ask"]
OnChange = Literal["raise", "reuse", "rerun"]
_ON_DOUBT, _ON_CHANGE = ("rerun", "skip", "ask"), ("raise", "reuse", "rerun")


class Done:
    """Returned by `verify` for a call that had its effect, with its result.

    For a call that had no effect, `verify` returns None.
    """

    def __init__(self, result: Any = None) -> None:
        self.result = result


if TYPE_CHECKING:
    Verify = Callable[[str], Done | Awaitable[Done | None] | None]
    """Decides about a call in doubt. Only an AsyncRun takes a coroutine function."""
    Errors = type[Exception] | tuple[type[Exception], ...]
    """Classes of errors that come back from the journal as themselves."""


if TYPE_CHECKING:

    class _Dataclass(Protocol):
        __dataclass_fields__: ClassVar[dict[str, Any]]

    class _Pydantic(Protocol):
        def model_dump(self) -> Any: ...

    Model = _Dataclass | _Pydantic
    """A result that is recorded as plain data, so that its type is not the one of the function."""

    class CallOptions(TypedDict, total=False):
        """The options of a tool call, for type checkers; see Run.step."""

        on_doubt: OnDoubt
        on_change: OnChange
        retries: int | Retries | None
        verify: Verify | None
        errors: Errors

    class StepGiven(CallOptions, total=False):
        """The options of a step, for type checkers; see Run.step."""

        key: str | None


class StepOptions(NamedTuple):
    """The options of a step; see Run.step."""

    on_doubt: OnDoubt = "rerun"
    on_change: OnChange = "raise"
    key: str | None = None
    retries: Any = None
    verify: Any = None
    as_: type[Any] | None = None
    errors: Errors = ()


def bind(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Return a call of `fn` with these arguments, to be made later.

    Raises InvalidRequest if `fn` cannot be called. This is checked before the call is noted as
    begun, because otherwise a call that was never made would be in doubt.
    """
    if not callable(fn):
        raise InvalidRequest(f"not a function: {fn!r}", hint="what is called by step() and tool()")
    return functools.partial(fn, *args, **kwargs)


def bound_tool(fn: Callable[..., Any], arguments: Any) -> Callable[[], Any]:
    """Return a call of a tool. A dict gives named arguments, any other value a single one."""
    if isinstance(arguments, dict) and all(type(name) is str for name in arguments):
        return bind(fn, **arguments)
    return bind(fn, arguments)


def check_options(name: str, key: str | None, options: StepOptions) -> None:
    """Raise InvalidRequest if an option of a step is not valid."""
    require_text("a step's name", name)
    if key is not None:
        require_text("a step's key", key)
    if options.on_doubt not in _ON_DOUBT:
        raise InvalidRequest(f"unknown on_doubt {options.on_doubt!r}", hint=", ".join(_ON_DOUBT))
    if options.on_change not in _ON_CHANGE:
        raise InvalidRequest(f"unknown on_change {options.on_change!r}", hint=", ".join(_ON_CHANGE))
    for kind in _classes(options.errors):
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidRequest(f"errors= takes classes of exceptions, not {kind!r}")


def _classes(errors: Errors) -> tuple[type[Exception], ...]:
    return errors if isinstance(errors, tuple) else (errors,)


_MARK = "_holdfast_call"


def mark_failure(error: BaseException, token: bytes, number: int) -> None:
    """Store the number of the failed call on the error.

    It is kept on the error itself: an id() could be reused for another object, and a table would
    keep the error alive.
    """
    with suppress(AttributeError, TypeError):  # some exceptions take no attributes
        setattr(error, _MARK, (token, number))


def failed_calls(error: BaseException, token: bytes) -> Iterator[int]:
    """Yield the numbers of the calls that led to an error: by its causes, contexts and groups.

    Only calls of the run with this lease token count.
    """
    seen: set[int] = set()
    open_: list[BaseException | None] = [error]
    while open_:
        each = open_.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        of, number = getattr(each, _MARK, (None, 0))
        if of == token:
            yield number
            continue
        if isinstance(each, BaseExceptionGroup):
            open_ += each.exceptions
        open_.append(each.__cause__ or each.__context__)


def error_to_facts(error: Exception, errors: Errors = ()) -> dict[str, Any]:
    """Return the facts of an error for the journal.

    Builtin exceptions and those of the classes `errors` get `args`, the latter also `attributes`.
    """
    kind = type(error)
    facts: dict[str, Any] = {"error": str(error), "type": kind.__name__}
    builtin = getattr(builtins, kind.__name__, None) is kind
    if not builtin and not isinstance(error, errors):
        return facts
    if isinstance(error, ExceptionGroup):
        inner = [error_to_facts(each, errors) for each in error.exceptions]
        facts["args"] = [error.message, inner]
    else:  # __reduce__ also gives the file name of an OSError; error.args does not
        args = error.__reduce__()[1] if builtin else error.args
        facts["args"] = [_storable(each) for each in args]
    if not builtin:
        own = {name: value for name, value in vars(error).items() if name != _MARK}
        facts["attributes"] = {name: _storable(value) for name, value in own.items()}
    return facts


def _storable(value: Any) -> Any:
    """Return the value, or its str() if it cannot be stored."""
    try:
        format_values.encode_exact(value)
    except NotSerializable:
        return str(value)
    return value


def error_from_facts(facts: dict[str, Any], errors: Errors = ()) -> Exception:
    """Return an exception of its own class, with a StepFailed as its cause, or else a StepFailed.

    The class is a builtin one, or one of the classes `errors` or a subclass of one. `__init__` of
    the latter is not called, because its arguments need not be those of the exception.
    """
    failed, args = StepFailed(facts["error"]), facts.get("args")
    attributes = facts.get("attributes")
    named = None if attributes is None else _subclass(facts["type"], _classes(errors))
    kind = getattr(builtins, facts["type"], None) if attributes is None else named
    if args is None or kind is None:  # the exception may be new in a later version of Python
        return failed
    if issubclass(kind, ExceptionGroup):
        args = [args[0], [error_from_facts(each, errors) for each in args[1]]]
    try:
        error: Exception = kind(*args) if named is None else kind.__new__(kind, *args)
    except TypeError:  # its args were changed after it was created
        return failed
    vars(error).update(attributes or {})
    error.__cause__ = failed
    return error


def _subclass(name: str, kinds: Iterable[type[Exception]]) -> type[Exception] | None:
    """Return the class of this name among `kinds` and their subclasses, nearest first."""
    kinds = list(kinds)
    while kinds:
        for kind in kinds:
            if kind.__name__ == name:
                return kind
        kinds = [each for kind in kinds for each in kind.__subclasses__()]
    return None


def update_in_place(old: Any, new: Any) -> Any:
    """Return `new`, but reuse the dicts and lists of `old` that are at the same places.

    References that the code holds to parts of the state stay valid.
    """
    if type(old) is dict and type(new) is dict:
        items = {
            key: update_in_place(old[key], value) if key in old else value
            for key, value in new.items()
        }
        old.clear()
        old.update(items)
        return old
    if type(old) is list and type(new) is list:
        both = min(len(old), len(new))
        old[:] = [*[update_in_place(old[n], new[n]) for n in range(both)], *new[both:]]
        return old
    return new


@dataclass(frozen=True)
class Retries:
    """How often a step is tried, after which errors, and how long to wait between attempts.

    Errors of holdfast itself are never retried.
    """

    attempts: int = 3
    """The most attempts, including the first."""
    on: type[Exception] | tuple[type[Exception], ...] = Exception
    """Only errors of these types are retried."""
    wait: float = 0.5
    """Upper limit of the random wait before the second attempt, in seconds. Doubles each time."""
    longest: float = 30.0
    """Upper limit of every wait, in seconds."""

    def __post_init__(self) -> None:
        require_count("retries", self.attempts)

    def options(self) -> dict[str, Any]:
        """Return options for tenacity, which is imported only when needed because that is slow."""
        import tenacity

        return {
            "stop": tenacity.stop_after_attempt(self.attempts),
            "retry": tenacity.retry_if_exception(
                lambda e: isinstance(e, self.on) and not isinstance(e, HoldfastError)
            ),
            "wait": tenacity.wait_random_exponential(self.wait, self.longest),
            "reraise": True,
        }


def retries_of(given: int | Retries) -> Retries:
    """Return the Retries for a number of attempts."""
    return given if isinstance(given, Retries) else Retries(given)


def retrying(given: int | Retries, fn: Callable[[], Any]) -> Any:
    """Call `fn` until it succeeds or the attempts are used up. Return its result."""
    import tenacity

    return tenacity.Retrying(**retries_of(given).options())(fn)


class Halt(BaseException):
    """Leaves a run that can be resumed later."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def may_handle_sigterm() -> bool:
    """Return whether this is the main thread, and SIGTERM has no other handler."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@contextmanager
def terminable(*, asked: bool) -> Iterator[None]:
    """Raise Halt on SIGTERM in this context, if `asked`.

    This works in the main thread only, and only if no other handler for SIGTERM is installed.
    """
    if not (asked and may_handle_sigterm()):
        yield
        return

    def halt(*_: Any) -> None:
        raise Halt(STOPPED)

    signal.signal(signal.SIGTERM, halt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("holdfast call", default=None)
"""The call that is being made in this context."""

_HALT = ("trigger", "status", "reason", "hint", "pending")
"""The fields of a checkpoint that describe a halt."""


class OverBudget(Halt):
    """Leaves a run whose budget is spent."""

    def __init__(self, spent: BudgetSpent) -> None:
        super().__init__(spent.summary, "run(budget=…) with a larger budget resumes it")
        self.spent = spent


class Prepare(NamedTuple):
    """Request to note a call as begun, or to find it recorded. The answer is the Call."""

    kind: Literal["step", "tool"]
    name: str
    key: str | None
    arguments: Any
    options: StepOptions


class Make(NamedTuple):
    """Request to call the function of a step or tool. The answer is a Made."""

    fn: Callable[[], Any]
    retries: int | Retries | None


class Write(NamedTuple):
    """Request to write to the store by `fn(*args)`. The answer is its result."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Made(NamedTuple):
    """The result of a function, or the error that it raised."""

    result: Any
    error: BaseException | None = None


if TYPE_CHECKING:
    Requests = Generator[Prepare | Make | Write, Any, Made]
    """A call as a series of requests, which a Run or an AsyncRun carries out."""


class TurnUsage:
    """Tokens and cost that the next checkpoints of a run record."""

    def __init__(self) -> None:
        self.outside = Usage()
        """Usage since the last checkpoint that belongs to no call."""
        self.ended: dict[int, Usage] = {}
        """Usage of ended calls that no checkpoint of this attempt has recorded yet, by number."""
        self.earlier: dict[int, Usage] = {}
        """Usage of calls that checkpoints of earlier attempts at this turn recorded, by number."""
        self._in_progress: dict[tuple[str, int], Usage] = {}
        """Usage of calls in progress, by run and number."""
        self._counted: set[int] = set()
        """Numbers of the calls of this turn that are or were in `ended`."""

    def begin_turn(self) -> None:
        self._counted.clear()

    def begin(self, call: Call) -> None:
        self._in_progress[call.run, call.number] = Usage()

    def add(self, call: Call | None, usage: Usage) -> None:
        """Add usage to a call in progress, or to `outside`."""
        if call is not None and (call.run, call.number) in self._in_progress:
            self._in_progress[call.run, call.number] += usage
        else:
            self.outside += usage

    def stop(self, call: Call) -> Usage:
        """Return the usage of a call, and stop adding to it."""
        return self._in_progress.pop((call.run, call.number), Usage())

    def unsaved(self) -> Usage:
        """Return the usage of calls in progress."""
        return added(self._in_progress.values())

    def count(self, call: Call) -> bool:
        """Count a call that ended. Return False if this turn has counted it before."""
        if call.number in self._counted:
            return False
        self._counted.add(call.number)
        self.ended[call.number] = most(call.usage, self.earlier.get(call.number, call.usage))
        return True


class RunCore:
    """The state of a run, and its rules. Run and AsyncRun carry out its requests.

    Methods without a docstring are those of Run.
    """

    def __init__(self, target: RunTarget, options: RunOptions) -> None:
        if options.name is not None:
            require_text("the name of a run", options.name)
        if options.budget is not None and not isinstance(options.budget, Budget):
            raise InvalidRequest(f"not a budget: {options.budget!r}", hint="Budget(cost=1.00), …")
        self.session = target.session
        self._target, self._options = target, options
        self._policy = policy_of(options.policy)
        self._saved_at = time.monotonic()
        self._lock = threading.RLock()
        self._opened: Opened | None = None
        self._pid = os.getpid()
        self._lost = self._over = False
        self.turn = 0
        self._base = 0
        self._parent_seq: int | None = None
        """The seq of the next checkpoint's parent, if that is not the head."""
        self._looping = False
        self.state: Any = None
        self._usage = TurnUsage()
        self._owed: dict[int, str] = {}
        """Triggers of checkpoints that the policy wants, by the number of the call that ended."""
        self._ordinals: dict[tuple[int, str], int] = {}
        """How many calls without a key were made so far, by turn and name."""
        self._asked: dict[tuple[int, str, str], str] = {}
        """The keys of questions without an answer, by turn, name and digest of the prompt."""
        self._in_progress: dict[str, Call | None] = {}
        """The calls in progress; None for a call that is not yet noted as begun."""
        self._streams: set[tuple[int, str]] = set()
        """The streams that are being written, by number of the call and key."""
        self._visited: set[str] = set()
        """The keys that the code has asked for in this turn."""
        self.resumed = False
        """Whether this run continues an interrupted one."""
        self.over_budget: BudgetSpent | None = None
        self.removed: tuple[str, ...] = ()
        """Keys of recorded calls that the resumed code did not ask for again."""

    # -- beginning and end ---------------------------------------------------------------------

    def open(self) -> None:
        """Take the session, and find out where the run starts or continues."""
        if self._opened is not None:
            raise InvalidRequest("a run is entered once", hint="session.run() makes another one")
        opened = open_run(self._target, self._options, self._lose)
        self._opened, self.resumed = opened, opened.resumed
        self.turn, self._base, self._usage.earlier = opened.turn, opened.base, opened.earlier_usage
        self._parent_seq = opened.base if opened.base != opened.head else None
        self.state = opened.first_state
        self._forget_old_calls()

    def _lose(self) -> None:
        """Note that another worker has the lease. Called by the heartbeat."""
        self._lost = True
        lease_event(self._target, "lost")

    @property
    def _active(self) -> Opened:
        """The opened session.

        Raises InvalidRequest if the run is not active in this process, and Fenced if the lease is
        lost.
        """
        if self._opened is None or self._over:
            raise InvalidRequest("the run is not active", hint="with session.run() as run: …")
        if os.getpid() != self._pid:
            raise InvalidRequest("a run cannot be used in the child after os.fork()")
        if self._lost:
            raise Fenced(f"session {self._target.name!r} was taken over by another worker")
        return self._opened

    @property
    def _journal(self) -> Journal:
        return self._active.journal

    def close(self, error: BaseException | None) -> bool:
        """Take the last checkpoint and release the session. Return whether to suppress `error`.

        Only a Halt is suppressed. If the lease is lost, nothing is written.
        """
        opened = self._opened
        if opened is None or self._over:
            return False
        try:
            if self._lost or os.getpid() != self._pid or isinstance(error, Fenced):
                return False
            if error is None:
                self._finish("completed", None, None)
            elif isinstance(error, OverBudget):
                self.over_budget = error.spent
                self._finish("halted", error.reason, error.hint, error.spent.fields())
            elif isinstance(error, Halt):
                self._finish("halted", error.reason, error.hint)
            elif isinstance(error, InDoubt):
                self._finish("halted", error.message, error.hint)
            elif not isinstance(error, Exception):  # Ctrl-C, exit of the program, cancellation
                self._finish("halted", type(error).__name__, None)
            else:
                self._mark_failed_calls(error)
                self._finish("failed", f"{type(error).__name__}: {error}", None)
        finally:
            self._over = True
            opened.stop_heartbeat()
        return isinstance(error, Halt)

    def _mark_failed_calls(self, error: BaseException) -> None:
        """Let the resumed run make the calls again whose errors ended this run."""
        for number in failed_calls(error, self._active.token):
            self._journal.append(ended(number, "rerun", now_us()))

    def _finish(
        self,
        status: Status,
        reason: str | None,
        hint: str | None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Take the last checkpoint, with `more` fields. It also releases the lease."""
        complete = status == "completed"
        if complete:
            self._check_loop()
            self._report_removed(self.turn)
        fields = cast("Fields", {"status": status, "trigger": "run"} | (more or {}))
        if reason:
            fields["reason"] = reason
        if not complete:
            fields["hint"] = hint or "run() resumes it"
            _, dangling = closed_state(self.state)
            fields["pending"] = [*self._pending(), *dangling]
        try:
            self._take_owed(now=True)
        except NotSerializable:
            self._owed.clear()  # the last checkpoint is taken without this state
        opened = self._active
        release = opened.ended(complete=complete)
        try:
            if status == "halted" and self._halts_again(fields):
                opened.writer.release(release)
            else:
                self._save(None if complete else self._base, fields, release)
        except NotSerializable as e:
            self._finish_without_state(fields, e)
            if complete:
                raise
        lease_event(self._target, "given back")

    def _finish_without_state(self, fields: Fields, error: NotSerializable) -> None:
        """Finish with the state of the base, because the current one cannot be stored."""
        logger.warning("the state of session %r is not saved: %s", self._target.name, error.message)
        if fields["status"] == "completed":
            fields["status"], fields["reason"] = "failed", f"NotSerializable: {error.message}"
        fields.setdefault("hint", "run() resumes it")
        release = self._active.ended(complete=False)
        self._save_state(self._active.state_at(self._base), self._base, fields, release)

    def _halts_again(self, fields: Fields) -> bool:
        """Return whether the head already records this halt, with the same state and usage.

        Then no checkpoint is taken: a run that is resumed again and again, only to wait for the
        same answer, leaves no series of equal checkpoints.
        """
        last = self._active.last_attempt
        if last is None or self._parent_seq is None or last.extra.get("status") != "halted":
            return False
        extra = fielding.check(fields).extra
        if (
            any(last.extra.get(name) != extra.get(name) for name in _HALT)
            or last.extra["run"] != [self._active.lease.run, self.turn, self._base]
            or (last.outside, last.calls) != (self._outside(), self._usage.ended)
        ):
            return False
        try:
            saved = self._active.state_at(self._active.head)
        except (*UNREADABLE, LookupError):
            return False
        return format_values.encode_exact(self.state) == format_values.encode_exact(saved)

    def _check_loop(self) -> None:
        """Raise StepChanged if the run had turns, but the code ended without entering turns()."""
        if self.turn and not self._looping:
            raise StepChanged(
                f"the run was in turn {self.turn}, but the code has not entered run.turns()"
            )

    # -- turns ---------------------------------------------------------------------------------

    def enter_loop(self) -> None:
        """Start the loop over turns.

        If the run had turns already, the state becomes that of the base. It already includes the
        effects of the code before the loop.
        """
        with self._lock:
            opened = self._active
            if self._looping:
                raise InvalidRequest("a run has one loop over its turns")
            self._take_owed(now=True)
            self._report_removed(0)
            self._usage.outside, self._looping = self._outside(), True
            if self.turn:
                self.state = update_in_place(self.state, opened.state_at(opened.base))
                self._visited.clear()
            else:
                self._begin_turn()

    def end_turn(self) -> None:
        """End the turn, with a checkpoint if the policy wants one, and begin the next."""
        with self._lock:
            self._take_owed(now=True)
            self._report_removed(self.turn)
            if self._is_wanted("turn"):
                self._base = self._save(None, {"trigger": TRIGGERS["turn"]}).seq
            self._begin_turn()

    def _begin_turn(self) -> None:
        self.turn += 1
        self._visited.clear()
        self._usage.begin_turn()
        self._forget_old_calls()

    def _forget_old_calls(self) -> None:
        """Forget recorded calls of other runs and of earlier turns, to save memory.

        The code may still ask for calls of this turn, and for those outside of turns.
        """
        calls = self._active.journal.calls.all
        active, now = self._active.lease.run, self.turn
        for run, turn, key in list(calls):
            if run != active or 0 < turn < now:
                del calls[run, turn, key]

    def _report_removed(self, turn: int) -> None:
        """Log recorded calls that the resumed code did not ask for. Add them to `removed`."""
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
        return self._active.lease.run

    @property
    def pending(self) -> list[Pending]:
        self._journal.refresh()  # another process may have answered
        begun = [*map(id, self._begun())]
        return pendings.listed(
            self._journal.calls, self._target.name, lambda call: id(call) in begun
        )

    def add_usage(self, usage: Any, fields: UsageFields) -> None:
        spent = Usage.of(fields) if usage is None else Usage.of(usage, **fields)
        with self._lock:
            self._usage.add(current.get(), spent)

    def check_budget(self, *, new_turn: bool = False) -> None:
        """Raise OverBudget if the budget is spent.

        Calls inside of another call of this run are exempt, because what has begun is finished. So
        is a turn that starts again with calls to reuse, except from the limit of turns.
        """
        budget, opened, call = self._options.budget, self._active, current.get()
        if budget is None or opened.bill is None or (call and call.run == opened.lease.run):
            return
        with self._lock:
            calls = list(opened.journal.calls.all)
            reused = new_turn and any(turn == self.turn for _, turn, _ in calls)
            unsaved = self._outside() + self._usage.unsaved()
            usage = opened.bill.total(opened.lease.attempt, unsaved)
            spent = budget.exceeded(Usage() if reused else usage, self.turn - 1 if new_turn else 0)
        if spent is not None:
            raise OverBudget(spent)

    def take_checkpoint(self, event: str | None = None, fields: Fields | None = None) -> Checkpoint:
        with self._lock:
            self._take_owed()
            chosen: Fields = {**(fields or {})}
            if event is not None:
                chosen.setdefault("trigger", event)
            return self._save(self._base, chosen)

    def _save(self, base: int | None, fields: Fields, release: bytes | None = None) -> Checkpoint:
        return self._save_state(self.state, base, fields, release)

    def _save_state(
        self, state: Any, base: int | None, fields: Fields, release: bytes | None
    ) -> Checkpoint:
        """Save a checkpoint of the run, with its pending calls and its usage."""
        opened = self._active
        calls = {n: used for n, used in self._usage.ended.items() if n not in self._owed}
        spent = Spent(opened.lease.attempt, self._base, self._outside(fields.get("usage")), calls)
        usage = None if spent.total == Usage() else spent.total
        fields = {"pending": self._pending(), **fields, "usage": usage}
        mark = RunMark(opened.lease.run, self.turn, base)
        try:
            agent, parent = opened.target.agent, opened.target.parent
            details = fielding.of_session(fields, agent, parent)
            details.extra.update({"run": [*mark]} | spent.field())
            saved = opened.save(state, details, self._parent_seq, release)
        except NotSerializable:
            format_values.check(state, "state")  # raises again, with the full path
            format_values.check(fields, "fields")
            raise
        if opened.bill is not None:
            opened.bill.add_outside(spent.base, spent.attempt, spent.outside)
        self._parent_seq, self._usage.outside = None, Usage()
        for number in calls:
            del self._usage.ended[number]
        self._saved_at = time.monotonic()
        return saved

    def _pending(self) -> list[ToolCall]:
        """Return the tool calls in progress."""
        calls = [call for call in self._begun() if call.kind == "tool"]
        return [ToolCall(call.key, call.name, call.arguments) for call in calls]

    def _begun(self) -> list[Call]:
        """Return the calls in progress that are noted as begun."""
        return [call for call in list(self._in_progress.values()) if call is not None]

    def _is_wanted(self, event: Event) -> bool:
        return self._policy.wants(Moment(event, self.turn, time.monotonic() - self._saved_at))

    def _outside(self, given: Any = None) -> Usage:
        """Return the usage that belongs to no call.

        It is zero before the loop of a resumed run that has turns: its first attempt has counted
        the usage of this code already.
        """
        if self.turn and not self._looping:
            return Usage()
        outside = self._usage.outside
        return outside if given is None else outside + Usage.of(given)

    def _count(self, call: Call, *, owes: bool) -> None:
        """Let the next checkpoint record the usage of a call that ended.

        With `owes`, the policy decides whether it wants a checkpoint. That one is taken later,
        because the caller has to put the result into the state first.
        """
        event: Event = "tool" if call.kind == "tool" else "llm"
        if self._usage.count(call) and owes and self._is_wanted(event):
            self._owed[call.number] = TRIGGERS[event]

    def _take_owed(self, *, now: bool = False) -> None:
        """Take the checkpoint that the policy wants. Without `now`, wait for calls in progress."""
        if not self._owed or (self._in_progress and not now):
            return
        owed, self._owed = self._owed, {}
        try:
            self._save(self._base, {"trigger": [*owed.values()][-1]})
        except BaseException:
            self._owed = owed
            raise

    # -- calls ---------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        options: StepOptions,
    ) -> Requests:
        """Return the requests that call `fn(*args, **kwargs)` as a step."""
        arguments = [list(args), dict(sorted(kwargs.items()))]
        bound = bind(fn, *args, **kwargs)
        return self._call("step", name, options.key, arguments, bound, options)

    def tool(self, call: Any, fn: Callable[..., Any], options: StepOptions) -> Requests:
        """Return the requests that make a tool call which a model has asked for."""
        wanted = tool_call(call)
        bound = bound_tool(fn, wanted.arguments)
        return self._call("tool", wanted.name, wanted.id, wanted.arguments, bound, options)

    def _call(
        self,
        kind: Literal["step", "tool"],
        name: str,
        key: str | None,
        arguments: Any,
        fn: Callable[[], Any],
        options: StepOptions,
    ) -> Requests:
        """Prepare a call, make it, and record how it ended.

        Errors of `fn` are returned, not raised: StopIteration cannot leave a generator.
        """
        call: Call = yield Prepare(kind, name, key, arguments, options)
        if call.status != "started":
            return self._recorded(call, options)
        token = current.set(call)
        try:
            made: Made = yield Make(fn, options.retries)
        finally:
            current.reset(token)
        if made.error is not None:
            yield Write(self.fail, (call, made.error, options.errors))
            return made
        return Made((yield Write(self.succeed, (call, made.result, options.as_))))

    def prepare(self, wanted: Prepare) -> Call:
        """Return a call that is durably noted as begun, or a recorded one that has ended.

        Raises StepChanged if the arguments have changed, and InDoubt if the call is in doubt and
        the options say "ask". Raises InvalidRequest if a call of this key is in progress.
        """
        kind, name, key, arguments, options = wanted
        check_options(name, key, options)
        encoded = journals.encoded(arguments, "arguments")
        digest = sha256(encoded).hexdigest()
        with self._lock:
            self._take_owed()
            key = self._key(name, key)
            if key in self._in_progress:
                raise InvalidRequest(
                    f"{key!r} is being called already", hint="concurrent steps need key=…"
                )
            opened = self._active
            journal = opened.journal
            self._visited.add(key)
            id = opened.lease.run, self.turn if self._looping else 0, key
            known = journal.calls.all.get(id)
            if known is not None:
                usable = self._is_usable(known, digest, options)
                if known.status == "started" and options.on_doubt == "skip":
                    journal.append(ended(known.number, "skipped", now_us()))
                    usable = True
                if usable:
                    self._count_recorded(known)
                    return known
            self._in_progress[key] = None
        try:
            if known is not None and known.status == "started" and _verify(journal, known, options):
                with self._lock:
                    self._in_progress.pop(key, None)
                    self._count_recorded(known)
                return known
            self.check_budget()
            call = journal.begin(kind, id, name, digest, arguments, encoded)
        except BaseException:
            self._in_progress.pop(key, None)
            raise
        with self._lock:
            self._in_progress[key] = call
            self._usage.begin(call)
        return call

    def _is_usable(self, call: Call, digest: str, options: StepOptions) -> bool:
        """Return whether the recorded end of a call is used, instead of making the call again.

        Raises StepChanged if its arguments have changed and `on_change` is "raise".
        """
        if call.status == "rerun":
            return False
        if call.digest != digest and options.on_change == "raise":
            raise StepChanged(f"{call.key!r} was called with other arguments before")
        return call.status != "started" and (call.digest == digest or options.on_change == "reuse")

    def _count_recorded(self, call: Call) -> None:
        """Count a recorded call. Calls before the loop of a run with turns are counted already."""
        if self._looping or not self.turn:
            self._count(call, owes=call.status == "done" and call.number not in self._usage.earlier)

    def _key(self, name: str, key: str | None) -> str:
        """Return the key of a call: the given one, or the name with its number in the turn."""
        if key is not None:
            return key
        turn = self.turn if self._looping else 0
        ordinal = self._ordinals[turn, name] = self._ordinals.get((turn, name), 0) + 1
        return f"{name}#{ordinal}"

    def _recorded(self, call: Call, options: StepOptions) -> Made:
        """Return the recorded result or error of a call."""
        if call.failure is not None:
            error = error_from_facts(call.failure, options.errors)
            mark_failure(error, self._active.token, call.number)
            return Made(None, error)
        kept, as_ = journals.fresh(call.result), options.as_
        return Made(kept if as_ is None or kept is None else to_model(kept, as_))

    def succeed(self, call: Call, result: Any, as_: type[Any] | None) -> Any:
        """Record the result of a call, and return it as recorded.

        So the caller gets the same types as after a crash.
        """
        call.usage = self._stop(call)
        try:
            kept = self._active.journal.end(call, result)
        finally:
            self._end(call)
        return kept if as_ is None or kept is None else to_model(kept, as_)

    def fail(self, call: Call, error: BaseException, errors: Errors = ()) -> None:
        """Record the error that ended a call. `errors` are those of StepOptions.

        Ctrl-C, cancellation and the like are not errors of the call: they leave it in doubt.
        """
        call.usage = self._stop(call)
        try:
            if isinstance(error, Exception) and not self._lost:
                more = journals.spent(call.usage) | error_to_facts(error, errors)
                self._journal.append(ended(call.number, "failed", now_us(), **more))
                mark_failure(error, self._active.token, call.number)
        finally:
            self._end(call)

    def _stop(self, call: Call) -> Usage:
        with self._lock:
            return self._usage.stop(call)

    def _end(self, call: Call) -> None:
        """Count a call that returned or raised. A call in doubt counts only if it has usage."""
        with self._lock:
            self._in_progress.pop(call.key, None)
            if self._opened is not None and self._opened.bill is not None:
                self._opened.bill.add_call(call.usage)
            if not self._over and (call.status != "started" or call.usage != Usage()):
                self._count(call, owes=call.status == "done")

    def withdraw(self, call: Call) -> None:
        """Take back the note that a call began, because it was never made. It is not in doubt."""
        self._stop(call)
        self._in_progress.pop(call.key, None)
        if not self._lost:
            self._journal.append(ended(call.number, "rerun", now_us()))

    def begin_stream(self, key: str) -> tuple[int, int]:
        """Begin a stream of the call that is being made here.

        Returns the numbers of the entries that began the call and the stream.
        """
        call = current.get()
        if call is None or self._in_progress.get(call.key) is not call:
            raise InvalidRequest(
                "a stream belongs to a step or tool", hint="use run.stream() in its function"
            )
        journal = self._journal
        with self._lock:
            if (call.number, key) in self._streams:
                raise InvalidRequest(f"stream {key!r} is being written already")
            self._streams.add((call.number, key))
        try:
            journal.append(journals.stream_begun(call.number, key))
        except BaseException:
            self._streams.discard((call.number, key))
            raise
        return call.number, journal.calls.streams[call.number, key]

    def append_chunks(self, stream: int, chunks: list[Any], *, closed: bool) -> None:
        self._journal.append(journals.stream_chunks(stream, chunks, closed=closed))

    def end_stream(self, call: int, key: str) -> None:
        self._streams.discard((call, key))

    def wait(self, name: str, prompt: Any, key: str | None = None) -> Any:
        """Return the answer to a question. Raises Halt if there is none yet.

        `key` is that of the question; by default, questions of a name are counted. A question
        without an answer keeps its key when this worker asks it again.
        """
        require_text("the name of an answer", name)
        encoded = journals.encoded(prompt, "prompt")
        digest = sha256(encoded).hexdigest()
        with self._lock:
            self._take_owed()
            run, turn = self._active.lease.run, self.turn if self._looping else 0
            question = turn, name, digest
            key = key or self._asked.get(question) or self._question(name)
            self._asked[question] = key
            self._journal.refresh()
            call = self._journal.calls.all.get((run, turn, key))
            if call is None:
                call = self._journal.begin("wait", (run, turn, key), name, digest, prompt, encoded)
            elif call.digest not in ("", digest):  # entries of an older version have no digest
                raise StepChanged(
                    f"{pendings.key_of(call)!r} was asked with another prompt before",
                    hint="ask with the same prompt, or under another name",
                )
            elif call.status == "done":
                del self._asked[question]
                return journals.fresh(call.result)
        answer = f"session.answer({pendings.key_of(call)!r}, …), then run again"
        raise Halt(pendings.halt_reason(call), answer)

    def approve(self, call: Any, prompt: Any) -> bool:
        """Return whether a person has approved a call. Raises Halt if there is no answer yet."""
        wanted = called(call)
        asked = {"tool": wanted.name, "arguments": wanted.arguments, "prompt": prompt}
        if not wanted.id:
            return self.wait(wanted.name, asked) is True
        answer = self.wait(wanted.id, asked, WAIT + wanted.id)
        if answer is True:
            return True
        self._deny(wanted, f"{DENIED}: {answer}" if type(answer) is str and answer else DENIED)
        return False

    def _deny(self, wanted: ToolCall, text: str) -> None:
        """Record `text` as the result of a call, in the journal and in the state's conversation."""
        prepared = Prepare("tool", wanted.name, wanted.id, wanted.arguments, StepOptions())
        call = self.prepare(prepared)
        if call.status == "started":
            self.succeed(call, text, None)
        with self._lock:
            state, closed = closed_state(self.state, wanted.id, text)
            if closed:
                self.state = update_in_place(self.state, state)

    def _question(self, name: str) -> str:
        """Return the key of the next question of this name in the turn.

        The first one has no number.
        """
        key = self._key(f"{WAIT}{name}", None)
        return key if "#" in name else key.removesuffix("#1")


def _verify(journal: Journal, call: Call, options: StepOptions) -> bool:
    """Return whether a call in doubt had its effect. If so, record the result as its end.

    Raises InDoubt if there is no `verify` and the options say "ask".
    """
    if options.verify is None:
        if options.on_doubt == "ask":
            reason = pendings.halt_reason(call)
            raise InDoubt(reason, key=call.key, idempotency_key=call.idempotency_key)
        return False
    verdict = options.verify(call.idempotency_key)
    if verdict is None:
        return False
    if not isinstance(verdict, Done):
        raise InvalidRequest(f"verify returns Done(result) or None, not {verdict!r}")
    journal.end(call, verdict.result)
    return True


def current_key() -> str | None:
    """Return the idempotency key of the call that is being made here, or None outside of calls.

    It is the same for every attempt at the call. Pass it to services that ignore repeated requests.
    """
    call = current.get()
    return None if call is None else call.idempotency_key
