"""Freeing in a store of files."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from holdfast.backends import disk, files_journal
from holdfast.backends.base import Gone
from holdfast.backends.files_catalog import LOCK
from holdfast.backends.files_entries import gaps_of, sweep_entry
from holdfast.backends.files_home import Refuse
from holdfast.backends.files_identity import SESSION
from holdfast.backends.files_ledger import CHECKPOINTS, LOG, STREAMS
from holdfast.backends.files_names import BLOBS, blob_path, record_path
from holdfast.backends.files_reader import LEFT, FilesReader, left_from
from holdfast.backends.files_streams import items_of
from holdfast.codec.streams import MAX_ITEMS, STREAM_BITS, RowWrite
from holdfast.errors import Unavailable
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any

    from holdfast.backends.base import Sweep, Trim
    from holdfast.backends.files_home import Home
    from holdfast.backends.files_ledger import Ledger

    _Group = tuple[Sequence[tuple[int, bytes]], Sequence[tuple[int, bytes]]]


_BATCH = 500
_YOUNG = 3600.0
"""Seconds for which a draft may be somebody's who is at work."""


def sweep(home: Home, sweeps: Sequence[Sweep]) -> list[bool]:
    home.catalog.refuse_rivals()
    with home.turns.alone():
        home.turns.freeing()
        return [_sweep(home, each) for each in sweeps]


def _sweep(home: Home, sweep: Sweep) -> bool:
    """All of it or nothing: what other sessions are told holds only once our own line is there."""
    session = sweep.session
    others = sorted({other for other, _, _, _ in sweep.gaps} - {session})
    far = {ancestor >> 32 for _, _, ancestor, _ in sweep.gaps if ancestor is not None}
    with home.names(), home.sessions([session, *others], far):
        reader = FilesReader(home)
        try:
            if not sweep.is_current(reader):
                return False
        finally:
            reader.close()
        mark = secrets.token_hex(8)
        for other in others:
            ledger = home.catalog.ledger(other)
            if ledger is not None:
                _log(home, ledger, {"gaps": gaps_of(sweep, other), "if": [session, mark]})
        ledger = home.catalog.ledger(session)
        if ledger is None:
            return False
        _log(home, ledger, sweep_entry(sweep, mark))
    return True


def _log(home: Home, ledger: Ledger, entry: dict[str, Any]) -> None:
    """Add a line, always synced: what it frees may be durable, and is removed for good."""
    home.log(ledger, *ledger.line(entry))
    if not home.durable:
        disk.sync(ledger.log)


def trim(home: Home, trim: Trim) -> int:
    """Note what is to go. Somebody may be reading it, so that is for `compact` to do."""
    if home.turns.read().copied != trim.copied:
        home.refuse = Refuse()
        raise Gone
    if home.refuse.copied != trim.copied:  # of a gc that did not come to its end
        home.refuse = Refuse(copied=trim.copied)
    for rows, instead in trim.items:
        home.refuse.items.setdefault(rows[0][0] >> STREAM_BITS, []).append((rows, instead))
    home.refuse.blobs += trim.blobs
    return sum([len(rows) for rows, _ in trim.items]) + len(trim.blobs)


def compact(home: Home, progress: Callable[[int, int], None] | None) -> None:
    """Remove what nobody refers to, a few files at a time, between readers.

    Where somebody goes on reading, the rest is left to the next gc.
    """
    refuse, home.refuse = home.refuse, Refuse()
    _sync_logs(home)
    batches = [refuse.blobs[n : n + _BATCH] for n in range(0, len(refuse.blobs), _BATCH)]
    root = home.catalog.root
    work: list[Callable[[], object]] = [
        *[partial(_drop_items, home, stream, rows) for stream, rows in refuse.items.items()],
        *[partial(_drop_blobs, home, batch) for batch in batches],
    ]
    work = [partial(_unless_copied, home, refuse.copied, step) for step in work]
    work += [
        *[partial(_compact, home, root / name) for name in sorted(os.listdir(root))],
        *[partial(_drop_drafts, folder) for folder in (home.root / BLOBS).iterdir()],
    ]
    for done, step in enumerate(work):
        try:
            with home.alone():
                step()
        except Unavailable as e:
            logger.info("space is given back by the next gc: %s", e.message)
            break
        if progress is not None:
            progress(done + 1, len(work))
    if progress is not None and not work:
        progress(0, 0)


