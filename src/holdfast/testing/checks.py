"""Assertions that survive python -O and need no test framework."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def expect(condition: object, what: str = "") -> None:
    """An assertion that survives python -O."""
    if not condition:
        raise AssertionError(what or "the contract is broken")


def equal(found: object, wanted: object) -> None:
    expect(found == wanted, f"found {found!r:.2000}, wanted {wanted!r:.2000}")


@contextmanager
def raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    try:
        yield
    except kind as e:
        expect(text in str(e), f"{text!r} is not in {e}")
        return
    raise AssertionError(f"{kind.__name__} was not raised")
