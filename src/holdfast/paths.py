"""Paths of deltas: a key of the state, or a tuple of keys."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.diff import dotted
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse(path: Any) -> tuple[str, ...]:
    parts = (path,) if type(path) is str else path
    if type(parts) is not tuple or not parts or not all(type(p) is str for p in parts):
        raise InvalidRequest(
            f"not a path: {path!r}", hint='a key such as "messages", or a tuple of keys'
        )
    return parts


def deltas(given: Any, name: str) -> dict[Any, Any]:
    """What a patch was given by paths."""
    try:
        return dict(given or {})
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"{name} must map paths to values, not {type(given).__name__}",
            hint=f"{name}={{'messages': …}}",
        ) from None


def check_deltas(append: Mapping[Any, Any], assign: Mapping[Any, Any], drop: Any) -> None:
    if isinstance(drop, str):
        raise InvalidRequest("drop must be a list of keys", hint=f"drop=[{drop!r}]")
    for items in append.values():
        if not isinstance(items, list | tuple):
            raise InvalidRequest(
                "append must map each path to a list of items", hint="append={'messages': [m]}"
            )
    ordered = sorted(parse(p) for p in (*append, *assign, *drop))
    for a, b in pairwise(ordered):
        if a == b[: len(a)]:
            raise InvalidRequest(f"two changes of one patch meet at {dotted(b)}")
