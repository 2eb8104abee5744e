"""Write to a store of files: first the data that a commit refers to, then its line in the log."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from secrets import token_hex
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.errors import HeadMoved, KeyTaken, SessionExists
from holdfast.format import rows
from holdfast.format.records import checkpoint_address
from holdfast.storage import fs
from holdfast.storage.contract import Change, MissingReference, Notes, StaleHead
from holdfast.storage.files import log, row_json
from holdfast.storage.files.item_files import items_of, show_blob
from holdfast.storage.files.log import (
    CHECKPOINTS,
    LOG,
    SESSION,
    STREAMS,
    Identity,
    SessionLog,
    entry_of,
    status,
)
from holdfast.storage.files.session_folders import blob_path

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.storage.files.item_files import Line
    from holdfast.storage.files.store_folder import StoreFolder
    from holdfast.storage.rows import CheckpointRow


_NOTES = Notes()


def commit(home: StoreFolder, change: Change) -> None:
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
            _check_name(home, change.create.name)
            _make_folder(home, _identity(home, change, notes, *change.create))
        needed = {address.session for address in notes.needs}
        home.lock_sessions(stack, {session}, needed)
        ledger = _checked(home, change, notes)
        if change.create is None:
            home.fsync_log(ledger)
        if change.blobs or notes.shares:
            stack.enter_context(home.blobs(shared=True))
            _write_blobs(home, change, notes)
        for other in needed - {session}:
            _sync_log(home, other)
        if notes.rename is not None:
            _announce(home, ledger, notes.rename.name)
        # Build everything before the first sync: code runs slowly just after a wait for the disk.
        items, ends = _new_items(home, ledger, change)
        texts = _texts(ledger, change, notes)
        entry, line = ledger.line(entry_of(change, notes, ends))
        with fs.Batch(durable=home.durable) as batch:
            for path, end, lines in items:
                home.streams.append(path, end, lines, batch)
            for file, text in texts:
                batch.put(file, text)
        copied = notes.copied
        if copied is not None and copied.journal and not copied.journal_from:
            log.copy(home, ledger, copied.journal)
        if notes.lease is not None:  # first, so that the new lease does not look expired
            log.fsync_journal(home, ledger)
            log.note(ledger, notes.lease.token)
        home.log(ledger, entry, line, change)
        if copied is not None and copied.journal_from:
            # The line above says that the entries in between are freed.
            log.copy(home, ledger, copied.journal)


def _new(change: Change, notes: Notes) -> list[CheckpointRow]:
    own = [] if change.checkpoint is None else [change.checkpoint]
    return own if notes.copied is None else [*own, *notes.copied.checkpoints]


def _identity(home: StoreFolder, change: Change, notes: Notes, name: bytes, row: bytes) -> Identity:
    first = max([0, *[row.seq for row in _new(change, notes)]]) if home.durable else None
    return Identity(change.session, (name,), row, notes.origin, first)


def _texts(ledger: SessionLog, change: Change, notes: Notes) -> list[tuple[str, bytes]]:
    """Return the paths and texts of the files of new checkpoints."""
    found = []
    for seq, id, row in _new(change, notes):
        address = checkpoint_address(change.session, seq, id)
        text = row_json.show_checkpoint(seq, id, row_json.plain(rows.CHECKPOINT, address, row))
        found.append((f"{ledger.folder}/{CHECKPOINTS}/{seq:06}.json", text))
    return found


def _checked(home: StoreFolder, change: Change, notes: Notes) -> SessionLog:
    """Return the session's ledger. Raise if the change cannot be made."""
    folder = home.catalog.folder(change.session)
    ledger = home.current(change.session)
    if change.create is not None:
        if ledger is not None and ledger.there:
            raise SessionExists("a session of this name exists already")
        if ledger is None and folder is not None:
            ledger = SessionLog(folder.path)
    elif ledger is None or not ledger.there or (ledger.head or b"") != change.expect:
        raise StaleHead
    if ledger is None:
        raise StaleHead
    if notes.rename is not None:
        _check_name(home, notes.rename.name)
    if notes.key is not None and notes.key in ledger.keys:
        raise KeyTaken("the key names another checkpoint of this session")
    if notes.copied is not None:
        log.check_new(ledger, notes.copied.journal)
    for session, seq in notes.needs:
        other = home.catalog.ledger(session)
        if other is None or not other.there or seq not in other.ids:
            raise MissingReference
        if seq in other.tombstones and seq not in notes.undeleted:
            raise MissingReference
    _check_parent(home, ledger, change, notes)
    return ledger


