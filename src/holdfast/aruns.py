"""Runs for asyncio: `async with session.run() as run`, and `async for turn in run.turns()`.

The functions of steps and tools may be coroutine functions, which run in the loop, or ordinary
ones, which run in a thread. What is written is written by the store's workers.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from holdfast.runs import options
from holdfast.runs.calls import tool_call
from holdfast.runs.retrying import Retries, retries_of
from holdfast.runs.run import RunCore, current
from holdfast.runs.signals import Halt
from holdfast.runs.sync import current_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType
    from typing import Self, Unpack

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.model import ToolCall, Usage
    from holdfast.runs.conversation import Conversation
    from holdfast.runs.journal import Call
    from holdfast.runs.options import Done, OnChange, OnDoubt
    from holdfast.runs.pending import Pending
    from holdfast.session import Session

    Verify = Callable[[str], "Done | Awaitable[Done | None] | None"]

_F = TypeVar("_F", bound="Callable[..., Any]")


class AsyncRun:
    """A Run whose methods are awaited. Steps may be made by several tasks, each with its key."""

    def __init__(
        self, core: RunCore, work: Callable[..., Awaitable[Any]], *, sigterm: bool = False
    ) -> None:
        self.core, self._work = core, work
        self._sigterm, self._signals = sigterm, ExitStack()
        self._terminated = False

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._terminable())
            try:
                await self._work(self.core.open)
            except asyncio.CancelledError as e:
                await self._work(self.core.close, e)  # what it has taken nevertheless
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
        done: bool = await self._work(self.core.close, error)
        return done

    @contextmanager
    def _terminable(self) -> Iterator[None]:
        """Halt on SIGTERM, as a Run does: by ending whatever this task waits for."""
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

    @property
    def id(self) -> str:
        return self.core.id

    @property
    def turn(self) -> int:
        return self.core.turn

    @property
    def resumed(self) -> bool:
        """Whether this goes on with a run that was interrupted."""
        return self.core.resumed

    @property
    def removed(self) -> tuple[str, ...]:
        """Keys of calls that were recorded, but that the code has not asked for again."""
        return self.core.removed

    @property
    def session(self) -> Session:
        """The session that is run, as a Session. It is written through the run alone."""
        return self.core.session

    @property
    def state(self) -> Any:
        """The state, to be changed in place. A checkpoint takes it as it is then."""
        return self.core.state

    @state.setter
    def state(self, state: Any) -> None:
        self.core.state = state

    def add_usage(self, usage: Usage | None = None, *, tokens: int = 0, cost: float = 0.0) -> None:
        """What was spent since the last checkpoint; the next one carries it."""
        self.core.add_usage(usage, tokens=tokens, cost=cost)

    async def turns(self, limit: int | None = None) -> AsyncIterator[int]:
        """The numbers of turns, from the one that was interrupted on; at most up to `limit`."""
        await self._work(self.core.enter_loop)
        while limit is None or self.turn <= limit:
            yield self.turn
            await self._work(self.core.end_turn)

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
        """Call `fn` once: after a crash its recorded result comes back.

        A result is always returned as it is recorded, also the first time: models and dataclasses
        as plain data, or as `as_`.
        """
        how = options.How(on_doubt, on_change, key, retries, verify, as_)
        return await self._step(name, fn, args, kwargs, how)

    async def _step(
        self, name: str, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], how: options.How
    ) -> Any:
        """A step whose function may have arguments that are named as our options are."""
        bound = options.bound(fn, *args, **kwargs)
        arguments = [list(args), dict(sorted(kwargs.items()))]
        call = await self._prepare(
            "step", name, how.key, arguments, how.on_doubt, how.on_change, how.verify
        )
        if call.outcome != "started":
            return self.core.recorded(call, how.as_)
        return await self._make(call, bound, how.retries, how.as_)

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
        """Make a tool call that a model has asked for, once, by its id."""
        wanted = tool_call(call)
        bound = options.bound_tool(fn, wanted.arguments)
        made = await self._prepare(
            "tool", wanted.name, wanted.id, wanted.arguments, on_doubt, on_change, verify
        )
        if made.outcome != "started":
            return self.core.recorded(made, as_)
        return await self._make(made, bound, retries, as_)

    async def _prepare(
        self,
        kind: Literal["step", "tool"],
        name: str,
        key: str | None,
        arguments: Any,
        on_doubt: str,
        on_change: str,
        verify: Verify | None,
    ) -> Call:
        look = None if verify is None else _from_thread(verify)
        made: list[Call] = []

        def prepare() -> None:
            made.append(
                self.core.prepare(
                    kind, name, key, arguments, on_doubt=on_doubt, on_change=on_change, verify=look
                )
            )

        try:
            await self._work(prepare)
        except asyncio.CancelledError:
            for call in made:
                if call.outcome == "started":
                    await self._work(self.core.withdraw, call)
            raise
        return made[0]

    async def _make(
        self,
        call: Call,
        fn: Callable[[], Any],
        retries: int | Retries | None,
        as_: type[Any] | None,
    ) -> Any:
        token = current.set(call)
        try:
            result = await (_once(fn) if retries is None else _retrying(retries, fn))
        except BaseException as e:
            await self._work(self.core.fail, call, e)
            raise
        finally:
            current.reset(token)
        return await self._work(self.core.succeed, call, result, as_)

    def durable(self, fn: Any = None, *, name: str | None = None, **given: Any) -> Any:
        """A function each of whose calls is a step; as `@run.durable` or `@run.durable(…)`."""

        def decorate(function: _F) -> _F:
            called, how = name or function.__name__, options.How(**given)

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                return await self._step(called, function, args, kwargs, how)

            return wrapped  # type: ignore[return-value]

        return decorate if fn is None else decorate(fn)

    async def checkpoint(self, event: str | None = None, **fields: Unpack[Fields]) -> Checkpoint:
        """Save the state now. The turn goes on, and after a crash begins where it began."""
        saved: Checkpoint = await self._work(self.core.take_checkpoint, event, fields)
        return saved

    async def partial(self, key: str, chunk: Any) -> None:
        """Keep a part of a result that is still being made, durable when this returns."""
        await self._work(self.core.stream, key, chunk)

    def partials(self, key: str) -> list[Any]:
        """What was streamed of a call that was interrupted."""
        return self.core.partials(key)

    async def pending(self) -> list[Pending]:
        """What this run waits for, and its calls that have no end: under way, or in doubt."""
        found: list[Pending] = await self._work(lambda: self.core.pending)
        return found

    async def wait_for(self, name: str, prompt: Any = None) -> Any:
        """Somebody's answer. Until it is there, the run halts here, and resumes here."""
        return await self._work(self.core.wait, name, prompt)

    def halt(self, reason: str) -> None:
        """Leave the run with a last checkpoint, to be resumed."""
        raise Halt(reason)

    @staticmethod
    def current_key() -> str | None:
        """The idempotency key of the call that is being made here."""
        return current_key()


