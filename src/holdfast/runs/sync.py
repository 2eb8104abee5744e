"""Runs for code that does not await."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, overload

from holdfast.runs import options
from holdfast.runs.calls import tool_call
from holdfast.runs.retrying import Retries, retrying
from holdfast.runs.run import RunCore, current
from holdfast.runs.signals import Halt, terminable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self, Unpack

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.runs.journal import Call
    from holdfast.runs.options import Done, OnChange, OnDoubt

_F = TypeVar("_F", bound="Callable[..., Any]")


class Run(RunCore):
    """One execution over a session: `with session.run() as run`.

    Safe for threads: steps may be called from several, each with a key of its own.
    """

    def __init__(self, *args: Any, sigterm: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sigterm, self._signals = sigterm, ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(terminable(asked=self._sigterm))
            self.open()
            self._signals = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            return self.close(error)
        finally:
            self._signals.close()

    def turns(self, limit: int | None = None) -> Iterator[int]:
        """The numbers of turns, from the one that was interrupted on; at most up to `limit`."""
        self.enter_loop()
        while limit is None or self.turn <= limit:
            yield self.turn
            self.end_turn()

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        on_doubt: OnDoubt = "rerun",
        on_change: OnChange = "raise",
        key: str | None = None,
        retries: int | Retries | None = None,
        verify: Callable[[str], Done | None] | None = None,
        as_: type[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `fn` once: after a crash its recorded result comes back.

        A result is always returned as it is recorded, also the first time: models and dataclasses
        as plain data, or as `as_`.
        """
        how = options.How(on_doubt, on_change, key, retries, verify, as_)
        return self._step(name, fn, args, kwargs, how)

    def _step(
        self, name: str, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], how: options.How
    ) -> Any:
        """A step whose function may have arguments that are named as our options are."""
        bound = options.bound(fn, *args, **kwargs)
        arguments = [list(args), dict(sorted(kwargs.items()))]
        call = self.prepare(
            "step", name, how.key, arguments,
            on_doubt=how.on_doubt, on_change=how.on_change, verify=how.verify,
        )  # fmt: skip
        if call.outcome != "started":
            return self.recorded(call, how.as_)
        return self._make(call, bound, how.retries, how.as_)

    def tool(
        self,
        call: Any,
        fn: Callable[..., Any],
        *,
        on_doubt: OnDoubt = "ask",
        on_change: OnChange = "raise",
        retries: int | Retries | None = None,
        verify: Callable[[str], Done | None] | None = None,
        as_: type[Any] | None = None,
    ) -> Any:
        """Make a tool call that a model has asked for, once, by its id."""
        wanted = tool_call(call)
        bound = options.bound_tool(fn, wanted.arguments)
        made = self.prepare(
            "tool", wanted.name, wanted.id, wanted.arguments,
            on_doubt=on_doubt, on_change=on_change, verify=verify,
        )  # fmt: skip
        if made.outcome != "started":
            return self.recorded(made, as_)
        return self._make(made, bound, retries, as_)

    def _make(
        self,
        call: Call,
        fn: Callable[[], Any],
        retries: int | Retries | None,
        as_: type[Any] | None,
    ) -> Any:
        token = current.set(call)
        try:
            result = fn() if retries is None else retrying(retries, fn)
        except BaseException as e:
            self.fail(call, e)
            raise
        finally:
            current.reset(token)
        return self.succeed(call, result, as_)

    @overload
    def durable(self, fn: _F) -> _F: ...
    @overload
    def durable(self, fn: None = None, **options: Any) -> Callable[[_F], _F]: ...
    def durable(self, fn: Any = None, *, name: str | None = None, **given: Any) -> Any:
        """A function each of whose calls is a step; as `@run.durable` or `@run.durable(…)`."""

        def decorate(function: Any) -> Any:
            called, how = name or function.__name__, options.How(**given)

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return self._step(called, function, args, kwargs, how)

            return wrapped

        return decorate if fn is None else decorate(fn)

    def checkpoint(self, event: str | None = None, **fields: Unpack[Fields]) -> Checkpoint:
        """Save the state now. The turn goes on, and after a crash begins where it began."""
        return self.take_checkpoint(event, fields)

    def partial(self, key: str, chunk: Any) -> None:
        """Keep a part of a result that is still being made, durable when this returns."""
        self.stream(key, chunk)

    def wait_for(self, name: str, prompt: Any = None) -> Any:
        """Somebody's answer. Until it is there, the run halts here, and resumes here."""
        return self.wait(name, prompt)

    def halt(self, reason: str) -> None:
        """Leave the run with a last checkpoint, to be resumed."""
        raise Halt(reason)

    @staticmethod
    def current_key() -> str | None:
        """The idempotency key of the call that is being made here."""
        return current_key()


def current_key() -> str | None:
    """The idempotency key of the call that is being made here: the same for every attempt."""
    call = current.get()
    return None if call is None else call.idempotency_key
