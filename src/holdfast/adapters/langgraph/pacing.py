"""How far a graph may run ahead of what is on the disk.

With durability "async" LangGraph hands checkpoints over in the background, as many as there are. A
graph whose steps are faster than a disk would have all of them still to come when it crashes. It
asks for a version in every step, though: then it waits, if too much is on its way. On an event loop
it cannot: the checkpoints themselves need the loop. There it is the loop that waits for each of
them, until it has caught up.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

AHEAD = 8
"""Steps."""
_PATIENCE = 1.0
"""Seconds without any being saved until nobody waits for that any more."""
_RECENT = 4_096


class _Course:
    """The versions of one thread."""

    def __init__(self, start: int) -> None:
        self.asked = self.saved = start
        self.coming = False
        """Whether its checkpoints are on their way, rather than kept until the graph ends."""


class Pace:
    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._courses: OrderedDict[str, _Course] = OrderedDict()

    def step(self, current: str | None, following: str) -> None:
        """A step asks for its version."""
        with self._moved:
            course = self._courses.get(current or "") or _Course(number_of(current))
            course.asked = max(course.asked, number_of(following))
            self._courses[following] = course
            while len(self._courses) > _RECENT:
                self._courses.popitem(last=False)
            if not _on_a_loop():  # which must not stand still
                while course.coming and course.asked - course.saved > AHEAD:
                    if not self._moved.wait(_PATIENCE):
                        course.coming = False

    def is_far(self, versions: Mapping[str, Any]) -> bool:
        """Whether too much is on its way behind a checkpoint with these versions."""
        with self._moved:
            course = self._courses.get(_newest(versions))
            return course is not None and course.coming and course.asked - course.saved > AHEAD

    @contextmanager
    def saving(self, versions: Mapping[str, Any]) -> Iterator[None]:
        """A checkpoint with these versions is saved."""
        newest = _newest(versions)
        with self._moved:
            course = self._courses.get(newest)
            if course is not None:
                course.coming = True
        try:
            yield
        finally:
            if course is not None:
                with self._moved:
                    course.saved = max(course.saved, number_of(newest))
                    course.coming = course.saved < course.asked
                    self._moved.notify_all()


def number_of(version: str | float | None) -> int:
    """The number that counts in a version of any saver."""
    return int(str(version).partition(".")[0]) if version is not None else 0


def _newest(versions: Mapping[str, Any]) -> str:
    return max((v for v in versions.values() if isinstance(v, str)), default="")


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
