"""Group commit: changes of many threads, written together in one transaction.

If no thread is writing, a thread writes its change at once. Otherwise it waits. When the writer is
done, the first waiting thread becomes the leader and writes the changes of all waiting threads, so
they share one wait for the disk.
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
"""Seconds after which a waiting thread checks that the leader still exists."""


class Member(Generic[_T]):
    """A change that waits to be written, and its outcome."""

    __slots__ = ("change", "done", "error", "wake")

    def __init__(self, change: _T) -> None:
        self.change = change
        self.done = False
        self.error: BaseException | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def call(self) -> None:
        """Wake the thread: its change is written, or it shall lead."""
        with suppress(RuntimeError):  # it was woken before
            self.wake.release()

    def finish(self, error: BaseException | None = None) -> None:
        """Note that the change is written, or why not. This does not wake the thread."""
        self.error, self.done = error, True


def finish_all(members: list[Member[_T]], outcomes: list[BaseException | None]) -> None:
    """Finish each member with its outcome."""
    for member, outcome in zip(members, outcomes, strict=True):
        member.finish(outcome)


class Group(Generic[_T]):
    """Threads that commit together.

    `write` writes the changes of several members and finishes each. `write_one` is the short path
    for a single change.

    An exception can occur anywhere (Ctrl-C in the main thread). So the lock is only taken by
    `with`, which always releases it, and waiting threads check from time to time that a leader
    exists. The leader entry only shows others that they should wait. If two threads take it at
    once, the lock still makes them write one after the other.
    """

    def __init__(
        self,
        write: Callable[[list[Member[_T]]], None],
        write_one: Callable[[_T], None] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        """Held during every write."""
        self._write, self._write_one = write, write_one
        self._leader: dict[None, object] = {}
        """The leader of the group: empty, or one entry. A thread that finds an entry joins the
        queue of members, where the leader finds its change, instead of waiting for the lock."""
        self._alone = False
        """Whether the last writer was the only one. Then the next one tries the short path."""
        self._waiting: deque[Member[_T]] = deque()

    def wake(self) -> None:
        """Wake the first waiting thread."""
        with suppress(IndexError):
            self._waiting[0].call()

    def join(self, change: _T) -> None:
        """Write a change, or wait until another thread has written it.

        Raises the error of this change. If this thread is interrupted, it leaves the queue, and a
        write of its change that is in progress finishes before the exception is raised.
        """
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
                        self._step_back(leader)  # the leader was interrupted
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove(member)
            self.wake()  # we may have been woken to lead
            with self.lock:  # a leader that writes for us must finish before we raise
                raise
        if member.error is not None:
            raise member.error

    def _lead(self, member: Member[_T]) -> bool:
        """Write the changes of all waiting threads. Return False if another thread leads."""
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
                if not other.done:  # we were interrupted: it waits again
                    self._waiting.append(other)
            self._step_back(member)
            for other in batch[1:]:
                other.call()
        return True

    def _step_back(self, leader: object) -> None:
        """Remove the leader entry, if it is `leader`, and wake the next thread."""
        if leader is not None and self._leader.get(None) is leader:
            self._leader.pop(None, None)
            if self._waiting:
                self.wake()

    def reset(self) -> None:
        """Forget all members in a forked child, where the waiting threads do not exist."""
        self._waiting.clear()
        self._leader.clear()
        self.lock = threading.Lock()