def _unless_copied(home: Home, copied: int, step: Callable[[], object]) -> None:
    """Remove data, but not if a copy has landed since it was found to be garbage."""
    with home.turns.alone():
        if home.turns.read().copied == copied:
            home.turns.freeing()
            step()


def _sync_logs(home: Home) -> None:
    """Nothing goes before the line that frees it is durable: its writer may have been killed."""
    for folder in home.catalog.folders():
        ledger = home.catalog.ledger(folder.identity.number)
        if ledger is not None and ledger.sweeps:
            with suppress(FileNotFoundError):  # another gc was faster
                disk.sync(folder.path / LOG)


def _drop_items(home: Home, stream: int, groups: list[_Group]) -> None:
    """Items of one stream that go, unless one of those that go together has changed since."""
    path = home.catalog.stream(stream)
    if path is None:
        return
    positions = [pos & MAX_ITEMS - 1 for rows, _ in groups for pos, _ in rows]
    with disk.locked(path.parent.parent / LOCK, home.timeout):
        lines = home.streams.read(path, min(positions), max(positions) + 1)
        left, base = left_from(home, stream, path), stream << STREAM_BITS
        there = {base | n: row[:9] + LEFT if n >= left else row[:9] for n, row in lines}
        dead: set[int] = set()
        for rows, instead in groups:
            if all(there.get(pos, b"").startswith(begin) for pos, begin in rows):
                going = {pos & MAX_ITEMS - 1 for pos, _ in rows}
                for pos, body in instead:  # the same items in other rows, which is one to us
                    write = RowWrite(stream, pos & MAX_ITEMS - 1, 0, body)
                    going -= {line.n for line in items_of(write)}
                dead |= going
        if dead:
            home.streams.rewrite(path, dead, left)


def _drop_blobs(home: Home, blobs: list[tuple[bytes, int]]) -> None:
    with home.blobs(shared=False):
        for digest, shared in blobs:
            path = blob_path(home.root, digest)
            if path.exists() and path.stat().st_mtime_ns == shared:
                path.unlink()


def _drop_drafts(folder: Path) -> None:
    """What a crash has left. A draft of somebody at work is younger."""
    for draft in folder.glob(f"{disk.TEMPORARY}*"):
        with suppress(FileNotFoundError):  # it has its name now
            if time.time() - draft.stat().st_mtime > _YOUNG:
                draft.unlink()


def _compact(home: Home, path: Path) -> None:
    """One session: files of freed checkpoints, and what the log says of them."""
    with home.names():
        if path.is_symlink() or not path.is_dir():
            return
        if path.name.startswith(disk.TEMPORARY):  # nobody makes one now
            shutil.rmtree(path)
            return
        home.catalog.refresh(alone=True)
        number = home.catalog.number_of(path.name)
        if number is None and not home.catalog.is_over(path.name):
            return  # damaged, or none of ours
        with disk.locked(path / LOCK, home.timeout):
            ledger = None if number is None else home.catalog.ledger(number)
            if ledger is None or not ledger.there:
                with home.catalog.changing(path.name):
                    _remove(path)
                return
            for folder in (path, path / CHECKPOINTS, path / STREAMS):
                for draft in folder.glob(f"{disk.TEMPORARY}*"):
                    draft.unlink()
            for seq in ledger.freed:
                record_path(path, seq).unlink(missing_ok=True)
            if ledger.damaged:
                return
            slim = ledger.slim((path / LOG).read_bytes()[: ledger.size])
            if slim is not None:
                disk.replace(path / LOG, slim)
            journal = files_journal.slim(ledger)
            if journal is not None:
                disk.replace(path / files_journal.JOURNAL, journal)


def _remove(path: Path) -> None:
    """A folder without a session; what forks still need of its streams stays.

    What tells that there is no session goes last. Where a folder is a link, that goes, and of what
    it leads to only what is ours.
    """
    streams = path / STREAMS
    keep = streams.is_dir() and any(streams.iterdir())
    for entry in list(path.iterdir()):
        if entry.name == CHECKPOINTS and entry.is_symlink():
            for pattern in ("[0-9]*.json", f"{disk.TEMPORARY}*"):
                for ours in entry.glob(pattern):
                    ours.unlink()
            entry.unlink()
        elif entry.is_dir() and not entry.is_symlink() and entry != streams:
            shutil.rmtree(entry)
        elif entry.name not in (SESSION, LOG, LOCK, STREAMS):
            entry.unlink()
    disk.sync(path)
    for name in (SESSION, LOG):
        (path / name).unlink(missing_ok=True)
    if not keep:
        shutil.rmtree(path)
