"""Write to a store of files: first the data that a commit refers to, then its line in the log."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from holdfast.format import rows
from holdfast.format.item_streams import MAX_ITEMS, STREAM_BITS, RowWrite
from holdfast.format.records import MAX_SEQ, SEQ_BITS, checkpoint_address
from holdfast.storage import fs
from holdfast.storage.contract import (
    Absent,
    DeleteIf,
    DeleteRange,
    Insert,
    Put,
    Share,
    StaleHead,
    check,
)
from holdfast.storage.files import journal, row_json
from holdfast.storage.files.item_files import items_of, show_blob
from holdfast.storage.files.lines import entry_of, logged
from holdfast.storage.files.log import (
    CHECKPOINTS,
    LOG,
    SESSION,
    STREAMS,
    Identity,
    SessionLog,
    status,
)
from holdfast.storage.files.reader import GuardView
from holdfast.storage.files.session_folders import blob_path
from holdfast.storage.files.store_folder import Garbage
from holdfast.storage.tables import SESSIONS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.storage.contract import Batch, Guard, Refusal
    from holdfast.storage.files.item_files import Line
    from holdfast.storage.files.store_folder import StoreFolder
    from holdfast.storage.tables import Row


class _Writes:
    """The writes of a batch that need more than a part of a line in the log."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.blobs: list[Share] = []
        self.frees_entries = False
        found: dict[str, list[Any]] = {}
        for write in batch.writes:
            if type(write) is Insert or type(write) is Put:
                found.setdefault(write.table, []).append(write)
            elif type(write) is Share:
                self.blobs.append(write)
            elif type(write) is DeleteRange and write.table == "journal":
                self.frees_entries = True
        self.created: Insert | None = found.get("sessions", [None])[0]
        self.keys = [write for write in found.get("keys", ()) if type(write) is Insert]
        self.checkpoints: list[Insert] = found.get("checkpoints", [])
        self.items: list[Row] = [write.row for write in found.get("items", ())]
        self.journal: list[Insert] = found.get("journal", [])
        self.counters: list[Row] = [write.row for write in found.get("counters", ())]
        self.leases: list[Row] = [write.row for write in found.get("leases", ())]
        self.names = [g for g in batch.guards if type(g) is Absent and g.by is SESSIONS_BY_NAME]

        self.session: int
        """The session whose log gets the line that commits the batch."""
        if batch.swap is not None:
            self.session = batch.swap.session
        elif self.created is not None:
            self.session = self.created.row[0]
        elif batch.sessions:
            self.session = batch.sessions[0]
        elif self.journal:
            self.session = self.journal[0].row[0] >> SEQ_BITS

    def identity(self, created: Insert, *, durable: bool) -> Identity:
        """Return the identity of the session that the batch creates."""
        number, name, origin, row = created.row
        seqs = [write.row[0] & MAX_SEQ for write in self.checkpoints]
        first = max([0, *seqs]) if durable else None
        return Identity(number, (name,), row, origin, first)


def commit(home: StoreFolder, batch: Batch) -> None:
    """Write all of a batch, or nothing."""
    with ExitStack() as stack:
        writes = _Writes(batch)
        if writes.counters:
            stack.enter_context(home.turns.alone())
        _write(home, writes, stack)


def commit_all(home: StoreFolder, first: Batch, rest: Sequence[Batch]) -> list[bool]:
    """Write a batch, and all others that are not refused. Removals of data are only noted."""
    home.catalog.refuse_rivals()
    with home.turns.alone():
        if home.garbage.first != first:  # of a gc that did not come to its end
            home.garbage = Garbage(first)
        check_all(home, first.guards)
        turn(home, first)
        return [_is_written(home, batch) for batch in rest]


def _is_written(home: StoreFolder, batch: Batch) -> bool:
    """Write a batch of gc durably. Return False if it is refused."""
    if batch.writes and isinstance(batch.writes[0], DeleteIf):
        home.garbage.rest.append(batch)  # a reader may still need it
        return True
    with ExitStack() as stack, suppress(StaleHead):
        writes = _Writes(batch)
        ledger = _write(home, writes, stack)
        if not home.durable:  # what the line frees is then removed for good
            fs.sync(ledger.log)
        return True
    return False


def _write(home: StoreFolder, writes: _Writes, stack: ExitStack) -> SessionLog:
    """Write a batch, with locks that the stack releases. Return the log before it."""
    batch, session = writes.batch, writes.session
    _lock(home, writes, stack)
    ledger = _checked(home, writes)
    for row in writes.counters:
        home.turns.write(*row)
    if batch.swap is None and writes.created is None and not batch.sessions:
        journal.add_entries(home, ledger, writes.journal, together=True)
        return ledger
    if writes.created is None:
        home.fsync_log(ledger)
        for guard in writes.names:
            _announce(home, ledger, guard.key[0])
    if writes.blobs:
        stack.enter_context(home.blobs(shared=True))
        _write_blobs(home, writes.blobs)
    for other in {*batch.shared} - {session}:
        _sync_log(home, other)
    # Build everything before the first sync: code runs slowly just after a wait for the disk.
    items, ends = _new_items(home, ledger, writes)
    texts = _texts(ledger, session, writes.checkpoints)
    own = [*logged(batch, session)]
    entry = entry_of(own, ends)
    if batch.sessions:
        entry["sweep"] = token_hex(8)
    line = ledger.line(entry, own)
    with fs.Batch(durable=home.durable) as files:
        for path, end, lines in items:
            home.streams.append(path, end, lines, files)
        for file, text in texts:
            files.put(file, text)
    if not writes.frees_entries:
        journal.add_entries(home, ledger, writes.journal, together=False)
    for _, token, _ in writes.leases:  # first, so that the new lease does not look expired
        journal.fsync_journal(home, ledger)
        journal.note(ledger, token)
    for other in sorted({*batch.sessions} - {session}):
        _write_grafts(home, batch, other, [session, entry["sweep"]])
    home.log(ledger, line)
    if writes.frees_entries:  # the line above says that the entries in between are freed
        journal.add_entries(home, ledger, writes.journal, together=False)
    return ledger


