"""SIGTERM as an exception, where a run asks for it."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Halt(BaseException):
    """Leaves a run that is to be taken up again later."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


@contextmanager
def terminable(*, asked: bool) -> Iterator[None]:
    """Halt on SIGTERM: only in the main thread, and only if nobody else has a use for it."""
    main = threading.current_thread() is threading.main_thread()
    if not (asked and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return

    def halt(*_: Any) -> None:
        raise Halt("SIGTERM")

    signal.signal(signal.SIGTERM, halt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
