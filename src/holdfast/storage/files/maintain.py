"""Maintain a store of files: gc, backup and repair."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from holdfast.errors import Corrupt, InvalidRequest, Unavailable
from holdfast.format.item_streams import MAX_ITEMS, STREAM_BITS, RowWrite
from holdfast.format.records import SPACES
from holdfast.log import logger
from holdfast.storage import fs
from holdfast.storage.contract import DeleteIf, Insert, MissingReference
from holdfast.storage.files import journal, store_folder, writer
from holdfast.storage.files.item_files import items_of
from holdfast.storage.files.journal import JOURNAL, LAST
from holdfast.storage.files.log import CHECKPOINTS, HEAD, LOG, SESSION, STREAMS, hint
from holdfast.storage.files.reader import LEFT, FilesView, left_from
from holdfast.storage.files.session_folders import BLOBS, LOCK, blob_path, record_path, streams_in
from holdfast.storage.files.store_folder import LOCKS, SESSIONS, Garbage
from holdfast.storage.tables import BLOB_VERSIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.storage.contract import Batch
    from holdfast.storage.files.item_files import Line
    from holdfast.storage.files.log import SessionLog
    from holdfast.storage.files.store_folder import StoreFolder


_BATCH = 500
_NAMELESS = "~streams-"
"""Followed by the number of a stream. No session's folder has such a name."""


def compact(home: StoreFolder, progress: Callable[[int, int], None] | None) -> bool:
    """Remove unreferenced data, a few files at a time, between readers.

    Return False if a reader does not end. The next gc removes the rest.
    """
    for link in home.links():
        raise link
    garbage, home.garbage = home.garbage, Garbage()
    _sync_logs(home)
    root = home.catalog.root
    work = [partial(_unless_copied, home, garbage, step) for step in _removals(home, garbage)]
    work += [
        *[partial(_compact, home, root / name) for name in sorted(os.listdir(root))],
        *[partial(_drop_drafts, home, folder) for folder in (home.root / BLOBS).iterdir()],
    ]
    count = len(work)
    for done, step in enumerate(work):
        try:
            with home.alone():
                step()
        except Unavailable as e:
            logger.info("the next gc frees the space: %s", e.message)
            return False
        except OSError as e:
            if e.errno != errno.ENOSPC or done >= count:
                raise
            work.append(step)  # once more, when the others have made room
        if progress is not None:
            progress(done + 1, len(work))
    if progress is not None and not work:
        progress(0, 0)
    return True


def _removals(home: StoreFolder, garbage: Garbage) -> Iterator[Callable[[], object]]:
    """Yield the steps that remove data: one for each stream, and some for blobs."""
    items: dict[int, list[Batch]] = {}
    blobs: list[DeleteIf] = []
    for batch in garbage.rest:
        first = batch.writes[0]
        if isinstance(first, DeleteIf) and first.by is BLOB_VERSIONS:
            blobs.append(first)
        elif isinstance(first, DeleteIf):
            items.setdefault(first.key[0] >> STREAM_BITS, []).append(batch)
    for stream, batches in items.items():
        yield partial(_drop_items, home, stream, batches)
    for n in range(0, len(blobs), _BATCH):
        yield partial(_drop_blobs, home, blobs[n : n + _BATCH])


def _unless_copied(home: StoreFolder, garbage: Garbage, step: Callable[[], object]) -> None:
    """Remove data, but not if a copy has landed since it was found to be garbage."""
    if garbage.first is None:
        return
    with home.turns.alone(), suppress(MissingReference):
        writer.check_all(home, garbage.first.guards)
        writer.turn(home, garbage.first)
        step()


def _sync_logs(home: StoreFolder) -> None:
    """Sync the logs of sweeps, before any data that they free is removed."""
    for folder in home.catalog.folders():
        ledger = home.catalog.ledger(folder.identity.number)
        if ledger is not None and ledger.sweeps:
            with suppress(FileNotFoundError):  # another gc was faster
                fs.sync(folder.path / LOG)


