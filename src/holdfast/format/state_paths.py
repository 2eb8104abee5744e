"""Parse paths in a state, such as "plan.steps[3]", and check the arguments of a patch."""

from __future__ import annotations

import re
from ast import literal_eval
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Path = str | tuple[Any, ...]
DOTS = "a key with a dot in it is written ['a.b']"
_INDEX = re.compile(r"\[(\d+)\]")
# A key in brackets, as diffs show it: text, bytes, a number, None, True or False.
_KEY = re.compile(
    r"""\[(b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:e[-+]\d+)?|None|True|False)\]"""
    r"""(?=[.\[]|\Z)""",
    re.DOTALL,
)


def parse(path: Path) -> tuple[Any, ...]:
    """Return the keys of a path such as "plan.steps.3", "plan.steps[3]" or "plan['a.b']".

    Diffs show paths in this form. A tuple, such as ("plan", "steps", 3), is returned as it is. It
    can hold any key, for example a date. Raises InvalidRequest if `path` is empty or has another
    type.
    """
    if isinstance(path, tuple) and path:
        return path
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"not a path: {path!r}", hint='such as "plan.budget"')
    return tuple(_steps(path))


def _steps(path: str) -> Iterator[Any]:
    start = 0
    for found in _KEY.finditer(path):
        if found[1].isdecimal():  # [3] is the same as .3, see `_dotted`
            continue
        try:
            key = literal_eval(found[1])
        except (ValueError, SyntaxError):
            continue  # no literal: the brackets are part of a name
        if found.start() > start:
            yield from _dotted(path[start : found.start()])
        yield key
        start = found.end() + path.startswith(".", found.end())
    if start < len(path) or path.endswith("."):
        yield from _dotted(path[start:])


def _dotted(path: str) -> Iterator[str | int]:
    for step in _INDEX.sub(r".\1", path).removeprefix(".").split("."):
        is_number = step.isdecimal() and len(step) < 20 and str(int(step)) == step
        yield int(step) if is_number else step


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path as text, for messages."""
    out = "state"
    for step in path:
        out += f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r}]"
    return out


def parse_delta(path: Any) -> tuple[str | int, ...]:
    """Return the keys of the path of a delta. Raises InvalidRequest if one is not text.

    A number in a path given as text becomes an int; the dict may have it as a text key.
    """
    steps = parse(path)
    allowed = (str, int) if type(path) is str else (str,)
    if not all(type(step) in allowed for step in steps):
        raise InvalidRequest(
            f"not a path of text keys: {path!r}",
            hint='such as "plan.budget", or the tuple ("plan", "budget"); ' + DOTS,
        )
    return steps


def deltas(given: Any, name: str) -> dict[Any, Any]:
    """Return an argument of `patch()` as a dict. Raises InvalidRequest if it is no mapping."""
    try:
        return dict(given or {})
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"{name} must map paths to values, not {type(given).__name__}",
            hint=f"{name}={{'messages': …}}",
        ) from None


def check_deltas(append: Mapping[Any, Any], assign: Mapping[Any, Any], drop: Any) -> None:
    """Raise InvalidRequest if an argument has a wrong type, or if two paths overlap."""
    if isinstance(drop, str):
        raise InvalidRequest("drop must be a list of keys", hint=f"drop=[{drop!r}]")
    for items in append.values():
        if not isinstance(items, list | tuple):
            raise InvalidRequest(
                "append must map each path to a list of items", hint="append={'messages': [m]}"
            )
    ordered = sorted([tuple(map(str, parse_delta(p))) for p in (*append, *assign, *drop)])
    for a, b in pairwise(ordered):
        if a == b[: len(a)]:
            raise InvalidRequest(f"two changes of one patch meet at {dotted(b)}")