def _check_parent(
    home: StoreFolder, ledger: SessionLog | None, change: Change, notes: Notes
) -> None:
    """Raise HeadMoved if another checkpoint has the parent's seq.

    A reader may see a commit that is then taken back. Its seq is used again, its id is not.
    """
    if change.parent is None:
        return
    if notes.origin is not None:
        ledger = home.catalog.ledger(notes.origin.session)
    seq, parent = change.parent
    found = parent if ledger is None else ledger.ids.get(seq, parent)
    if ledger is not None and found != parent:
        name = ledger.name.decode(errors="backslashreplace")
        raise HeadMoved(name, ids.to_text(parent), ids.to_text(found))


def _check_name(home: StoreFolder, name: bytes) -> None:
    home.catalog.refuse_lost(name)
    home.catalog.holder(name)
    for number in home.catalog.named(name):
        ledger = home.catalog.ledger(number)
        if ledger is not None and ledger.there and ledger.name == name:
            raise SessionExists("a session of this name exists already")
        if ledger is not None and ledger.inode:
            _sync_log(home, number)  # else the one that gave up this name may have it back


def _make_folder(home: StoreFolder, identity: Identity) -> None:
    """Create a folder. It appears complete, but without a log it is no session yet."""
    known = home.catalog.folder(identity.number)
    if known is not None and known.identity.names == identity.names:  # of an attempt that failed
        if known.identity != identity and status(known.path) is None:
            with home.catalog.changing(known.path.name):
                fs.replace(known.path / SESSION, identity.show())
        home.fsync_name(known.path)
        return
    place = home.catalog.place(identity.number, identity.names[0])
    with home.catalog.changing(place.name):
        draft = place.parent / f"{fs.TEMPORARY}{token_hex(8)}"
        os.mkdir(draft, 0o700)
        os.mkdir(draft / CHECKPOINTS, 0o700)
        os.mkdir(draft / STREAMS, 0o700)
        fs.replace(draft / SESSION, identity.show(), durable=home.durable)
        os.rename(draft, place)
    home.forget_name(place)
    home.fsync_name(place)


def _announce(home: StoreFolder, ledger: SessionLog, name: bytes) -> None:
    """Add a name that the session is about to get, so that lookups find the session by it."""
    folder = home.catalog.folder(ledger.number)
    if folder is not None and name not in folder.identity.names:
        names = (*folder.identity.names, name)
        identity = folder.identity._replace(names=names)
        with home.catalog.changing(folder.path.name):
            fs.replace(folder.path / SESSION, identity.show())


def _write_blobs(home: StoreFolder, change: Change, notes: Notes) -> None:
    folders: set[Path] = set()
    for digest in notes.shares:
        path = blob_path(home.root, digest)
        fs.refuse_link(path)
        if not path.exists():
            raise MissingReference
        home.fsync_name(path.parent)
        _share(home, path)
        folders.add(path.parent)
    for digest, row, rewrite in change.blobs:
        path = blob_path(home.root, digest)
        fs.refuse_link(path)
        fs.make_folder(path.parent, durable=False)
        home.fsync_name(path.parent)
        if path.exists() and not rewrite:
            _share(home, path)
            folders.add(path.parent)
            continue
        row = row_json.plain(rows.BLOB, rows.blob_address(digest), row)
        fs.replace(path, show_blob(row), durable=home.durable)
    if home.durable:
        for folder in folders:  # files of other processes may not be durable yet
            fs.sync(folder)


def _share(home: StoreFolder, path: Path) -> None:
    """Update the file's time, which shows gc that the blob has a new use."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    if home.durable:  # its writer may not have synced it
        fs.sync(path)


def _sync_log(home: StoreFolder, session: int) -> None:
    """Sync a log. A killed process may have written it without a sync."""
    folder = home.catalog.folder(session)
    if home.durable and folder is not None:
        home.fsync_unsynced(folder.path)
        fs.sync(folder.path / LOG)
        home.fsync_name(folder.path / LOG)


def _new_items(
    home: StoreFolder, ledger: SessionLog, change: Change
) -> tuple[list[tuple[Path, int, list[Line]]], list[list[int]]]:
    """Return the new items (path, position and lines of each file), and the new ends of streams.

    Only a copy has items that belong before existing ones. These are written at once.
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