class AsyncConversation:
    """A Conversation whose methods are awaited."""

    def __init__(self, sync: Conversation, work: Callable[..., Awaitable[Any]]) -> None:
        self.sync, self._work = sync, work

    async def messages(self) -> list[dict[str, Any]]:
        """All messages, the oldest first."""
        found: list[dict[str, Any]] = await self._work(lambda: self.sync.messages)
        return found

    async def append(self, *messages: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add messages: one checkpoint, durable when this returns."""
        saved: Checkpoint = await self._work(self.sync.append, *messages, **fields)
        return saved

    async def window(self, budget: float | None = None) -> list[dict[str, Any]]:
        """What to send: the newest messages that fit, and no call without its result."""
        found: list[dict[str, Any]] = await self._work(self.sync.window, budget)
        return found

    async def repair(self) -> list[ToolCall]:
        """Close calls without a result; a checkpoint, if there were any."""
        calls: list[ToolCall] = await self._work(self.sync.repair)
        return calls


async def _once(fn: Callable[[], Any]) -> Any:
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
    """A callback for a worker that may be a coroutine function of this loop."""
    loop = asyncio.get_running_loop()

    def call(key: str) -> Any:
        verdict = verify(key)
        if not inspect.isawaitable(verdict):
            return verdict

        async def wait() -> Any:
            return await verdict

        return asyncio.run_coroutine_threadsafe(wait(), loop).result()

    return call
