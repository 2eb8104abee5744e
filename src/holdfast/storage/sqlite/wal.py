"""Write the log back into the main file, in a thread.

Saves continue at the same time. They wait only for the last, short pass, which takes about as long
as two commits. Without that pass, SQLite would not restart the log from its beginning.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import apsw

from holdfast.log import logger
from holdfast.storage.sqlite.erase import FIRST, Pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


_T = TypeVar("_T")

_PAGES = 1_000
"""Pages in the log from which on the thread writes it back."""
_TOO_MANY = 16_000
"""Pages in the log from which on the writer writes it back, because the thread is too slow."""
_TRIES = 5
_PAGE = 4096
_WAL_HEADER, _FRAME_HEADER = 32, 24  # bytes, of the log and of each page in it
_PAUSE = 0.01
_GROUPS = 8
"""Groups of pages (about 3 MB each) that are scrubbed under one lock."""


class Checkpointer:
    """Writes the log back. The thread starts at the first need."""

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connect, self._alone = connect, alone
        self.pending = 0
        """Bytes in the log that may have to be written back."""
        self.reset()

    def reset(self) -> None:
        """Start from scratch. A forked child calls this, because it has no thread."""
        self.lock = threading.Lock()
        """Held while the log is written back, and by tasks during which that must not happen."""
        # Not an Event: if a thread is interrupted inside of it, its lock stays locked.
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def after_commit(self, connection: apsw.Connection, _: str, pages: int) -> int:
        """Handle a commit.

        SQLite calls this after each one, so it must not raise: the commit is done.
        """
        self.pending = pages * _PAGE
        if pages >= _PAGES:
            try:
                self._ask(connection, pages)
            except Exception as e:  # noqa: BLE001 - nothing is lost; the next commit asks again
                logger.warning("the log could not be written back: %s", e)
        return apsw.SQLITE_OK

    def _ask(self, connection: apsw.Connection, pages: int) -> None:
        if pages >= _TOO_MANY:
            with suppress(apsw.BusyError):
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif self._wanted.empty():
            if self._thread is None or not self._thread.is_alive():
                name = "holdfast checkpointer"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._wanted.put(None)

    def _run(self) -> None:
        while True:
            self._wanted.get()
            with self.lock:
                if self._stopped:
                    # An interrupt during a start may have led to a second thread, which waits.
                    self._wanted.put(None)
                    return
                try:
                    connection = self._connect()
                    try:
                        self._write_back(connection)
                    finally:
                        connection.close()
                except apsw.BusyError:
                    continue  # another process is writing it back
                except Exception as e:  # noqa: BLE001 - nothing is lost; the next commit asks again
                    logger.warning("the log could not be written back: %s", e)

    def write_back(self) -> None:
        with self.lock, closing(self._connect()) as connection:
            self._write_back(connection)

    def _write_back(self, connection: apsw.Connection) -> None:
        """Write back most of the log while others save, and the rest while this process does not.

        SQLite restarts the log from its beginning only after all of it is written back. A log that
        grows instead makes each commit slower, because its new size has to be on the disk, too.
        """
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        with self._alone():
            log, written_back = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self.pending = (log - written_back) * _PAGE

    def scrub(self, tries: int = _TRIES) -> bool:
        """Overwrite the copies of deleted rows in all pages, and empty the log.

        It takes a few pages at a time, so that saves wait only briefly. Returns False if another
        reader or writer kept it from doing all of it.
        """
        groups: list[int] | None = [FIRST]
        while groups:
            groups = self._patiently(partial(self._scrub, groups[0]), tries)
        return groups is not None and self._patiently(self._empty, tries) is not None

    def _patiently(self, step: Callable[[], _T | None], tries: int) -> _T | None:
        """Try a step until it returns something. The process may fork between two tries."""
        for _ in range(tries):
            with self.lock:
                done = step()
            if done is not None:
                return done
            time.sleep(_PAUSE)
        return None

    def _empty(self) -> bool | None:
        """Write the whole log back and cut it. Returns None if others read or write."""
        with closing(self._connect()) as connection, suppress(apsw.BusyError):
            connection.set_busy_timeout(0)  # readers and writers need not wait for this
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self.pending = 0
            return True
        return None

    def cut(self) -> None:
        """Cut off the pages that a failed commit has left behind the end of the log."""
        with self.lock, self._alone(), ExitStack() as stack:
            connection, other = [stack.enter_context(closing(self._connect())) for _ in range(2)]
            connection.execute("BEGIN IMMEDIATE")  # so that the end of the log does not move
            frames, _ = other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            end = _WAL_HEADER + frames * (_FRAME_HEADER + connection.pragma("page_size"))
            flags = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE
            log = apsw.VFSFile("", connection.filename_wal, [flags, 0])
            stack.callback(log.xClose)
            if log.xFileSize() > end:
                log.xTruncate(end)

    def _scrub(self, first: int) -> list[int] | None:
        """Scrub some groups of pages. Returns the groups that are left; None as `_empty` does."""
        with self._alone(), closing(self._connect()) as connection:
            if not self._empty():
                return None
            connection.execute("PRAGMA synchronous = NORMAL")  # these are no user's commits
            connection.execute("BEGIN IMMEDIATE")
            if os.path.getsize(connection.filename_wal):
                return None  # another process has committed in between
            path, size = Path(connection.filename), connection.pragma("page_size")
            with closing(Pages(path, size)) as pages:
                groups = [*pages.groups(first)]
                changed = pages.scrub(groups[:_GROUPS])
            if changed:
                # Other connections cache pages. A commit makes them read the pages again.
                connection.execute("UPDATE counters SET body = body")
            connection.execute("COMMIT")
            return groups[_GROUPS:]

    def stop(self) -> None:
        """End the thread, after the work in progress."""
        self._stopped = True
        self._wanted.put(None)
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()
