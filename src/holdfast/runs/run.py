"""The synchronous Run: `with session.run() as run`."""

from __future__ import annotations

import functools
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, TypeVarTuple, overload

from holdfast.runs.run_core import (
    Halt,
    Made,
    Prepare,
    Retries,
    RunCore,
    StepOptions,
    Write,
    current_key,
    retrying,
    terminable,
)
from holdfast.runs.streams import StreamBuffer, StreamWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self, Unpack

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.model import UsageFields
    from holdfast.runs.budget import BudgetSpent
    from holdfast.runs.pending import Pending
    from holdfast.runs.run_core import (
        CallOptions,
        Errors,
        Make,
        Model,
        OnChange,
        OnDoubt,
        Requests,
        StepGiven,
        Verify,
    )

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")
Args = TypeVarTuple("Args")


class RunHandle:
    """Properties and methods that Run and AsyncRun share."""

    def __init__(self, core: RunCore, *, sigterm: bool = False) -> None:
        self._core = core
        self._sigterm, self._signals = sigterm, ExitStack()

    @property
    def id(self) -> str:
        """The id of the run. It stays the same when the run is resumed."""
        return self._core.id

    @property
    def turn(self) -> int:
        """The number of the current turn; 0 if the run has not entered turns() yet.

        A resumed run has the number of the interrupted turn from its start. After the loop, the
        number stays: after turns(limit) it is limit + 1.
        """
        return self._core.turn

    @property
    def resumed(self) -> bool:
        """Whether this run continues an interrupted one."""
        return self._core.resumed

    @property
    def removed(self) -> tuple[str, ...]:
        """Keys of recorded calls that the resumed code did not ask for again."""
        return self._core.removed

    @property
    def over_budget(self) -> BudgetSpent | None:
        """The limit that has halted the run; None if its budget is not spent."""
        return self._core.over_budget

    @property
    def session(self) -> Any:
        """The Session that run() was called on.

        While the run is active, only the run may write it.
        """
        return self._core.session

    @property
    def state(self) -> Any:
        """The state. Change it in place; each checkpoint saves it as it is at that moment."""
        return self._core.state

    @state.setter
    def state(self, state: Any) -> None:
        self._core.state = state

    def add_usage(self, usage: Any = None, **fields: Unpack[UsageFields]) -> None:
        """Add tokens and cost. Within a step or tool call, they belong to that call.

        Give the fields of a Usage, or what Usage.of() takes, and with it `cost` and `model`:

            run.add_usage(input=1200, output=80, cost=0.0021, model="gpt-5")
            run.add_usage(response.usage, model=response.model, cost=0.0021)

        Usage of a call is recorded when the call ends. Other usage is saved with the next
        checkpoint. A turn that starts again adds its usage again; so only the attempt with the
        largest sum counts.
        """
        self._core.add_usage(usage, fields)

    def _decorate(self, fn: Any, name: str | None, given: dict[str, Any]) -> Any:
        """Return `fn` as a durable function, or a decorator if `fn` is None."""
        options = StepOptions(**given)

        def decorate(function: Any) -> Any:
            return self._durable(function, name or function.__name__, options)

        return decorate if fn is None else decorate(fn)

    def _durable(self, function: Any, name: str, options: StepOptions) -> Any:
        """Return a function that calls another one as a step."""
        raise NotImplementedError

    def halt(self, reason: str) -> None:
        """Leave the `with` block with a last checkpoint of status "halted".

        The run can be resumed.
        """
        raise Halt(reason)

    @staticmethod
    def current_key() -> str | None:
        """Return the idempotency key of the call that is being made here, or None outside of calls.

        It is the same for every attempt at the call. Pass it to services that ignore repeated
        requests.
        """
        return current_key()