def _drop_items(home: StoreFolder, stream: int, batches: list[Batch]) -> None:
    """Remove groups of items of one stream. A group with a changed item stays."""
    path = home.catalog.stream(stream)
    if path is None:
        return
    groups = [[w for w in batch.writes if isinstance(w, DeleteIf)] for batch in batches]
    positions = [removal.key[0] & MAX_ITEMS - 1 for group in groups for removal in group]
    with fs.locked(path.parent.parent / LOCK, home.timeout):
        lines = home.streams.read(path, min(positions), max(positions) + 1)
        left, base = left_from(home, stream, path), stream << STREAM_BITS
        there = {base | n: row[:9] + LEFT if n >= left else row[:9] for n, row in lines}
        known = dict(lines)
        dead: set[int] = set()
        changed: list[Line] = []
        for batch, group in zip(batches, groups, strict=True):
            if all(there.get(w.key[0], b"").startswith(w.value) for w in group):
                going = {w.key[0] & MAX_ITEMS - 1 for w in group}
                for pos, body in [w.row for w in batch.writes if isinstance(w, Insert)]:
                    # Most are the same items in other rows: one row to us.
                    for line in items_of(RowWrite(stream, pos & MAX_ITEMS - 1, 0, body)):
                        going.discard(line.n)
                        if known.get(line.n, line.row)[9:] != line.row[9:]:
                            changed.append(line)
                dead |= going
        if dead or changed:
            home.streams.rewrite(path, dead, changed, left)


def _drop_blobs(home: StoreFolder, removals: list[DeleteIf]) -> None:
    with home.blobs(shared=False):
        for removal in removals:
            path = blob_path(home.root, removal.key[0])
            if os.path.lexists(path) and os.lstat(path).st_mtime_ns == removal.value:
                path.unlink()


def _drop_drafts(home: StoreFolder, folder: Path) -> None:
    """Remove drafts that a crash has left. The lock keeps saves from writing blobs."""
    with home.blobs(shared=False):
        for draft in folder.glob(f"{fs.TEMPORARY}*"):
            draft.unlink()


def _compact(home: StoreFolder, path: Path) -> None:
    """Remove a session's freed checkpoints, and shorten its log and its journal."""
    with home.names():
        fs.refuse_link(path)
        if not path.is_dir():
            return
        if path.name.startswith(fs.TEMPORARY):  # no draft is being written now
            shutil.rmtree(path)
            return
        home.catalog.refresh(alone=True)
        number = home.catalog.number_of(path.name)
        if number is None and not home.catalog.is_over(path.name):
            return  # damaged, or none of ours
        with fs.locked(path / LOCK, home.timeout):
            ledger = None if number is None else home.catalog.ledger(number)
            if ledger is None or not ledger.there:
                with home.catalog.changing(path.name):
                    _remove(path)
                _hide_name(home, path)
                return
            for folder in (path, path / CHECKPOINTS, path / STREAMS):
                for draft in folder.glob(f"{fs.TEMPORARY}*"):
                    draft.unlink()
            for seq in ledger.freed:
                record_path(path, seq).unlink(missing_ok=True)
            if ledger.damaged:
                return
            slim = ledger.slim(fs.read(path / LOG)[: ledger.size])
            if slim is not None:
                fs.replace(path / LOG, slim)
            slim = journal.slim(ledger)
            if slim is not None:
                fs.replace(path / JOURNAL, slim)


def _hide_name(home: StoreFolder, path: Path) -> None:
    """Rename the folder with the streams that forks need, so that it has no session's name."""
    if not path.exists() or path.name.startswith(_NAMELESS):
        return
    new = path.with_name(f"{_NAMELESS}{min(streams_in(str(path)), default=0)}")
    with home.catalog.changing(path.name), home.catalog.changing(new.name):
        os.rename(path, new)
    fs.sync(new.parent)


def _remove(path: Path) -> None:
    """Remove the folder of a removed session, except streams that forks still need.

    The files that show that the session was removed are deleted last.
    """
    streams = path / STREAMS
    keep = streams.is_dir() and any(streams.iterdir())
    for entry in list(path.iterdir()):
        if entry.is_dir() and entry != streams:
            shutil.rmtree(entry)  # raises if it is a link
        elif entry.name not in (SESSION, LOG, LOCK, STREAMS):
            entry.unlink()
    fs.sync(path)
    for name in (SESSION, LOG):
        (path / name).unlink(missing_ok=True)
    if not keep:
        shutil.rmtree(path)


