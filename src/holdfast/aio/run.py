"""Runs for asyncio: `async with session.run() as run`.

Functions of steps and tools may be coroutine functions, which run on the loop, or ordinary
functions, which run in a thread. The store's workers do all writes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, cast, overload

from holdfast.runs.pending import STOPPED
from holdfast.runs.run import Run, RunHandle
from holdfast.runs.run_core import (
    Halt,
    Made,
    Prepare,
    Retries,
    RunCore,
    StepOptions,
    Write,
    may_handle_sigterm,
    retries_of,
)
from holdfast.runs.streams import StreamBuffer, StreamWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
    from typing import Self, Unpack

    from holdfast.history.journal import Call
    from holdfast.runs.pending import Pending
    from holdfast.runs.run_core import CallOptions, Make, Model, Requests, StepGiven, Verify

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")
Args = TypeVarTuple("Args")


def _in_worker(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[AsyncRun, P], Coroutine[Any, Any, T]]:
    """Return an async version of a method of Run, which a worker runs."""

    @functools.wraps(method)
    async def call(self: AsyncRun, /, *args: P.args, **kwargs: P.kwargs) -> T:
        done: T = await self._work(method, self, *args, **kwargs)
        return done

    return call


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

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._signals.close()
        if self._terminated and isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            error = Halt(STOPPED)
        done: bool = await self._work(self._core.close, error)
        return done

    @contextmanager
    def _terminable(self) -> Iterator[None]:
        """Halt on SIGTERM, as a Run does, by cancelling the task that entered the run."""
        task = asyncio.current_task()
        if task is None or not (self._sigterm and may_handle_sigterm()):
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
        """Yield turn numbers, up to `limit`; see Run.turns."""
        await self._work(self._core.enter_loop)
        while limit is None or self.turn <= limit:
            self._core.check_budget(new_turn=True)
            yield self.turn
            await self._work(self._core.end_turn)

    # These are the overloads of Run, for functions and for coroutine functions.

    @overload
    async def step(
        self, name: str, fn: Callable[[*Args], Any], /, *args: *Args,
        as_: type[M], **options: Unpack[StepGiven],
    ) -> M: ...  # fmt: skip
    @overload
    async def step(
        self, name: str, fn: Callable[P, Awaitable[Model] | Model], /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> Any: ...  # fmt: skip
    @overload
    async def step(
        self, name: str, fn: Callable[[*Args], Awaitable[Model] | Model], /, *args: *Args,
        **options: Unpack[StepGiven],
    ) -> Any: ...  # fmt: skip
    @overload
    async def step(
        self, name: str, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def step(
        self, name: str, fn: Callable[[*Args], Awaitable[T]], /, *args: *Args,
        **options: Unpack[StepGiven],
    ) -> T: ...  # fmt: skip
    @overload
    async def step(
        self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def step(
        self, name: str, fn: Callable[[*Args], T], /, *args: *Args, **options: Unpack[StepGiven]
    ) -> T: ...
    async def step(  # type: ignore[misc]
        self, name: str, fn: Callable[..., Any], /, *args: Any, **given: Any
    ) -> Any:
        """Call `fn` as a step, and return its result; see Run.step."""
        return await Run.step(cast("Any", self), name, fn, *args, **given)

    @overload
    async def tool(
        self, call: Any, fn: Callable[..., Any], *, as_: type[M], **options: Unpack[CallOptions]
    ) -> M: ...
    @overload
    async def tool(
        self, call: Any, fn: Callable[..., Awaitable[Model] | Model],
        **options: Unpack[CallOptions],
    ) -> Any: ...  # fmt: skip
    @overload
    async def tool(
        self, call: Any, fn: Callable[..., Awaitable[T]], **options: Unpack[CallOptions]
    ) -> T: ...
    @overload
    async def tool(self, call: Any, fn: Callable[..., T], **options: Unpack[CallOptions]) -> T: ...
    async def tool(self, call: Any, fn: Callable[..., Any], **given: Any) -> Any:
        """Make a tool call, and return its result; see Run.tool."""
        return await Run.tool(cast("Any", self), call, fn, **given)

    @overload
    def durable(
        self, fn: Callable[P, Awaitable[Model] | Model], *, name: str | None = None,
        **options: Unpack[StepGiven],
    ) -> Callable[P, Coroutine[Any, Any, Any]]: ...  # fmt: skip
    @overload
    def durable(
        self, fn: Callable[P, Awaitable[T]], *, name: str | None = None,
        **options: Unpack[StepGiven],
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...  # fmt: skip
    @overload
    def durable(
        self, fn: Callable[P, T], *, name: str | None = None, **options: Unpack[StepGiven]
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def durable(
        self, fn: None = None, *, as_: type[M], name: str | None = None,
        **options: Unpack[StepGiven],
    ) -> Callable[[Callable[P, Any]], Callable[P, Coroutine[Any, Any, M]]]: ...  # fmt: skip
    @overload
    def durable(
        self, fn: None = None, *, name: str | None = None, **options: Unpack[StepGiven]
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]: ...
    def durable(self, fn: Any = None, *, name: str | None = None, **options: Any) -> Any:
        """Make a function whose every call is a step; see Run.durable."""
        return self._decorate(fn, name, options)

    checkpoint = _in_worker(Run.checkpoint)
    wait_for = _in_worker(Run.wait_for)
    approve = _in_worker(Run.approve)

    def stream(self, key: str) -> AsyncStreamWriter:
        """Return a writer of a stream: `async with run.stream(key) as out`; see Run.stream."""
        return AsyncStreamWriter(StreamBuffer(self._core, key), self._work)

    async def pending(self) -> list[Pending]:
        """Return open questions of this run, and its calls that are in progress or in doubt."""
        found: list[Pending] = await self._work(lambda: self._core.pending)
        return found

    def _durable(self, function: Any, name: str, options: StepOptions) -> Any:
        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            return await self._carry_out(self._core.step(name, function, args, kwargs, options))

        return wrapped

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


class AsyncStreamWriter:
    """A StreamWriter whose methods are awaited. `sync` is one for a function in a thread."""

    def __init__(self, buffer: StreamBuffer, work: Callable[..., Awaitable[Any]]) -> None:
        self.sync = StreamWriter(buffer)
        self._buffer, self._work = buffer, work

    async def __aenter__(self) -> Self:
        await self._work(self._buffer.begin)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._work(self._buffer.end, error)

    async def write(self, chunk: Any) -> None:
        """Add a chunk; see StreamWriter.write."""
        if self._buffer.add(chunk):
            await self._work(self._buffer.flush)

    async def flush(self) -> None:
        """Write the chunks of the buffer now; see StreamWriter.flush."""
        await self._work(self._buffer.flush)


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
