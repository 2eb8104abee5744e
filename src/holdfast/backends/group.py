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


def finish_all(members: list[Member], outcomes: list[BaseException | None]) -> None:
    for member, outcome in zip(members, outcomes, strict=True):
        member.finish(outcome)


class Group:
    """`write` writes the changes of several members, and finishes each of them."""

    def __init__(self, write: Callable[[list[Member]], None]) -> None:
        self.lock = threading.Lock()
        """Whoever holds it writes. Who does not get it at once joins those who wait."""
        self._write = write
        self._waiting: deque[Member] = deque()

    def release(self) -> None:
        """Let go of the lock, and let the first who waits go on."""
        self.lock.release()
        if self._waiting:  # asked only now: who comes to wait after this finds the lock free
            with suppress(IndexError):
                self._waiting.popleft().wake.release()

    def join(self, change: Change) -> None:
        """Wait until the change is written, by another or by ourselves."""
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
            self._write(batch)
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
