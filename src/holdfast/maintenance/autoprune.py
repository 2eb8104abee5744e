"""Automatic pruning: a store with a retention rule prunes a session when the session is saved.

Decisions depend on the contents of the store, not on counters of this process, because a process
may live for a single save. A save prunes its own session, in the thread that saves. gc reads the
whole store, so it runs in a background thread, and only when there is enough to free.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.history import lineage
from holdfast.history.oplog import Operator
from holdfast.history.writer import Writer
from holdfast.log import logger
from holdfast.maintenance.gc import collect
from holdfast.maintenance.retention import Retention, prune, prune_store
from holdfast.storage.repository import Observer

if TYPE_CHECKING:
    from holdfast.maintenance.retention import Plan
    from holdfast.storage.repository import Repository


_SLACK = 16
"""Without `exact`, a session is pruned when its seq reaches a multiple of this number."""
_SHARE = 8
"""Large sessions are pruned less often, because pruning reads every checkpoint that is kept.

The interval is an 8th of the number of kept checkpoints, rounded down to a multiple of `_SLACK`,
and at least `_SLACK`.
"""
_ENOUGH = 256
"""gc runs only if at least this many deleted checkpoints can be freed."""
_PART = 4
"""gc runs only if there is at least one deleted checkpoint for this many live ones."""
_EXPIRY = 3600.0
"""Seconds between two searches for sessions older than `session_ttl`."""
_KNOWN = 10_000
"""The most sessions whose last prune is remembered in memory."""


class _Last(NamedTuple):
    """The last prune of a session by this process."""

    seq: int
    slack: int


class AutoPruner(Observer):
    """Prunes sessions after commits. Errors are logged; they never make a save fail."""

    def __init__(self, repository: Repository, rule: Retention) -> None:
        self._repository, self.rule = repository, rule
        self._last: dict[str, _Last] = {}
        self._left = 0
        """Number of deleted checkpoints that the last run of gc could not free yet."""
        self._living: int | None = None
        """Number of live checkpoints after the last run of gc; None if not counted yet."""
        self._look_at = time.monotonic() + random.choice([0.0] + [_EXPIRY] * (_SLACK - 1))
        """Time of the next search for expired sessions.

        One process in 16 searches at its first prune, so that short processes search as well.
        """
        self.reset_lock()

    def reset_lock(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def committed(self, session: str, checkpoint: Any) -> None:
        """Prune the session if that is due, and start gc if there is enough to free."""
        seq: int = checkpoint.seq
        if not self.rule.exact and not self._is_due(session, seq):
            return
        if len(self._last) >= _KNOWN:
            self._last.clear()
        self._last[session] = _Last(seq, _SLACK)  # kept if the prune fails
        try:
            kept = len(self.prune(session).kept)
            self._last[session] = _Last(seq, max(_SLACK, kept // _SHARE // _SLACK * _SLACK))
            if self._is_worth_it():
                self._start()
        except Exception:  # noqa: BLE001 - the save has succeeded, so nothing is raised
            logger.exception("pruning after a save of session %r failed", session)

    def prune(self, session: str) -> Plan:
        """Prune a session. undo() skips this operation."""
        operator = Operator(Writer(self._repository, session))
        return prune(operator, self.rule, logged=False)

    def _is_due(self, session: str, seq: int) -> bool:
        """Return whether a session has passed a multiple of its interval since the last prune.

        The seq counts the saves of all processes.
        """
        last, slack = self._last.get(session, (0, _SLACK))
        if seq <= last:  # another session has taken the name
            return seq % _SLACK == 0
        return seq // slack > last // slack

    def _is_worth_it(self) -> bool:
        """Return whether to run gc: sessions may have expired, or there is enough to free."""
        now = time.monotonic()
        if self.rule.session_ttl is not None and now >= self._look_at:
            self._look_at = now + _EXPIRY
            return True
        with self._repository.reader() as reader:
            deleted = reader.count_tombstones() - self._left
            if deleted < _ENOUGH:
                return False
            if self._living is None:
                self._living = reader.count_checkpoints() - deleted
        return deleted >= self._living // _PART

    def _start(self) -> None:
        """Start gc in a background thread, unless it is running."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._collect, name="holdfast gc", daemon=True)
                thread.start()
                self._thread = thread

    def _collect(self) -> None:
        try:
            if self.rule.session_ttl is not None:
                rule = Retention(session_ttl=self.rule.session_ttl)
                prune_store(self._repository, lineage.session_names(self._repository), rule)
            collect(self._repository.backend)
        except Exception:  # noqa: BLE001 - a background thread has no caller
            logger.exception("freeing what was deleted failed")
        try:
            with self._repository.reader() as reader:
                self._left = reader.count_tombstones()
                self._living = reader.count_checkpoints() - self._left
        except Exception:  # noqa: BLE001 - the store may be closed; the counts are optional
            logger.debug("what gc has left was not counted", exc_info=True)

    def close(self) -> None:
        """Wait for a running gc to finish."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
