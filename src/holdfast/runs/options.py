"""What a call may be given. It is looked at before anything is written."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

OnDoubt = Literal["rerun", "skip", "ask"]
OnChange = Literal["raise", "reuse", "rerun"]
_ON_DOUBT, _ON_CHANGE = ("rerun", "skip", "ask"), ("raise", "reuse", "rerun")


class Done:
    """What `verify` returns for a call that had its effect; for one that had not, None."""

    def __init__(self, result: Any = None) -> None:
        self.result = result


class How(NamedTuple):
    """What a step may be told besides its function and the arguments of that."""

    on_doubt: OnDoubt = "rerun"
    on_change: OnChange = "raise"
    key: str | None = None
    retries: Any = None
    verify: Any = None
    as_: type[Any] | None = None


def bound(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """A call that can be made: one that was never begun must not be in doubt."""
    if not callable(fn):
        raise InvalidRequest(f"not a function: {fn!r}", hint="what is called by step() and tool()")
    return functools.partial(fn, *args, **kwargs)


def bound_tool(fn: Callable[..., Any], arguments: Any) -> Callable[[], Any]:
    """With what a model has written: named arguments, or a text."""
    if isinstance(arguments, dict) and all(type(name) is str for name in arguments):
        return bound(fn, **arguments)
    return bound(fn, arguments)


def check_options(name: str, key: str | None, on_doubt: str, on_change: str) -> None:
    check_name("a step's name", name)
    if key is not None:
        check_name("a step's key", key)
    if on_doubt not in _ON_DOUBT:
        raise InvalidRequest(f"unknown on_doubt {on_doubt!r}", hint=", ".join(_ON_DOUBT))
    if on_change not in _ON_CHANGE:
        raise InvalidRequest(f"unknown on_change {on_change!r}", hint=", ".join(_ON_CHANGE))


def check_name(of: str, name: str) -> None:
    if type(name) is not str or not name:
        raise InvalidRequest(f"{of} must be a non-empty string, not {name!r}")
