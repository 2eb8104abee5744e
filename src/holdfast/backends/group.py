"""Group commit: many threads, one writer.

Whoever finds nobody writing writes at once. Whoever does not waits; and when the writer is done,
the first of those who wait writes for all of them, in one transaction: one wait for the disk.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.backends.base import Change


class Member:
    """A change that waits, and what became of it."""

    __slots__ = ("change", "done", "error", "wake")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.done = False
        self.error: BaseException | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        self.error, self.done = error, True


class Group:
    """`one` writes a change; `many` writes several, and finishes each member."""

    def __init__(self, one: Callable[[Change], None], many: Callable[[list[Member]], None]) -> None:
        self.lock = threading.Lock()
        """Held while somebody writes; also by others who need the writer for themselves."""
        self._one, self._many = one, many
        self._waiting: deque[Member] = deque()

    def commit(self, change: Change) -> None:
        if self.lock.acquire(blocking=False):
            try:
                self._one(change)
            finally:
                self.release()
        else:
            self._join(change)

    def release(self) -> None:
        """Let go of the lock, and let the first who waits go on."""
        self.lock.release()
        # Only now: who comes to wait after this finds the lock free.
        with suppress(IndexError):
            self._waiting.popleft().wake.release()

    def _join(self, change: Change) -> None:
        member = Member(change)
        self._waiting.append(member)
        ours = self.lock.acquire(blocking=False)  # the writer may have left meanwhile
        if not ours:
            self._wait(member)
            if not member.done:
                ours = self.lock.acquire()
        if ours and member.done:
            self.release()
        elif ours:
            self._lead(member)
        if member.error is not None:
            raise member.error

    def _wait(self, member: Member) -> None:
        """Until it is done, or until it is our turn to write."""
        try:
            member.wake.acquire()
        except BaseException:
            try:
                self._waiting.remove(member)
            except ValueError:
                if self.lock.acquire(blocking=False):
                    self.release()  # it may have been our turn: pass it on
            raise

    def _lead(self, member: Member) -> None:
        batch = [member]
        try:
            while True:
                try:
                    other = self._waiting.popleft()
                except IndexError:
                    break
                if other is not member:
                    batch.append(other)
            self._many(batch)
        finally:
            for other in batch[1:]:
                if not other.done:  # we were interrupted; it may try by itself
                    self._waiting.append(other)
                else:
                    other.wake.release()
            self.release()

    def reset(self) -> None:
        """In a forked child: nobody waits."""
        self._waiting.clear()
        self.lock = threading.Lock()
