"""Waking those who watch, through LISTEN and NOTIFY.

Only a hint that it may pay to look; whoever misses it looks a little later. NOTIFY inside a save's
transaction would make all commits of the server wait for one lock, so it comes after, in a thread
of its own, once for all saves of a moment.
"""

from __future__ import annotations

import threading
import time
from hashlib import sha256
from typing import TYPE_CHECKING

import psycopg

from holdfast.logs import logger

if TYPE_CHECKING:
    from holdfast.backends.postgres_link import Link, Target
    from holdfast.backends.postgres_pool import Connections


_PAUSE = 0.02
"""Seconds between two notifications."""
_QUIET = 1.0
"""Seconds in which nobody is told anything, because nobody listens."""
_LASTING, _SELDOM = 5.0, 5.0
"""Who was cut off after so many seconds listens again soon; who never could, so seldom."""
_TICK = 0.2
"""Seconds in which a thread notices that it is not wanted any more."""


def channel(schema: str) -> str:
    """A plain identifier, whatever the schema's name."""
    return f"holdfast_{sha256(schema.encode()).hexdigest()[:16]}"


def _badge(schema: str) -> tuple[int, int]:
    """Who listens holds this advisory lock, together with all others who do."""
    return 0x484F4C44, int.from_bytes(sha256(schema.encode()).digest()[:3])


_LISTENED = """SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_locks WHERE locktype = 'advisory'
AND classid = %s::oid AND objid = %s::oid AND objsubid = 2 AND granted)"""


class Notifier:
    """Tells others that something was committed. Its thread starts with the first commit."""

    def __init__(self, connections: Connections, target: Target) -> None:
        self._connections, self._target = connections, target
        # It writes nothing, so there is nothing to wait for the disk for.
        self._sql = (
            f"BEGIN; SET LOCAL synchronous_commit = off; NOTIFY {channel(target.schema)}; COMMIT"
        )
        self.reset()

    def reset(self) -> None:
        """Also in a forked child, where the thread is not."""
        self._news = threading.Event()
        self._quiet_until = 0.0
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def poke(self) -> None:
        """After a commit, which is done: so nothing may be raised here."""
        if time.monotonic() < self._quiet_until:
            return
        if self._thread is None:
            try:
                self._start()
            except RuntimeError as e:  # the interpreter ends, or has too many threads
                logger.debug("watchers are not told of commits: %s", e)
        self._news.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._run, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            self._news.wait()
            if self._stopped:
                return
            self._news.clear()
            try:
                listened = self._tell()
            except Exception as e:  # noqa: BLE001 - watchers look by themselves, too
                listened = False
                if not self._stopped:
                    logger.debug("watchers were not told of a commit: %s", e)
            if listened:
                time.sleep(_PAUSE)
            else:
                self._quiet_until = time.monotonic() + _QUIET

    def _tell(self) -> bool:
        """Notify those who listen, if anybody does."""
        with self._connections.side(time.monotonic() + min(5.0, self._target.timeout)) as link:
            if link.execute(_LISTENED, _badge(self._target.schema)).fetchone() != (True,):
                return False
            link.execute(self._sql)
            return True

    def stop(self) -> None:
        with self._starting:
            self._stopped = True
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class Listener:
    """Waits for what others tell. Its thread starts with the first who waits."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.reset()

    def reset(self) -> None:
        """Also in a forked child, where the thread is not."""
        self._changed = threading.Condition()
        self._heard = 0
        self._seen: dict[int, int] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None

    def wait(self, seconds: float) -> None:
        """Return when there was news since this thread's last call, or after so long."""
        thread = threading.get_ident()
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            seen = self._seen.get(thread, self._heard)
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
            # A standby takes connections, and lets nobody listen: who watches looks by himself.
            lasted = time.monotonic() - began
            pause = _TICK if lasted > _LASTING else min(2 * pause, _SELDOM)
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
        self._ring()  # what came before this was not heard
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