def _lock(home: StoreFolder, writes: _Writes, stack: ExitStack) -> None:
    """Lock the sessions of a batch, and the names if it uses any. Create a new session's folder."""
    batch = writes.batch
    if writes.names or batch.sessions:
        stack.enter_context(home.names())
        home.catalog.refresh(alone=True)
    for guard in writes.names:
        _check_name(home, guard.key[0], guard.refusal)
    if writes.created is not None:
        _make_folder(home, writes.identity(writes.created, durable=home.durable))
    home.lock_sessions(stack, {writes.session, *batch.sessions}, {*batch.shared})


def _write_grafts(home: StoreFolder, batch: Batch, other: int, condition: list[Any]) -> None:
    """Write grafts to the log of another session. They count once the batch's own line exists."""
    ledger = home.catalog.ledger(other)
    if ledger is not None:
        grafts = [write for write in logged(batch, other) if type(write) is Put]
        home.log(ledger, ledger.line(entry_of(grafts, []) | {"if": condition}))
        if not home.durable:
            fs.sync(ledger.log)


# -- guards --------------------------------------------------------------------------------------


def _checked(home: StoreFolder, writes: _Writes) -> SessionLog:
    """Return the log of the batch's session. Raise a refusal if the batch cannot be written."""
    batch, session = writes.batch, writes.session
    ledger = home.current(session)
    swap = batch.swap
    if swap is not None:
        if ledger is None or not ledger.there or (ledger.head or b"") != swap.expect:
            raise swap.refusal()
        if swap.parent is not None:
            # A reader may see a commit that is then taken back. Its seq is used again, its id not.
            pos, id = swap.parent
            known = ledger.tables["checkpoints"].rows.get((pos,))
            if known is not None and known[1] != id:
                raise swap.refusal()
    check_all(home, batch.guards)
    if writes.created is not None:
        if ledger is not None and ledger.there:
            raise writes.created.refusal()
        folder = home.catalog.folder(session)
        if ledger is None and folder is not None:
            ledger = SessionLog(folder.path, session)
    if ledger is None:
        raise StaleHead
    for write in writes.keys:
        if write.row[:2] in ledger.tables["keys"].rows:
            raise write.refusal()
    if batch.swap is not None:
        journal.check_entries(ledger, writes.journal)
    return ledger


def check_all(home: StoreFolder, guards: Sequence[Guard]) -> None:
    """Raise the refusal of a guard that does not hold. Names are checked elsewhere."""
    if not guards:
        return
    view = GuardView(home)
    try:
        for guard in guards:
            if guard.by is not SESSIONS_BY_NAME:
                check(guard, view)
    finally:
        view.close()


def turn(home: StoreFolder, batch: Batch) -> None:
    """Write the counters of a batch."""
    for row in _Writes(batch).counters:
        home.turns.write(*row)


def _check_name(home: StoreFolder, name: bytes, refusal: Refusal) -> None:
    home.catalog.refuse_lost(name)
    home.catalog.holder(name)
    for number in home.catalog.named(name):
        ledger = home.catalog.ledger(number)
        if ledger is not None and ledger.there and ledger.name == name:
            raise refusal()
        if ledger is not None and ledger.inode:
            _sync_log(home, number)  # else the one that gave up this name may have it back


# -- what a line refers to -----------------------------------------------------------------------


def _texts(
    ledger: SessionLog, session: int, checkpoints: Sequence[Insert]
) -> list[tuple[str, bytes]]:
    """Return the paths and texts of the files of new checkpoints."""
    found = []
    for write in checkpoints:
        pos, id, row = write.row
        seq = pos & MAX_SEQ
        address = checkpoint_address(session, seq, id)
        text = row_json.show_checkpoint(seq, id, row_json.plain(rows.CHECKPOINT, address, row))
        found.append((f"{ledger.folder}/{CHECKPOINTS}/{seq:06}.json", text))
    return found


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


def _write_blobs(home: StoreFolder, blobs: Sequence[Share]) -> None:
    folders: set[Path] = set()
    for digest, row, rewrite, refusal in blobs:
        path = blob_path(home.root, digest)
        fs.refuse_link(path)
        if row is None and not path.exists():
            raise refusal()
        fs.make_folder(path.parent, durable=False)
        home.fsync_name(path.parent)
        if row is None or (path.exists() and not rewrite):
            _share(home, path)
            folders.add(path.parent)
        else:
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
    home: StoreFolder, ledger: SessionLog, writes: _Writes
) -> tuple[list[tuple[Path, int, list[Line]]], list[list[int]]]:
    """Return the new items (path, position and lines of each file), and the new ends of streams.

    Only a copy has items that belong before existing ones: it may bring what was left out before.
    These are written at once. Other rows repeat items that exist already.
    """
    new: dict[int, list[Line]] = {}
    for pos, body in writes.items:
        stream = pos >> STREAM_BITS
        end = ledger.ends.get(stream, 0)
        lines = new.setdefault(stream, [])
        found = items_of(RowWrite(stream, pos & MAX_ITEMS - 1, 0, body))
        lines += [line for line in found if line.n >= end or writes.counters]
    files, ends = [], []
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
                files.append((path, max(end, lines[0].n), lines))
                ends.append([stream, lines[-1].n + 1])
    return files, ends
