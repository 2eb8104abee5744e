"""The assertions of the contracts. They do not need pytest, and they survive `python -O`."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def expect(condition: object, what: str = "") -> None:
    """Raise AssertionError unless a condition holds."""
    if not condition:
        raise AssertionError(what or "the contract is broken")


def equal(found: object, wanted: object) -> None:
    """Raise AssertionError, with both values, unless they are equal."""
    expect(found == wanted, f"found {found!r:.2000}, wanted {wanted!r:.2000}")


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], text: str = ""
) -> Iterator[None]:
    """Return a context that must raise this error, with this text in its message or its hint."""
    try:
        yield
    except kind as e:
        said = f"{e} {getattr(e, 'hint', '')}"
        expect(text in said, f"{text!r} is not in {said}")
        return
    raise AssertionError(f"{kind} was not raised")


def at_once(calls: list[Callable[[], object]]) -> list[BaseException | None]:
    """Make all calls at the same time, each in a thread. Return the error of each, or None."""
    start = threading.Barrier(len(calls))
    errors: list[BaseException | None] = [None] * len(calls)

    def work(n: int) -> None:
        start.wait()
        try:
            calls[n]()
        except BaseException as e:  # noqa: BLE001 - returned to the caller
            errors[n] = e

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
