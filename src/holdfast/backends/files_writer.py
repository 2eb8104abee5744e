"""Writing to a store of files: first what a commit refers to, then its line in the log."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from holdfast import clock, ids
from holdfast.backends import disk, files_journal, files_text
from holdfast.backends.base import Change, Gone, Moved, Notes
from holdfast.backends.files_catalog import CHECKPOINTS, LOCK, SESSION, Catalog
from holdfast.backends.files_hints import ALWAYS, hint
from holdfast.backends.files_identity import Identity
from holdfast.backends.files_ledger import (
    DAMAGED_HEAD,
    HEAD,
    LOG,
    STREAMS,
    Ledger,
    entry_of,
)
from holdfast.backends.files_reader import blob_path
from holdfast.backends.files_streams import Line, Streams, items_of, show_blob
from holdfast.backends.files_turns import Turns
from holdfast.codec import rows
from holdfast.codec.records import checkpoint_address
from holdfast.errors import HeadMoved, KeyTaken, SessionExists
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


SESSIONS, VERSION, LOCKS, SOFT = "sessions", "version", "locks", "soft"
_NOTES = Notes()
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


def commit(home: Home, change: Change) -> None:
    notes = change.notes or _NOTES
    session = change.session
    with ExitStack() as stack:
        if notes.copied is not None:
            stack.enter_context(home.turns.alone())
            home.turns.copying(notes.copied)
        if change.create is not None or notes.rename is not None:
            stack.enter_context(home.names())
            home.catalog.refresh(alone=True)
        if change.create is not None:
            _check_name(home, change.create[0])
            _make_folder(home, session, change.create, notes.origin)
        needed = {s for s, _ in notes.needs}
        home.lock_sessions(stack, {session}, needed)
        ledger = _checked(home, change, notes)
        if change.blobs or notes.shares:
            stack.enter_context(home.blobs(shared=True))
            _write_blobs(home, change, notes)
        for other in needed - {session}:
            _sync_log(home, other)
        if notes.rename is not None:
            _announce(home, ledger, notes.rename[0])
        # All is made before anything is synced: code runs slowly just after a wait for the disk.
        items, ends = _new_items(home, ledger, change)
        texts = _texts(ledger, change, notes)
        entry, line = ledger.line(entry_of(change, notes, ends))
        with disk.Batch(durable=home.durable) as batch:
            for path, end, lines in items:
                home.streams.append(path, end, lines, batch)
            for file, text in texts:
                batch.put(file, text)
        copied = notes.copied
        if copied is not None and copied.journal and not copied.journal_from:
            files_journal.copy(home, ledger, copied.journal)
        if notes.lease is not None:  # first, so that nobody takes the new lease for an old one
            files_journal.settle(home, ledger)
            files_journal.note(ledger, notes.lease[0])
        home.log(ledger, entry, line, change)
        if copied is not None and copied.journal_from:
            # Only now does the log tell that those in between are not missing.
            files_journal.copy(home, ledger, copied.journal)


def _texts(ledger: Ledger, change: Change, notes: Notes) -> list[tuple[str, bytes]]:
    """The files of new checkpoints, and what is to be in them."""
    new = [] if change.checkpoint is None else [change.checkpoint]
    if notes.copied is not None:
        new += notes.copied.checkpoints
    found = []
    for seq, id, row in new:
        address = checkpoint_address(change.session, seq, id)
        text = files_text.show_checkpoint(seq, id, files_text.plain(rows.CHECKPOINT, address, row))
        found.append((f"{ledger.folder}/{CHECKPOINTS}/{seq:06}.json", text))
    return found


def _checked(home: Home, change: Change, notes: Notes) -> Ledger:
    """The session's ledger, if it is such that the change can be made."""
    folder = home.catalog.folder(change.session)
    ledger = home.current(change.session)
    if change.create is not None:
        if ledger is not None and ledger.there:
            raise SessionExists("a session of this name exists already")
        if ledger is None and folder is not None:
            ledger = Ledger(folder.path)
    elif ledger is None or not ledger.there or (ledger.head or b"") != change.expect:
        raise Moved
    if ledger is None:
        raise Moved
    if notes.rename is not None:
        _check_name(home, notes.rename[0])
    if notes.key is not None and notes.key in ledger.keys:
        raise KeyTaken("the key names another checkpoint of this session")
    if notes.copied is not None:
        files_journal.check_new(ledger, notes.copied.journal)
    for session, seq in notes.needs:
        other = home.catalog.ledger(session)
        if other is None or not other.there or seq not in other.ids:
            raise Gone
        if seq in other.tombs and seq not in notes.untombs:
            raise Gone
    _check_parent(home, ledger, change, notes)
    return ledger


