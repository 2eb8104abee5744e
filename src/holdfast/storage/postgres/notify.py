"""Wake watchers through LISTEN and NOTIFY.

A notification is only a hint to look; a watcher that misses one looks a little later. NOTIFY inside
a save's transaction would make all commits of the server wait for one lock. So a thread sends it
after the commit, once for all saves of a moment.
"""

from __future__ import annotations

import threading
import time
from hashlib import sha256
from typing import TYPE_CHECKING

import psycopg

from holdfast.log import logger

if TYPE_CHECKING:
    from holdfast.storage.postgres.connection import Link, Target
    from holdfast.storage.postgres.pool import Connections


_PAUSE = 0.02
"""Seconds between two notifications."""
_QUIET = 1.0
"""Seconds until the next check for listeners, if there was none."""
_STABLE = 5.0
"""A listener whose connection lasted this many seconds connects again at once."""
_LONGEST_PAUSE = 5.0
"""Most seconds between two attempts of a listener that cannot connect."""
_TICK = 0.2
"""Seconds until a listening thread notices that it should stop."""


def channel(schema: str) -> str:
    """Return a channel name that is a plain identifier for any name of the schema."""
    return f"holdfast_{sha256(schema.encode()).hexdigest()[:16]}"


def _badge(schema: str) -> tuple[int, int]:
    """Return the key of the advisory lock that all listeners share."""
    return 0x484F4C44, int.from_bytes(sha256(schema.encode()).digest()[:3])


_LISTENED = """SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_locks WHERE locktype = 'advisory'
AND classid = %s::oid AND objid = %s::oid AND objsubid = 2 AND granted)"""


class Notifier:
    """Notifies watchers of commits. Its thread starts with the first commit."""

    def __init__(self, connections: Connections, target: Target) -> None:
        self._connections, self._target = connections, target
        # It writes nothing, so there is nothing to wait for the disk for.
        self._sql = (
            f"BEGIN; SET LOCAL synchronous_commit = off; NOTIFY {channel(target.schema)}; COMMIT"
        )
        self.reset()

    def reset(self) -> None:
        """Start from scratch. A forked child calls this, because it has no thread."""
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def poke(self) -> None:
        """Announce a commit. Never raises, because the commit is done."""
        if self._thread is None:
            try:
                self._start()
            except RuntimeError as e:  # the interpreter ends, or has too many threads
                logger.debug("cannot notify watchers of commits: %s", e)
        self._news.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopped.is_set():
                thread = threading.Thread(target=self._run, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            self._news.wait()
            if self._stopped.is_set():
                return
            self._news.clear()
            try:
                listened = self._notify()
            except Exception as e:  # noqa: BLE001 - watchers also look without notifications
                listened = False
                if not self._stopped.is_set():
                    logger.debug("could not notify watchers of a commit: %s", e)
            # Commits of this pause leave their mark in `_news`: the next round announces them.
            self._stopped.wait(_PAUSE if listened else _QUIET)

    def _notify(self) -> bool:
        """Notify the listeners. Returns whether there are any."""
        with self._connections.side.lend(time.monotonic() + min(5.0, self._target.timeout)) as link:
            if link.execute(_LISTENED, _badge(self._target.schema)).fetchone() != (True,):
                return False
            link.execute(self._sql)
            return True

    def stop(self) -> None:
        with self._starting:
            self._stopped.set()
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class Listener:
    """Waits for notifications. Its thread starts with the first call of `wait()`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.reset()

    def reset(self) -> None:
        """Start from scratch. A forked child calls this, because it has no thread."""
        self._changed = threading.Condition()
        self._heard = 0
        self._seen: dict[int, int] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or once there was news since this thread's last call.

        The first call of a thread returns at once: the news may have come before it.
        """
        thread = threading.get_ident()
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            seen = self._seen.get(thread)
            self._changed.wait_for(lambda: self._stopped or self._heard != seen, seconds)
            self._seen[thread] = self._heard

    def _run(self) -> None:
        pause = _TICK
        while not self._stopped:
            began = time.monotonic()
            try:
                self._attempt()
            except psycopg.Error as e:
                logger.debug("cannot listen for news: %s", self._target.plain(e))
            # A standby accepts connections but refuses LISTEN. Its watchers poll.
            lasted = time.monotonic() - began
            pause = _TICK if lasted > _STABLE else min(2 * pause, _LONGEST_PAUSE)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, pause)

    def _attempt(self) -> None:
        link = self._target.connect()
        try:
            self._listen(link)
        finally:
            link.close()

    def _listen(self, link: Link) -> None:
        link.execute(f"LISTEN {channel(self._target.schema)}")
        link.execute("SELECT pg_advisory_lock_shared(%s, %s)", _badge(self._target.schema))
        link.patience = None
        self._ring()  # there may have been commits before the LISTEN
        while not self._stopped:
            for _ in link.notifies(timeout=_TICK, stop_after=1):
                self._ring()

    def _ring(self) -> None:
        with self._changed:
            self._heard += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
