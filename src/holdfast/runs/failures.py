"""Which call an error came from, so that a run that it has ended tries that call again."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = "_holdfast_call"


def mark(error: BaseException, token: bytes, number: int) -> None:
    """Kept with the error itself: its address would soon be another's, and it must not be held."""
    with suppress(AttributeError, TypeError):  # an odd one, which cannot be written to
        setattr(error, _MARK, (token, number))


def sources(error: BaseException, token: bytes) -> Iterator[int]:
    """The calls of the run with this lease that an error came from: it, its cause, its group."""
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
