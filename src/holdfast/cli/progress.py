"""A bar for what takes long: on a terminal, and only from the second second on."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

PATIENCE = 1.0


class Bar:
    """Told how much is done of how much, it draws that on stderr if somebody looks."""

    def __init__(self, title: str) -> None:
        self._title, self._began = title, time.monotonic()
        self._quiet = not sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        self.phase(self._title, done, total)

    def phase(self, title: str, done: int, total: int) -> None:
        if self._quiet or time.monotonic() - self._began < PATIENCE:
            return
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(title)
            self._progress.start()
        self._progress.update(self._task, description=title, completed=done, total=total)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def bar(title: str) -> Iterator[Bar]:
    made = Bar(title)
    try:
        yield made
    finally:
        made.stop()