def _check_parent(home: Home, ledger: Ledger | None, change: Change, notes: Notes) -> None:
    """Who reads may see a commit that is taken back, and its seq comes again. Its id does not."""
    if change.parent is None:
        return
    if notes.origin is not None:
        ledger = home.catalog.ledger(notes.origin[0])
    seq, parent = change.parent
    found = parent if ledger is None else ledger.ids.get(seq, parent)
    if ledger is not None and found != parent:
        name = ledger.name.decode(errors="backslashreplace")
        raise HeadMoved(name, ids.to_text(parent), ids.to_text(found))


def _check_name(home: Home, name: bytes) -> None:
    home.catalog.refuse_lost(name)
    for number in home.catalog.named(name):
        ledger = home.catalog.ledger(number)
        if ledger is not None and ledger.there and ledger.name == name:
            raise SessionExists("a session of this name exists already")
        if ledger is not None and ledger.inode:
            _sync_log(home, number)  # else the one that gave up this name may have it back


def _make_folder(
    home: Home, session: int, create: tuple[bytes, bytes], origin: tuple[int, int] | None
) -> None:
    """A folder that is complete when it appears. Without a log it is no session yet."""
    name, row = create
    known = home.catalog.folder(session)
    if known is not None and known.identity.names == (name,):
        home.settle(known.path)
        return  # of an attempt that failed
    place = home.catalog.place(session, name)
    with home.catalog.changing(place.name):
        draft = place.parent / f"{disk.TEMPORARY}{token_hex(8)}"
        os.mkdir(draft, 0o700)
        os.mkdir(draft / CHECKPOINTS, 0o700)
        os.mkdir(draft / STREAMS, 0o700)
        identity = Identity(session, (name,), row, origin)
        disk.replace(draft / SESSION, identity.show(), durable=home.durable)
        os.rename(draft, place)
    home.unsettle(place)
    home.settle(place)


def _announce(home: Home, ledger: Ledger, name: bytes) -> None:
    """A name that the session is about to get, where it will be looked for."""
    folder = home.catalog.folder(ledger.number)
    if folder is not None and name not in folder.identity.names:
        names = (*folder.identity.names, name)
        identity = folder.identity._replace(names=names)
        with home.catalog.changing(folder.path.name):
            disk.replace(folder.path / SESSION, identity.show())


def _write_blobs(home: Home, change: Change, notes: Notes) -> None:
    folders: set[Path] = set()
    for digest in notes.shares:
        path = blob_path(home.root, digest)
        if not path.exists():
            raise Gone
        home.settle(path.parent)
        _share(home, path)
        folders.add(path.parent)
    for digest, row, rewrite in change.blobs:
        path = blob_path(home.root, digest)
        disk.make_folder(path.parent, durable=False)
        home.settle(path.parent)
        if path.exists() and not rewrite:
            _share(home, path)
            folders.add(path.parent)
            continue
        row = files_text.plain(rows.BLOB, rows.blob_address(digest), row)
        disk.replace(path, show_blob(row), durable=home.durable)
    if home.durable:
        for folder in folders:  # another's file may not be durable yet
            disk.sync(folder)


def _share(home: Home, path: Path) -> None:
    """Its time tells gc that somebody has come to need it."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    if home.durable:  # who has written it may do without
        disk.sync(path)


def _sync_log(home: Home, session: int) -> None:
    """What we build on may have been written, and not synced, by one who was killed."""
    folder = home.catalog.folder(session)
    if home.durable and folder is not None:
        home.harden(folder.path)
        disk.sync(folder.path / LOG)
        home.settle(folder.path / LOG)


def _new_items(
    home: Home, ledger: Ledger, change: Change
) -> tuple[list[tuple[Path, int, list[Line]]], list[list[int]]]:
    """The items that are not there yet: files, from where on, and what; and where streams end then.

    Only a copy brings some that belong among those which are there; these are written at once.
    """
    new: dict[int, list[Line]] = {}
    copying = change.checkpoint is None  # a copy may bring what was left out before
    for write in change.rows:
        end = ledger.ends.get(write.stream, 0)
        lines = new.setdefault(write.stream, [])
        lines += [line for line in items_of(write) if line.n >= end or copying]
    found, ends = [], []
    for stream, lines in new.items():
        if lines:
            lines.sort()
            path = ledger.stream(stream)
            end = ledger.ends.get(stream, 0)
            if not end:
                home.catalog.refuse_taken(stream, path)
            if lines[0].n < end:
                home.streams.insert(path, [line for line in lines if line.n < end])
                lines = [line for line in lines if line.n >= end]
            if lines:
                # A damaged log may have forgotten some: what comes before ours was committed.
                found.append((path, max(end, lines[0].n), lines))
                ends.append([stream, lines[-1].n + 1])
    return found, ends
