"""The folder of a store of files: its counters, its locks, and the end of a commit."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.errors import Corrupt
from holdfast.format import portable
from holdfast.format.item_streams import STREAM_BITS
from holdfast.format.records import SEQ_BITS, SPACES, seal_counter, unseal_counter
from holdfast.log import logger
from holdfast.storage import fs
from holdfast.storage.files import row_json
from holdfast.storage.files.item_files import Streams
from holdfast.storage.files.log import ALWAYS, DAMAGED_HEAD, HEAD, hint
from holdfast.storage.files.session_folders import BLOBS, LOCK, Catalog, streams_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.storage.contract import Batch
    from holdfast.storage.files.log import NewLine, SessionLog
    from holdfast.storage.files.session_folders import Catalog


class Turns:
    """The turnover numbers.

    They are not synced: no process that uses them survives a power failure.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder, self._timeout = folder, timeout

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other gc and copies."""
        with fs.locked(self._folder / "turning", self._timeout):
            yield

    def read(self, space: str) -> bytes | None:
        """Return the row of a number; None if there was no gc or copy yet."""
        try:
            text = fs.read(self._folder / space)
        except FileNotFoundError:
            return None
        return seal_counter(space, int(text) if text.isdigit() and len(text) < 20 else -1)

    def write(self, space: str, body: bytes) -> None:
        """Set a number. The caller is alone."""
        fs.replace(self._folder / space, b"%d" % unseal_counter(space, body), durable=False)


COUNTERS = "counters.json"
_RESERVED = 10_000
"""More numbers than all processes together can have reserved without using them."""
_LIMITS = {"session": 1 << 62 - SEQ_BITS, "stream": 1 << 62 - STREAM_BITS}
"""No counter reaches this. Higher numbers come from damage, and must not stop all saves."""
_HINT = "repair() counts anew"


def read(root: Path) -> dict[str, int]:
    try:
        shown: Any = portable.loads(fs.read(root / COUNTERS))
        return {s: unseal_counter(s, row_json.hide_row(shown[s])) for s in SPACES}
    except FileNotFoundError as e:
        raise Corrupt(f"{root / COUNTERS} is missing", hint=_HINT) from e
    except row_json.MALFORMED as e:
        raise Corrupt(f"{root / COUNTERS} is damaged", hint=_HINT) from e


def beyond(catalog: Catalog, space: str, counted: int = 0) -> int:
    """Return the next free number. It is above the counter if an older file was restored.

    Existing higher numbers show that. Other processes may be about to use more of them.
    """
    if space == "session":
        found = catalog.numbers()
    else:
        folders = os.listdir(catalog.root)
        found = [n for name in folders for n in streams_in(f"{catalog.root}/{name}")]
    highest = max([n for n in found if n < _LIMITS[space]], default=0)
    return counted if counted > highest else highest + _RESERVED


def write(root: Path, counters: dict[str, int]) -> None:
    """Write the counters and sync them: a number must not be given twice."""
    shown = {space: row_json.show_row(seal_counter(space, n)) for space, n in counters.items()}
    fs.replace(root / COUNTERS, portable.dumps(shown) + b"\n")


SESSIONS, VERSION, LOCKS, SOFT = "sessions", "version", "locks", "soft"
_COMMIT = 64 << 10
"""Bytes that a commit writes in addition to its data: a few blocks of each file."""
_PATIENCE = 2.0
"""The most seconds that the removal of files waits for readers."""


@dataclass
class Garbage:
    """Data that gc removes, until it can be removed."""

    first: Batch | None = None
    """It is written before. If it is refused, nothing is removed."""
    rest: list[Batch] = field(default_factory=list)
    """A batch for each group of rows, and each blob."""


class StoreFolder:
    """The folder of a store, with its locks."""

    def __init__(
        self, root: Path, *, durable: bool, timeout: float, read_only: bool = False
    ) -> None:
        self.root, self.durable, self.timeout = root, durable, timeout
        self.read_only = read_only
        self.until = ALWAYS if durable else clock.boot_id() or "unknown"
        """The boot until whose end hints are valid."""
        self.catalog = Catalog(root / SESSIONS, root / LOCKS / "turns")
        self.streams = Streams()
        self.garbage = Garbage()
        self._room = fs.Room(root)
        self.turns = Turns(root / LOCKS, timeout)
        self._settled: dict[Path, int] = {}
        """The names that were synced, with the inode of each file."""
        self.journals: dict[Path, tuple[int, int, int]] = {}
        """Inode, size and last number of journals that were written to."""
        self.reset_lock()

    def reset_lock(self) -> None:
        self._local = threading.local()
        self.catalog.reset_lock()
        self.streams.reset_lock()

    def refuse_links(self) -> None:
        """Raise Corrupt if one of the folders that hold everything is a link."""
        for name in (SESSIONS, BLOBS, LOCKS):
            fs.refuse_link(f"{self.root}/{name}")

    def links(self) -> Iterator[Corrupt]:
        """Yield an error for each link in the store, from the names of all files."""
        for name in (SESSIONS, BLOBS, LOCKS, COUNTERS, VERSION):
            for path in fs.links(f"{self.root}/{name}"):
                yield fs.linked(path)

    def check_room(self, size: int) -> None:
        """Refuse a save that would use the space which gc needs."""
        if not self._room.has(2 * size + _COMMIT):  # text is longer than the row
            what = "the remaining space is kept for delete, prune and gc"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {what}")

    def fsync_name(self, path: Path) -> None:
        """Sync the name of a file, once. A process may have been killed before it did so."""
        if self.durable and self._settled.get(path) != (inode := os.stat(path).st_ino):
            fs.sync(path.parent)
            self._settled[path] = inode

    def forget_name(self, path: Path) -> None:
        """Forget that a name was synced: another process, maybe killed, has written there."""
        self._settled.pop(path, None)

    def fsync_log(self, ledger: SessionLog) -> None:
        """Sync the log that the next commit builds on, once. Its writer may have been killed.

        This comes first. Otherwise the next line might survive a crash and this one not, as if it
        had been removed.
        """
        if self.durable and ledger.inode and self._settled.get(ledger.log) != ledger.inode:
            fs.sync(ledger.log)
            self.fsync_name(ledger.log)

    def fsync_unsynced(self, folder: Path) -> None:
        """Sync what processes without fsync have written, before a durable line; or mark it.

        The mark is a file in the session's folder, written by a process without fsync. The caller
        has the lock of the session. The mark need not survive a crash, because unsynced data does
        not either.
        """
        mark = f"{folder}/{SOFT}"
        if not self.durable:
            os.close(fs.open_to_write(mark, os.O_CREAT))
        elif os.path.lexists(mark):
            os.sync()
            with suppress(FileNotFoundError):  # others who build on this session did the same
                os.unlink(mark)

    def current(self, session: int) -> SessionLog | None:
        """Return the log of a session. The caller has its lock, or needs none."""
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
            return fs.locked_if_possible(path, timeout, shared=shared)
        return fs.locked(path, timeout, shared=shared)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep all existing files until this ends.

        A process that waits to remove files goes first.
        """
        with ExitStack() as stack:
            nested = getattr(self._local, "reading", 0)
            if not nested:
                self.refuse_links()
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
        """Exclude all readers. Raise Unavailable if a reader does not end."""
        with (
            self._locked(self.root / LOCKS / "turn", _PATIENCE),
            self._locked(self.root / LOCKS / "readers", _PATIENCE),
        ):
            yield

    @contextmanager
    def names(self) -> Iterator[None]:
        """Exclude others from creating, renaming and removing sessions."""
        with self._locked(self.root / LOCKS / "names", self.timeout):
            yield

    @contextmanager
    def blobs(self, *, shared: bool) -> Iterator[None]:
        """Lock the blobs.

        While it is shared, none is removed; otherwise no commit refers to a new one.
        """
        with self._locked(self.root / LOCKS / "blobs", self.timeout, shared=shared):
            yield

    @contextmanager
    def sessions(self, own: Iterable[int], others: Iterable[int] = ()) -> Iterator[None]:
        """Lock `ours` for writing; no process writes to the others until then."""
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

    def log(self, ledger: SessionLog, line: NewLine) -> None:
        """Add a line to the log: the commit."""
        path = ledger.log
        self.fsync_unsynced(ledger.folder)
        if not ledger.inode:
            self.forget_name(path)
        handle = fs.open_to_write(path, os.O_CREAT)
        try:
            found = os.fstat(handle)
            at, text = ledger.size, line.text
            if found.st_size > at and ledger.head == DAMAGED_HEAD:
                at, text = found.st_size, b"\n" + text  # the damaged bytes stay
            elif found.st_size > at:
                os.ftruncate(handle, at)  # torn, so not committed
            self.add(path, handle, text, at)
        finally:
            os.close(handle)
        self.tell(self.catalog.advance(ledger, line, found.st_ino, at + len(text)))

    def add(self, path: Path, handle: int, lines: bytes, at: int) -> None:
        """Write the end of a file durably, or leave the file as it was."""
        try:
            fs.write_all(handle, lines, at)
            if self.durable:
                fs.sync_handle(handle)
                self.fsync_name(path)
        except BaseException:
            self._take_back(path, handle, at)
            raise

    def _take_back(self, path: Path, handle: int, size: int) -> None:
        """Remove a line whose commit failed, with a new file, so that readers notice it.

        Always synced, because it replaces a file that others may have synced.
        """
        self.catalog.forget(path.parent)
        try:
            os.ftruncate(handle, size)
        finally:
            fs.replace(path, fs.read_all(handle, size, 0))

    def tell(self, ledger: SessionLog | None = None) -> None:
        """Write unsynced hints: the length of the log and, for watchers, that something changed."""
        self.hint(f"{self.root}/{VERSION}", os.urandom(12))
        if ledger is not None:
            self.hint(f"{ledger.folder}/{HEAD}", hint(ledger.entries, self.until))

    def hint(self, path: str, text: bytes) -> None:
        """Write a file that is not synced, and that may be missing."""
        try:
            handle = fs.open_to_write(path, os.O_CREAT)
            try:
                os.pwrite(handle, text, 0)
            finally:
                os.close(handle)
        except (OSError, Corrupt) as e:  # the commit is done and must not fail any more
            logger.warning("%s was not written: %s", path, e)
