"""Group commit: many threads, one writer.

Whoever finds nobody writing writes at once. Whoever does not waits; and when the writer is done,
the first of those who wait writes for all of them, in one transaction: one wait for the disk.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

_PATIENCE = 0.1
"""Seconds until somebody who waits looks whether there still is anybody to wait for."""


class Member(Generic[_T]):
    """A change that waits, and what became of it."""

    __slots__ = ("change", "done", "error", "wake")

    def __init__(self, change: _T) -> None:
        self.change = change
        self.done = False
        self.error: BaseException | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def call(self) -> None:
        """Its change is written, or it is its turn."""
        with suppress(RuntimeError):  # it was called before, and has gone
            self.wake.release()

    def finish(self, error: BaseException | None = None) -> None:
        self.error, self.done = error, True


def finish_all(members: list[Member[_T]], outcomes: list[BaseException | None]) -> None:
    for member, outcome in zip(members, outcomes, strict=True):
        member.finish(outcome)


class Group(Generic[_T]):
    """`write` writes the changes of several members, and finishes each of them; `write_one`, the
    short way, the change of one who is alone.

    An exception may strike anywhere (Ctrl-C in the main thread). So the lock is only ever taken by
    `with`, which leaves it in no case, and whoever waits for a sign looks around now and then. The
    leader's place only tells others where to wait: two who take it write one after the other.
    """

    def __init__(
        self,
        write: Callable[[list[Member[_T]]], None],
        write_one: Callable[[_T], None] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        """Held while anything is written."""
        self._write, self._write_one = write, write_one
        self._leader: dict[None, object] = {}
        """Who writes for the group: empty, or one. Nobody waits for the place itself: who finds it
        taken would only queue up there, where a leader does not find him."""
        self._alone = False
        """Whether the last one who wrote was the only one: then the next one may be, too."""
        self._waiting: deque[Member[_T]] = deque()

    def wake(self) -> None:
        """The turn is the first one's who waits."""
        with suppress(IndexError):
            self._waiting[0].call()

    def join(self, change: _T) -> None:
        """Wait until the change is written, by another or by ourselves."""
        short = self._write_one if self._alone else None
        if short is not None and not (self._waiting or self._leader or self.lock.locked()):
            try:
                if self._leader.setdefault(None, change) is change:
                    with self.lock:
                        short(change)
                    return
            finally:
                self._step_back(change)
        self._alone = False
        member = Member(change)
        try:
            self._waiting.append(member)
            while not member.done:
                if not self._lead(member):
                    leader = self._leader.get(None)
                    if not member.wake.acquire(timeout=_PATIENCE) and not self.lock.locked():
                        self._step_back(leader)  # nobody is there: it was interrupted
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove(member)
            self.wake()  # it may have been our turn
            with self.lock:  # who writes for us now is not to be done after we have told
                raise
        if member.error is not None:
            raise member.error

    def _lead(self, member: Member[_T]) -> bool:
        """Write for all that wait, unless another does that."""
        batch = [member]
        try:
            if self._leader.setdefault(None, member) is not member:
                return False
            with self.lock:
                if member.done:
                    return True
                while self._waiting:
                    other = self._waiting.popleft()
                    if other is not member:
                        batch.append(other)
                self._write(batch)
                self._alone = len(batch) == 1 and not self._waiting
        finally:
            for other in batch[1:]:
                if not other.done:  # we were interrupted; it may try by itself
                    self._waiting.append(other)
            self._step_back(member)
            for other in batch[1:]:
                other.call()
        return True

    def _step_back(self, leader: object) -> None:
        """Make place for the next one, if it was us who led."""
        if leader is not None and self._leader.get(None) is leader:
            self._leader.pop(None, None)
            if self._waiting:
                self.wake()

    def reset(self) -> None:
        """In a forked child: nobody waits."""
        self._waiting.clear()
        self._leader.clear()
        self.lock = threading.Lock()
