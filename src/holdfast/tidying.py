"""A store's own retention: sessions are pruned as they are saved to, and what goes is freed.

What to do is told by what is in the store, not by counters of this process, which may live for a
single save. A save pays for the pruning of its own session; gc reads the whole store, so it runs
in a thread, and only once there is enough to free to be worth it.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

from holdfast.collect import collect
from holdfast.logs import logger
from holdfast.retention import Retention

if TYPE_CHECKING:
    from holdfast.session import Session
    from holdfast.store import Store


_SLACK = 16
"""At least so many saves of a session go by before it is pruned again,"""
_SHARE = 8
"""or this part of what was kept of it: pruning reads all of that."""
_ENOUGH = 256
_PART = 4
"""So many deleted checkpoints, and this part of those that live, are worth a run of gc."""
_EXPIRY = 3600.0
"""So often, in seconds, sessions that have expired are looked for."""


class Tidier:
    """Whatever fails here is logged, and fails no save."""

    def __init__(self, store: Store, rule: Retention) -> None:
        self._store, self.rule = store, rule
        self._left = 0
        """Deleted checkpoints that the last run of gc has left alone,"""
        self._living: int | None = None
        """and how many others there were."""
        self._look_at = time.monotonic() + random.choice([0.0] + [_EXPIRY] * (_SLACK - 1))
        """When to look for expired sessions next; at once in a few of many short processes."""
        self.reset_lock()

    def reset_lock(self) -> None:
        """Also in a forked child, where the thread is not."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def after_save(self, session: Session, seq: int) -> None:
        due = session.tidy_at
        if seq % _SLACK if due is None else seq < due:
            return
        session.tidy_at = seq + _SLACK  # should it fail
        try:
            kept = session.clean_up(self.rule).kept
            session.tidy_at = seq + max(_SLACK, len(kept) // _SHARE)
            if self._is_worth_it():
                self._start()
        except Exception:  # noqa: BLE001 - whatever it is: the save is done
            logger.exception("cleaning up after a save of session %r failed", session.name)

    def _is_worth_it(self) -> bool:
        now = time.monotonic()
        if self.rule.session_ttl is not None and now >= self._look_at:
            self._look_at = now + _EXPIRY
            return True
        with self._store.backend.reader() as reader:
            buried = reader.count_buried() - self._left
            if buried < _ENOUGH:
                return False
            if self._living is None:
                self._living = reader.count_checkpoints() - buried
        return buried >= self._living // _PART

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._collect, name="holdfast gc", daemon=True)
                thread.start()
                self._thread = thread

    def _collect(self) -> None:
        try:
            if self.rule.session_ttl is not None:
                self._store.prune(Retention(session_ttl=self.rule.session_ttl))
            collect(self._store.backend)
        except Exception:  # noqa: BLE001 - there is nobody to raise it to
            logger.exception("freeing what was deleted failed")
        try:
            with self._store.backend.reader() as reader:
                self._left = reader.count_buried()
                self._living = reader.count_checkpoints() - self._left
        except Exception:  # noqa: BLE001 - it may be closed; nothing depends on it
            logger.debug("what gc has left was not counted", exc_info=True)

    def wait(self) -> None:
        """Until nothing is being freed."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