def backup(home: StoreFolder, path: Path, others: tuple[str, ...], marker: str) -> None:
    """Write a backup. It appears complete and durable. Saves wait only while all logs are read."""
    if os.path.lexists(path):
        raise InvalidRequest(f"{path} exists already", hint="choose another path")
    if not path.parent.is_dir():
        raise Unavailable(f"the folder {path.parent} does not exist")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    with home.reading():  # nothing goes while it is copied
        for link in home.links():
            raise link
        ledgers = _moment(home)
        try:
            os.mkdir(draft, 0o700)
            for name in (SESSIONS, BLOBS, LOCKS):
                os.mkdir(draft / name, 0o700)
            for ledger in ledgers:
                _copy_session(ledger, draft / SESSIONS / ledger.folder.name)
            _copy_streams(home, draft / SESSIONS)
            _copy_blobs(home.root / BLOBS, draft / BLOBS)
            for name in (*others, marker):
                fs.copy(home.root / name, draft / name)
            for folder, _, files in os.walk(draft, topdown=False):
                for file in files:
                    os.chmod(os.path.join(folder, file), 0o600)
                    fs.sync(os.path.join(folder, file))
                fs.sync(folder)
            os.rename(draft, path)
            fs.sync(path.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _copy_blobs(source: Path, target: Path) -> None:
    for folder in source.iterdir():
        fs.refuse_link(folder)
        os.mkdir(target / folder.name, 0o700)
        for path in folder.iterdir():
            if not path.name.startswith(fs.TEMPORARY):
                fs.copy(path, target / folder.name / path.name)


def _moment(home: StoreFolder) -> list[SessionLog]:
    """Return the ledgers of all sessions, at a moment without writers."""
    with home.names():
        home.catalog.refuse_rivals()
        numbers = [folder.identity.number for folder in home.catalog.folders()]
        with home.sessions([], numbers):
            found = [home.catalog.ledger(number) for number in numbers]
            return [ledger.copy() for ledger in found if ledger is not None and ledger.there]


def _copy_session(ledger: SessionLog, target: Path) -> None:
    for folder in (target, target / CHECKPOINTS, target / STREAMS):
        os.mkdir(folder, 0o700)
    for seq in ledger.seqs():
        source = record_path(ledger.folder, seq)
        if source.exists():  # otherwise it is missing there, too
            fs.copy(source, record_path(target, seq))
    if (ledger.folder / SESSION).exists():
        fs.copy(ledger.folder / SESSION, target / SESSION)
    (target / HEAD).write_bytes(hint(ledger.entries))
    known = journal.last_known(ledger)  # first: a writer updates the hint after the entry
    if (ledger.folder / JOURNAL).exists():
        data = fs.read(ledger.folder / JOURNAL)
        (target / JOURNAL).write_bytes(data[: data.rfind(b"\n") + 1])
        (target / LAST).write_bytes(hint(known))
    if ledger.size:  # otherwise it is missing there, too
        (target / LOG).write_bytes(fs.read(ledger.folder / LOG)[: ledger.size])


def _copy_streams(home: StoreFolder, root: Path) -> None:
    """Copy all streams, also those of removed sessions, because forks may need them.

    Uncommitted items are copied as a crash would leave them. A log does not always show how many
    items are committed, because an accepted loss may include these lines.
    """
    for _, source in home.catalog.streams():
        target = root / source.relative_to(home.catalog.root)
        for folder in (target.parent.parent, target.parent):
            fs.make_folder(folder, durable=False)
        fs.copy(source, target)


def recount(home: StoreFolder) -> bool:
    """Replace damaged counters, with numbers above all that are in use.

    Return whether that was necessary.
    """
    for link in home.links():
        raise link  # raise before anything changes
    with fs.locked(home.root / LOCKS / "counters", home.timeout):
        for problem in home.catalog.clashes():
            raise problem  # raise before anything changes
        try:
            store_folder.read(home.root)
        except Corrupt:
            counted = {space: store_folder.beyond(home.catalog, space) for space in SPACES}
            store_folder.write(home.root, counted)
            return True
    return False


def accept(home: StoreFolder, session: int) -> bool:
    """Add a line to the log that accepts its lost lines."""
    with home.sessions({session}):
        ledger = home.current(session)
        if ledger is None or not ledger.there or not ledger.damaged:
            return False
        view = FilesView(home)
        try:
            row = view.called(ledger)
        finally:
            view.close()
        first, ends = journal.look(ledger).first, [*_ends(home, ledger)]
        home.log(ledger, ledger.line(ledger.acceptance(row, first, ends)))
        return True


def _ends(home: StoreFolder, ledger: SessionLog) -> Iterator[list[int]]:
    """Yield the end of each stream.

    No copy must cut off items that a lost line may have committed.
    """
    for stream in sorted(streams_in(str(ledger.folder))):
        lines = home.streams.lines(ledger.stream(stream), 0, MAX_ITEMS)
        if lines:
            yield [stream, max(lines[-1][0] + 1, ledger.ends.get(stream, 0))]
