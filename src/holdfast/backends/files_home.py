"""A store's folder: its locks, its logs and hints, and what of them is durable."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.backends import disk
from holdfast.backends.files_catalog import LOCK, Catalog
from holdfast.backends.files_hints import ALWAYS, hint
from holdfast.backends.files_ledger import DAMAGED_HEAD, HEAD
from holdfast.backends.files_streams import Streams
from holdfast.backends.files_turns import Turns
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.backends.base import Change
    from holdfast.backends.files_ledger import Ledger

SESSIONS, VERSION, LOCKS, SOFT = "sessions", "version", "locks", "soft"
_PATIENCE = 2.0
"""Seconds that removing files waits for readers."""


@dataclass
class Refuse:
    """Data that gc has found to be needed by nobody, until it can be removed."""

    items: dict[int, list[Any]] = field(default_factory=dict)
    """By stream: rows that go together, and others in their place."""
    blobs: list[tuple[bytes, int]] = field(default_factory=list)
    copied: int = 0
    """`Turnover.copied` when that was found."""


class Home:
    """A store's folder: who may write what, and how."""

    def __init__(
        self, root: Path, *, durable: bool, timeout: float, read_only: bool = False
    ) -> None:
        self.root, self.durable, self.timeout = root, durable, timeout
        self.read_only = read_only
        self.until = ALWAYS if durable else clock.boot_id() or "unknown"
        """For how long hints hold."""
        self.catalog = Catalog(root / SESSIONS, root / LOCKS / "turns")
        self.streams = Streams()
        self.refuse = Refuse()
        self.turns = Turns(root / LOCKS, timeout)
        self._settled: dict[Path, int] = {}
        """Names that were synced, and of which file."""
        self.journals: dict[Path, tuple[int, int, int]] = {}
        """Inode, size and last number of journals that were written to."""
        self.reset_lock()

    def reset_lock(self) -> None:
        self._local = threading.local()
        self.catalog.reset_lock()
        self.streams.reset_lock()

    def settle(self, path: Path) -> None:
        """Make a name durable, once: who gave it to a file may have been killed before it was."""
        if self.durable and self._settled.get(path) != (inode := os.stat(path).st_ino):
            disk.sync(path.parent)
            self._settled[path] = inode

    def unsettle(self, path: Path) -> None:
        """Somebody else has written there, who may have been killed."""
        self._settled.pop(path, None)

    def rest_on(self, ledger: Ledger) -> None:
        """Make the log durable that we go on from, once: who wrote it may have been killed.

        First: else what comes after might be there, and it not, as if somebody had removed it.
        """
        if self.durable and ledger.inode and self._settled.get(ledger.log) != ledger.inode:
            disk.sync(ledger.log)
            self.settle(ledger.log)

    def harden(self, folder: Path) -> None:
        """Before a line that is to last: sync what others did not, who do without; or say so.

        For who has the lock of a session. The mark need not last: neither does what it is for.
        """
        mark = f"{folder}/{SOFT}"
        if not self.durable:
            os.close(disk.open_to_write(mark, os.O_CREAT))
        elif os.path.lexists(mark):
            os.sync()
            with suppress(FileNotFoundError):  # others who build on this session did the same
                os.unlink(mark)

    def current(self, session: int) -> Ledger | None:
        """What the log of a session says; for who has its lock, or does without."""
        ledger = self.catalog.ledger(session)
        if ledger is not None and not ledger.is_current():
            self.catalog.forget(ledger.folder)
            ledger = self.catalog.ledger(session)
        return ledger

    # -- locks ---------------------------------------------------------------------------------
    # Always in this order: readers, turning, names, sessions by number, blobs.

    def _locked(
        self, path: Path | str, timeout: float, *, shared: bool = False
    ) -> AbstractContextManager[None]:
        if self.read_only:
            return disk.locked_if_possible(path, timeout, shared=shared)
        return disk.locked(path, timeout, shared=shared)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Until this ends no file goes that was there. Who waits to remove some comes first."""
        with ExitStack() as stack:
            nested = getattr(self._local, "reading", 0)
            if not nested:
                with self._locked(self.root / LOCKS / "turn", self.timeout, shared=True):
                    lock = self.root / LOCKS / "readers"
                    stack.enter_context(self._locked(lock, self.timeout, shared=True))
            self._local.reading = nested + 1
            try:
                yield
            finally:
                self._local.reading = nested

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody reads; Unavailable if somebody goes on reading."""
        with (
            self._locked(self.root / LOCKS / "turn", _PATIENCE),
            self._locked(self.root / LOCKS / "readers", _PATIENCE),
        ):
            yield

    @contextmanager
    def names(self) -> Iterator[None]:
        """Nobody else makes, renames or removes a session."""
        with self._locked(self.root / LOCKS / "names", self.timeout):
            yield

    @contextmanager
    def blobs(self, *, shared: bool) -> Iterator[None]:
        """Shared, no blob goes; otherwise nobody comes to need one."""
        with self._locked(self.root / LOCKS / "blobs", self.timeout, shared=shared):
            yield

    @contextmanager
    def sessions(self, own: Iterable[int], others: Iterable[int] = ()) -> Iterator[None]:
        """Nobody else writes to our sessions; nothing is written to the others."""
        with ExitStack() as stack:
            self.lock_sessions(stack, set(own), set(others))
            yield

    def lock_sessions(self, stack: ExitStack, own: set[int], others: set[int]) -> None:
        for number in sorted(own | others):
            folder = self.catalog.folder(number)
            if folder is not None:
                lock, shared = f"{folder.path}/{LOCK}", number not in own
                try:
                    stack.enter_context(self._locked(lock, self.timeout, shared=shared))
                except FileNotFoundError:  # gc has removed it
                    self.catalog.refresh(force=True)

    # -- the log -------------------------------------------------------------------------------

    def log(
        self, ledger: Ledger, entry: dict[str, Any], line: bytes, change: Change | None = None
    ) -> None:
        """Add a line to the log: the commit."""
        path = ledger.log
        self.harden(ledger.folder)
        if not ledger.inode:
            self.unsettle(path)
        handle = disk.open_to_write(path, os.O_CREAT)
        try:
            found = os.fstat(handle)
            at = ledger.size
            if found.st_size > at and ledger.head == DAMAGED_HEAD:
                at, line = found.st_size, b"\n" + line  # what is damaged there stays
            elif found.st_size > at:
                os.ftruncate(handle, at)  # torn, and so nobody's
            self.add(path, handle, line, at)
        finally:
            os.close(handle)
        self.tell(self.catalog.advance(ledger, entry, line, found.st_ino, at, change))

    def add(self, path: Path, handle: int, lines: bytes, at: int) -> None:
        """Write the end of a file, durably, or leave it as it was."""
        try:
            disk.write_all(handle, lines, at)
            if self.durable:
                disk.sync_handle(handle)
                self.settle(path)
        except BaseException:
            self._take_back(path, handle, at)
            raise

    def _take_back(self, path: Path, handle: int, size: int) -> None:
        """After a failure the line must not count: as a new file, so that readers notice.

        Always synced, like all that takes the place of what others may have synced.
        """
        self.catalog.forget(path.parent)
        try:
            os.ftruncate(handle, size)
        finally:
            disk.replace(path, disk.read_all(handle, size, 0))

    def tell(self, ledger: Ledger | None = None) -> None:
        """Hints, not synced: how long the log is, and for watchers that something has happened."""
        self.hint(f"{self.root}/{VERSION}", os.urandom(12))
        if ledger is not None:
            self.hint(f"{ledger.folder}/{HEAD}", hint(ledger.entries, self.until))

    def hint(self, path: str, text: bytes) -> None:
        """A file that is not synced, and may be missing."""
        try:
            handle = disk.open_to_write(path, os.O_CREAT)
            try:
                os.pwrite(handle, text, 0)
            finally:
                os.close(handle)
        except OSError as e:  # the commit is made, and must not be told to have failed
            logger.warning("%s was not written: %s", path, e)
