"""Fill sessions, list them, and write to them at once."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import holdfast
from holdfast import Retention
from holdfast.errors import HeadMoved
from holdfast.model import ToolCall, Usage
from tests.support.stores import TEXT, Home

DAY = 86400.0


def seqs(checkpoints: Any) -> list[int]:
    return [checkpoint.seq for checkpoint in checkpoints]


def save_concurrently(home: Home, writers: int, saves: int) -> list[str]:
    """Save to one session from several threads at once; return the ids of all saves."""
    stores = [home.store, home.another()]
    barrier = threading.Barrier(writers)
    won: list[str] = []

    def write(n: int) -> None:
        session = stores[n % 2].session("s")
        barrier.wait()
        done = 0
        while done < saves:
            try:
                won.append(session.save({"by": n, "i": done, "log": [TEXT] * 5}).id)
                done += 1
            except HeadMoved:
                session.refresh()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


FIELDS: dict[str, Any] = {
    "label": "plan ready", "tags": ("b", "a"), "trigger": "manual", "status": "failed",
    "reason": "no answer", "hint": "ask again", "meta": {"user": "u1"},
    "usage": Usage(1000, 200, 300, 50, 0.01, "large"),
    "pending": (ToolCall("c1", "search", {"q": [1]}, {"m": 1}),),
}  # fmt: skip


PLAIN_FIELDS = {name: value for name, value in FIELDS.items() if name != "tags"}


KEEP_LAST = Retention(keep_last=1)


def save_random(session: holdfast.Session, count: int, size: int = 1_000) -> holdfast.Session:
    """Save checkpoints that share no data."""
    for i in range(count):
        session.save({"i": i, "raw": random.Random(f"{session.name} {i}").randbytes(size)})
    return session


def found_seqs(home: Home, **query: Any) -> list[int]:
    return seqs(home.store.checkpoints(**query))


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """Collect the warnings and errors that are logged."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("holdfast").removeHandler(handler)


def run_together(*calls: Callable[[], Any]) -> None:
    """Call all at once, in threads, and raise the first error."""
    barrier = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
