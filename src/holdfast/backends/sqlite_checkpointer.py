"""Writing the log back into the main file, in a thread of its own.

Saves go on meanwhile. They wait for the last, short pass alone, which takes about as long as two
commits: without it the log would not be begun anew.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

import apsw

from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


_PAGES = 1_000
"""From so many pages in the log on, it is written back;"""
_TOO_MANY = 16_000
"""and from so many on by the writer itself, should the thread not keep up."""
_TRIES = 5


class Checkpointer:
    """Started when it is first needed."""

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connect, self._alone = connect, alone
        self.reset()

    def reset(self) -> None:
        """Also in a forked child, where the thread is not."""
        self.lock = threading.Lock()
        """Held while it works, and by whoever must not be disturbed."""
        # Not an Event: its lock is Python's, and one who is interrupted in there leaves it locked.
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def after_commit(self, connection: apsw.Connection, _: str, pages: int) -> int:
        """SQLite calls this after every commit, which is done: so nothing may be raised here."""
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
                    # An interrupt while one was started may have led to another one, which waits.
                    self._wanted.put(None)
                    return
                try:
                    connection = self._connect()
                    try:
                        self._write_back(connection)
                    finally:
                        connection.close()
                except apsw.BusyError:
                    continue  # somebody else is at it
                except Exception as e:  # noqa: BLE001 - nothing is lost; the next commit asks again
                    logger.warning("the log could not be written back: %s", e)

    def _write_back(self, connection: apsw.Connection) -> None:
        """Most of the log beside the savers, and the rest while those of this process wait.

        Only a log that is all written back is begun anew. One that grows instead makes every
        commit slower: its new size, too, has to be on the disk.
        """
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        with self._alone():
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def empty(self) -> None:
        """Write the whole log back and cut it, unless somebody is in the way: the file shrinks."""
        with self.lock:
            for _ in range(_TRIES):
                connection = self._connect()
                try:
                    connection.set_busy_timeout(0)  # whoever reads or writes is not kept waiting
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                    return
                except apsw.BusyError:
                    time.sleep(0.01)
                finally:
                    connection.close()

    def stop(self) -> None:
        """Wait for what it does, and end it."""
        self._stopped = True
        self._wanted.put(None)
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()
