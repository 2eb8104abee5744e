"""Writing to a store of files: first what a commit refers to, then its line in the log."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from secrets import token_hex
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.backends import disk, files_journal, files_text
from holdfast.backends.base import Change, Gone, Moved, Notes
from holdfast.backends.files_entries import entry_of
from holdfast.backends.files_identity import SESSION, Identity
from holdfast.backends.files_ledger import CHECKPOINTS, LOG, STREAMS, Ledger, status
from holdfast.backends.files_names import blob_path
from holdfast.backends.files_streams import items_of, show_blob
from holdfast.codec import rows
from holdfast.codec.records import checkpoint_address
from holdfast.errors import HeadMoved, KeyTaken, SessionExists

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.backends.files_home import Home
    from holdfast.backends.files_streams import Line


_NOTES = Notes()


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
            _make_folder(home, _identity(home, change, notes, *change.create))
        needed = {s for s, _ in notes.needs}
        home.lock_sessions(stack, {session}, needed)
        ledger = _checked(home, change, notes)
        if change.create is None:
            home.rest_on(ledger)
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


def _new(change: Change, notes: Notes) -> list[tuple[int, bytes, bytes]]:
    own = [] if change.checkpoint is None else [change.checkpoint]
    return own if notes.copied is None else [*own, *notes.copied.checkpoints]


def _identity(home: Home, change: Change, notes: Notes, name: bytes, row: bytes) -> Identity:
    first = max([0, *[seq for seq, _, _ in _new(change, notes)]]) if home.durable else None
    return Identity(change.session, (name,), row, notes.origin, first)


def _texts(ledger: Ledger, change: Change, notes: Notes) -> list[tuple[str, bytes]]:
    """The files of new checkpoints, and what is to be in them."""
    found = []
    for seq, id, row in _new(change, notes):
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
    home.catalog.holder(name)
    for number in home.catalog.named(name):
        ledger = home.catalog.ledger(number)
        if ledger is not None and ledger.there and ledger.name == name:
            raise SessionExists("a session of this name exists already")
        if ledger is not None and ledger.inode:
            _sync_log(home, number)  # else the one that gave up this name may have it back


def _make_folder(home: Home, identity: Identity) -> None:
    """A folder that is complete when it appears. Without a log it is no session yet."""
    known = home.catalog.folder(identity.number)
    if known is not None and known.identity.names == identity.names:  # of an attempt that failed
        if known.identity != identity and status(known.path) is None:
            with home.catalog.changing(known.path.name):
                disk.replace(known.path / SESSION, identity.show())
        home.settle(known.path)
        return
    place = home.catalog.place(identity.number, identity.names[0])
    with home.catalog.changing(place.name):
        draft = place.parent / f"{disk.TEMPORARY}{token_hex(8)}"
        os.mkdir(draft, 0o700)
        os.mkdir(draft / CHECKPOINTS, 0o700)
        os.mkdir(draft / STREAMS, 0o700)
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
