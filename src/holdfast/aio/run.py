"""Runs for asyncio: `async with session.run() as run`.

Functions of steps and tools may be coroutine functions, which run on the loop, or ordinary
functions, which run in a thread. The store's workers do all writes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import threading
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.runs.run import RunHandle
from holdfast.runs.run_core import (
    Halt,
    Made,
    Prepare,
    Retries,
    RunCore,
    StepOptions,
    Write,
    retries_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType
    from typing import Self, Unpack

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.history.journal import Call
    from holdfast.runs.pending import Pending
    from holdfast.runs.run_core import Done, Make, OnChange, OnDoubt, Requests

    Verify = Callable[[str], "Done | Awaitable[Done | None] | None"]

_F = TypeVar("_F", bound="Callable[..., Any]")


class AsyncRun(RunHandle):
    """A Run whose methods are awaited: `async with session.run() as run`; see Run.

    Several tasks may make steps at the same time; concurrent steps need a `key` each.
    """

    def __init__(
        self, core: RunCore, work: Callable[..., Awaitable[Any]], *, sigterm: bool = False
    ) -> None:
        super().__init__(core, sigterm=sigterm)
        self._work = work
        self._terminated = False

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._terminable())
            try:
                await self._work(self._core.open)
            except asyncio.CancelledError as e:
                await self._work(self._core.close, e)  # release what open() has taken
                raise
            self._signals = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._signals.close()
        if self._terminated and isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            error = Halt("SIGTERM")
        done: bool = await self._work(self._core.close, error)
        return done

    @contextmanager
    def _terminable(self) -> Iterator[None]:
        """Halt on SIGTERM, as a Run does, by cancelling the task that entered the run."""
        main = threading.current_thread() is threading.main_thread()
        task = asyncio.current_task()
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not (self._sigterm and main and default and task is not None):
            yield
            return
        loop = asyncio.get_running_loop()

        def halt() -> None:
            self._terminated = True
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, halt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def turns(self, limit: int | None = None) -> AsyncIterator[int]:
        """Yield turn numbers, up to `limit`. A resumed run starts with the interrupted turn.

        A checkpoint is taken at the end of a turn if the policy wants one. After a crash, the
        interrupted turn starts again with the state of its base, the checkpoint that it started
        from. A run has one such loop.
        """
        await self._work(self._core.enter_loop)
        while limit is None or self.turn <= limit:
            yield self.turn
            await self._work(self._core.end_turn)

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        on_doubt: OnDoubt = "rerun",
        on_change: OnChange = "raise",
        key: str | None = None,
        retries: int | Retries | None = None,
        verify: Verify | None = None,
        as_: type[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `fn(*args, **kwargs)` as a step, record its result, and return it.

        After a crash, the recorded result is returned and `fn` is not called again. The result is
        always returned as it is recorded, also the first time: models and dataclasses become plain
        data, or an object of type `as_`. An error of `fn` is recorded, too. If it ends the run, the
        resumed run makes the call again; if the code handled it, the resumed run raises it again,
        as a builtin exception or StepFailed.

        `key` identifies the step within the turn. The default is its name with a number, such as
        "ask#1", so steps in several tasks need keys. `retries` is the number of attempts, or a
        Retries. `on_change` applies if the arguments differ from the recorded ones: "raise"
        StepChanged, "reuse" the recorded result, or "rerun".

        A call that has begun but has no recorded end is in doubt: it may have had its effect.
        `verify(idempotency_key)` then decides: it returns Done(result) if the call had its effect,
        or None to make it again. Without `verify`, `on_doubt` applies: "rerun" makes the call
        again, "skip" returns None, and "ask" raises InDoubt, which halts the run until
        session.resolve() decides.
        """
        options = StepOptions(on_doubt, on_change, key, retries, verify, as_)
        return await self._carry_out(self._core.step(name, fn, args, kwargs, options))

    async def tool(
        self,
        call: Any,
        fn: Callable[..., Any],
        *,
        on_doubt: OnDoubt = "ask",
        on_change: OnChange = "raise",
        retries: int | Retries | None = None,
        verify: Verify | None = None,
        as_: type[Any] | None = None,
    ) -> Any:
        """Make a tool call that a model has asked for, and return its result.

        `call` is a ToolCall, or a tool call in the format of OpenAI or Anthropic. `fn` gets its
        arguments by name, or as one value if they are not a dict. The id of the call is the key, so
        a call with a recorded result is not made again. Raises InvalidRequest if the arguments are
        not valid JSON; then nothing was called. The other options are those of step(), but
        `on_doubt` defaults to "ask".
        """
        options = StepOptions(on_doubt, on_change, None, retries, verify, as_)
        return await self._carry_out(self._core.tool(call, fn, options))

    async def _carry_out(self, requests: Requests) -> Any:
        """Answer the requests of the core, one by one. Return the result or raise the error."""
        answer: Any = None
        with closing(requests):
            while True:
                try:
                    request = requests.send(answer)
                except StopIteration as end:
                    made: Made = end.value
                    break
                answer = await self._answer(request)
        if made.error is None:
            return made.result
        try:
            raise made.error
        finally:
            del made, answer  # they hold the error, and its traceback holds this frame

    async def _answer(self, request: Prepare | Make | Write) -> Any:
        if isinstance(request, Prepare):
            return await self._prepare(request)
        if isinstance(request, Write):
            return await self._work(request.fn, *request.args)
        fn, retries = request
        try:
            return Made(await (_once(fn) if retries is None else _retrying(retries, fn)))
        except BaseException as e:  # noqa: BLE001 - raised once it is recorded
            return Made(None, e)

    async def _prepare(self, wanted: Prepare) -> Call:
        """Prepare a call in a worker.

        If this is cancelled after the call was noted as begun, the note is withdrawn: nothing was
        called, so the call is not in doubt.
        """
        if wanted.options.verify is not None:
            verify = _from_thread(wanted.options.verify)
            wanted = wanted._replace(options=wanted.options._replace(verify=verify))
        made: list[Call] = []
        try:
            await self._work(lambda: made.append(self._core.prepare(wanted)))
        except asyncio.CancelledError:
            for call in made:
                if call.status == "started":
                    await self._work(self._core.withdraw, call)
            raise
        return made[0]

    def durable(self, fn: Any = None, *, name: str | None = None, **given: Any) -> Any:
        """Make a function whose every call is a step: `@run.durable` or `@run.durable(…)`.

        The options are those of step(). `name` defaults to the name of the function.
        """

        def decorate(function: _F) -> _F:
            called, options = name or function.__name__, StepOptions(**given)

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                return await self._carry_out(
                    self._core.step(called, function, args, kwargs, options)
                )

            return wrapped  # type: ignore[return-value]

        return decorate if fn is None else decorate(fn)

    async def checkpoint(self, event: str | None = None, **fields: Unpack[Fields]) -> Checkpoint:
        """Save the state now, and return the checkpoint. It is durable when this returns.

        The turn continues. After a crash, the turn still starts again from its beginning. `event`
        is the checkpoint's trigger; `fields` are those of Session.save().
        """
        saved: Checkpoint = await self._work(self._core.take_checkpoint, event, fields)
        return saved

    async def partial(self, key: str, chunk: Any) -> None:
        """Record one part of a result that is still being produced.

        It is durable when this returns. partials() returns the parts if the call is interrupted.
        `key` is the key or the name of a call in progress. Raises NotFound if there is none.
        """
        await self._work(self._core.add_partial, key, chunk)

    async def pending(self) -> list[Pending]:
        """Return open questions of this run, and its calls that are in progress or in doubt."""
        found: list[Pending] = await self._work(lambda: self._core.pending)
        return found

    async def wait_for(self, name: str, prompt: Any = None) -> Any:
        """Return the answer to a question, for example a human's approval.

        If there is no answer yet, the run halts here: the `with` block ends, the session is free
        for others, and session.pending() lists the question. After session.answer(), the resumed
        run gets the answer here. Raises StepChanged if the same question had another `prompt`
        before.
        """
        return await self._work(self._core.wait, name, prompt)


async def _once(fn: Callable[[], Any]) -> Any:
    """Call `fn` on the loop if it is a coroutine function, otherwise in a thread."""
    function = fn.func if isinstance(fn, functools.partial) else fn
    if inspect.iscoroutinefunction(function):
        return await fn()
    result = await asyncio.to_thread(fn)
    return await result if inspect.isawaitable(result) else result


async def _retrying(retries: int | Retries, fn: Callable[[], Any]) -> Any:
    import tenacity

    async for attempt in tenacity.AsyncRetrying(**retries_of(retries).options()):
        with attempt:
            return await _once(fn)
    raise AssertionError


def _from_thread(verify: Verify) -> Callable[[str], Any]:
    """Return `verify` as a function for a worker thread. A coroutine runs on this loop."""
    loop = asyncio.get_running_loop()

    def call(key: str) -> Any:
        verdict = verify(key)
        if not inspect.isawaitable(verdict):
            return verdict

        async def wait() -> Any:
            return await verdict

        return asyncio.run_coroutine_threadsafe(wait(), loop).result()

    return call