class Run(RunHandle):
    """One execution over a session: `with session.run() as run`. It can continue after a crash.

    The run has the session to itself. At the end of the `with` block it takes a last checkpoint and
    releases the session. The status is "completed"; "halted" after halt(), wait_for(), InDoubt,
    Ctrl-C or (with sigterm=True) SIGTERM; or "failed" after an error. A run that is not completed
    is resumed by the next session.run().

    If another worker takes the session over, the next write raises Fenced. A run is safe to use
    from several threads; concurrent steps need a `key` each.
    """

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(terminable(asked=self._sigterm))
            self._core.open()
            self._signals = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        try:
            return self._core.close(error)
        finally:
            self._signals.close()

    @property
    def pending(self) -> list[Pending]:
        """Open questions of this run, and its calls that are in progress or in doubt."""
        return self._core.pending

    def turns(self, limit: int | None = None) -> Iterator[int]:
        """Yield turn numbers, up to `limit`. A resumed run starts with the interrupted turn.

        A checkpoint is taken at the end of a turn if the policy wants one. After a crash, the
        interrupted turn starts again with the state of its base, the checkpoint that it started
        from. A run has one such loop.
        """
        self._core.enter_loop()
        while limit is None or self.turn <= limit:
            self._core.check_budget(new_turn=True)
            yield self.turn
            self._core.end_turn()

    # In typing, keyword arguments of a function cannot stand beside options. So the overloads with
    # options take only positional arguments.

    @overload
    def step(
        self, name: str, fn: Callable[[*Args], Any], /, *args: *Args,
        as_: type[M], **options: Unpack[StepGiven],
    ) -> M: ...  # fmt: skip
    @overload
    def step(
        self, name: str, fn: Callable[P, Model], /, *args: P.args, **kwargs: P.kwargs
    ) -> Any: ...
    @overload
    def step(
        self, name: str, fn: Callable[[*Args], Model], /, *args: *Args, **options: Unpack[StepGiven]
    ) -> Any: ...
    @overload
    def step(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def step(
        self, name: str, fn: Callable[[*Args], T], /, *args: *Args, **options: Unpack[StepGiven]
    ) -> T: ...
    def step(  # type: ignore[misc]
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_doubt: OnDoubt = "rerun",
        on_change: OnChange = "raise",
        key: str | None = None,
        retries: int | Retries | None = None,
        verify: Verify | None = None,
        as_: type[Any] | None = None,
        errors: Errors = (),
        **kwargs: Any,
    ) -> Any:
        """Call `fn(*args, **kwargs)` as a step, record its result, and return it.

        After a crash, the recorded result is returned and `fn` is not called again. The result is
        always returned as it is recorded, also the first time: models and dataclasses become plain
        data, or an object of type `as_`. An error of `fn` is recorded, too. If it ends the run, the
        resumed run makes the call again; if the code handled it, the resumed run raises it again.
        Builtin exceptions, and those of the classes `errors` and their subclasses, then come back
        as themselves, with a StepFailed as their `__cause__`. All others become a StepFailed.

        `key` identifies the step within the turn. The default is its name with a number, such as
        "ask#1", so steps in several threads or tasks need keys. `retries` is the number of
        attempts, or a Retries. `on_change` applies if the arguments differ from the recorded ones:
        "raise" StepChanged, "reuse" the recorded result, or "rerun".

        A call that has begun but has no recorded end is in doubt: it may have had its effect.
        `verify(idempotency_key)` then decides: it returns Done(result) if the call had its effect,
        or None to make it again. Without `verify`, `on_doubt` applies: "rerun" makes the call
        again, "skip" returns None, and "ask" raises InDoubt, which halts the run until
        session.resolve() decides.
        """
        options = StepOptions(on_doubt, on_change, key, retries, verify, as_, errors)
        return self._carry_out(self._core.step(name, fn, args, kwargs, options))

    @overload
    def tool(
        self, call: Any, fn: Callable[..., Any], *, as_: type[M], **options: Unpack[CallOptions]
    ) -> M: ...
    @overload
    def tool(self, call: Any, fn: Callable[..., Model], **options: Unpack[CallOptions]) -> Any: ...
    @overload
    def tool(self, call: Any, fn: Callable[..., T], **options: Unpack[CallOptions]) -> T: ...
    def tool(
        self,
        call: Any,
        fn: Callable[..., Any],
        *,
        on_doubt: OnDoubt = "ask",
        on_change: OnChange = "raise",
        retries: int | Retries | None = None,
        verify: Verify | None = None,
        as_: type[Any] | None = None,
        errors: Errors = (),
    ) -> Any:
        """Make a tool call that a model has asked for, and return its result.

        `call` is a ToolCall, or a tool call in the format of OpenAI or Anthropic. `fn` gets its
        arguments by name, or as one value if they are not a dict. The id of the call is the key, so
        a call with a recorded result is not made again. Raises InvalidRequest if the arguments are
        not valid JSON; then nothing was called. The other options are those of step(), but
        `on_doubt` defaults to "ask".
        """
        options = StepOptions(on_doubt, on_change, None, retries, verify, as_, errors)
        return self._carry_out(self._core.tool(call, fn, options))

    @overload
    def durable(
        self, fn: Callable[P, Model], *, name: str | None = None, **options: Unpack[StepGiven]
    ) -> Callable[P, Any]: ...
    @overload
    def durable(
        self, fn: Callable[P, T], *, name: str | None = None, **options: Unpack[StepGiven]
    ) -> Callable[P, T]: ...
    @overload
    def durable(
        self, fn: None = None, *, as_: type[M], name: str | None = None,
        **options: Unpack[StepGiven],
    ) -> Callable[[Callable[P, Any]], Callable[P, M]]: ...  # fmt: skip
    @overload
    def durable(
        self, fn: None = None, *, name: str | None = None, **options: Unpack[StepGiven]
    ) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
    def durable(self, fn: Any = None, *, name: str | None = None, **options: Any) -> Any:
        """Make a function whose every call is a step: `@run.durable` or `@run.durable(…)`.

        The options are those of step(). `name` defaults to the name of the function.
        """
        return self._decorate(fn, name, options)

    def _durable(self, function: Any, name: str, options: StepOptions) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._carry_out(self._core.step(name, function, args, kwargs, options))

        return wrapped

    def _carry_out(self, requests: Requests) -> Any:
        """Answer the requests of the core, one by one. Return the result or raise the error."""
        answer: Any = None
        with closing(requests):
            while True:
                try:
                    request = requests.send(answer)
                except StopIteration as end:
                    made: Made = end.value
                    break
                answer = self._answer(request)
        if made.error is None:
            return made.result
        try:
            raise made.error
        finally:
            del made, answer  # they hold the error, and its traceback holds this frame

    def _answer(self, request: Prepare | Make | Write) -> Any:
        if isinstance(request, Prepare):
            return self._core.prepare(request)
        if isinstance(request, Write):
            return request.fn(*request.args)
        fn, retries = request
        try:
            return Made(fn() if retries is None else retrying(retries, fn))
        except BaseException as e:  # noqa: BLE001 - raised once it is recorded
            return Made(None, e)

    def checkpoint(self, event: str | None = None, **fields: Unpack[Fields]) -> Checkpoint:
        """Save the state now, and return the checkpoint. It is durable when this returns.

        The turn continues. After a crash, the turn still starts again from its beginning. `event`
        is the checkpoint's trigger; `fields` are those of Session.save().
        """
        return self._core.take_checkpoint(event, fields)

    def stream(self, key: str) -> StreamWriter:
        """Return a writer of a stream, to be used in the function of a step or tool.

        ```
        def ask(question):
            with run.stream("answer") as out:
                for text in model(question):
                    out.write(text)
        ```

        Session.stream(key) reads it, in any process. Chunks are written every 100 ms or 16 KB. If
        the step is made again after a crash or an error, the stream begins again, and its readers
        get a RESTART. Entering the writer raises InvalidRequest outside of a step or tool, and if
        the step is writing a stream of this key already.
        """
        return StreamWriter(StreamBuffer(self._core, key))

    def wait_for(self, name: str, prompt: Any = None) -> Any:
        """Return the answer to a question, for example a human's approval.

        If there is no answer yet, the run halts here: the `with` block ends, the session is free
        for others, and session.pending() lists the question. After session.answer(), the resumed
        run gets the answer here. Raises StepChanged if the same question had another `prompt`
        before.
        """
        return self._core.wait(name, prompt)

    def approve(self, call: Any, prompt: Any = None) -> bool:
        """Return whether a person has approved a tool call. Halts the run until there is an answer.

        `call` is one of tool(), or a pair of name and arguments. session.pending() lists the
        question under the id of the call, with the tool, its arguments and `prompt`; a pair is
        listed under its name. Raises StepChanged if any of them was another one before.

        Only the answer True approves. Any other answer denies the call; a text is the reason. The
        denial becomes the result of the call: in the state's conversation, if the call is in it
        without a result, and in the journal, so that tool() returns it and calls nothing. A pair
        has no id, so its denial is only returned.

        ```
        for call in reply["tool_calls"]:
            if run.approve(call):
                result = run.tool(call, pay)
        ```
        """
        return self._core.approve(call, prompt)
