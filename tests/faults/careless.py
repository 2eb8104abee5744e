"""Ways to break the files backend, which the harnesses must notice.

Run as a program it is the writer of the power-loss harness, broken in one of these ways:
`python -m …careless MUTANT FOLDER LEDGER SCRIPT [backend] [durability]`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.backends import disk, files_gc, files_writer
from holdfast.backends.base import Change
from holdfast.backends.files_catalog import LOCK
from holdfast.backends.files_home import Home
from holdfast.backends.files_ledger import Ledger
from holdfast.backends.files_names import blob_path
from holdfast.backends.files_reader import FilesReader
from holdfast.backends.files_streams import Streams
from holdfast.codec.streams import MAX_ITEMS
from holdfast.errors import Unavailable

from .writer import main


def renames_before_it_syncs() -> None:
    """A file gets its name while what is in it may still be lost."""

    def hastily(path: Path | str, data: bytes, *, durable: bool = True) -> None:
        path = Path(path)
        draft = path.parent / f"{disk.TEMPORARY}{os.getpid()}"
        draft.write_bytes(data)
        os.replace(draft, path)
        disk.sync(path.parent)
        disk.sync(path)

    disk.replace = hastily


def logs_before_it_writes() -> None:
    """The line in the log comes before the items that it refers to."""
    append, log = Streams.append, Home.log
    late: list[tuple[Streams, Path, int, Any]] = []

    def later(self: Streams, path: Path, end: int, lines: Any, batch: disk.Batch) -> None:
        late.append((self, path, end, lines))

    def first(
        self: Home, ledger: Ledger, entry: dict[str, Any], line: bytes, change: Change | None = None
    ) -> None:
        log(self, ledger, entry, line, change)
        while late:
            with disk.Batch(durable=True) as batch:
                append(*late.pop(0), batch)

    Streams.append = later  # type: ignore[method-assign]
    Home.log = first  # type: ignore[method-assign]


def syncs_only_the_log() -> None:
    """What the line in the log refers to may still be lost."""
    disk.Batch._sync = lambda self: None  # type: ignore[method-assign]


def trusts_what_it_finds() -> None:
    """A name that is there is taken for durable, though who made it may have been killed."""

    def trusting(self: Home, ledger: Ledger) -> None:
        self._settled[ledger.log] = ledger.inode

    Home.rest_on = trusting  # type: ignore[method-assign]


def takes_names_for_granted() -> None:
    """A name that another has given up is free, though that may still be lost."""
    sync = files_writer._sync_log

    def needed(home: Home, session: int) -> None:
        if sys._getframe(1).f_code is not files_writer._check_name.__code__:
            sync(home, session)

    files_writer._sync_log = needed


def frees_before_it_says_so() -> None:
    """Files go while the line that frees them may still be lost."""
    log = Home.log

    def unsynced(
        self: Home, ledger: Ledger, entry: dict[str, Any], line: bytes, change: Change | None = None
    ) -> None:
        durable, self.durable = self.durable, self.durable and "freed" not in entry
        try:
            log(self, ledger, entry, line, change)
        finally:
            self.durable = durable

    Home.log = unsynced  # type: ignore[method-assign]
    files_gc._sync_logs = lambda home: None


def compares_no_heads() -> None:
    """Whoever comes last wins."""
    real = files_writer._checked

    def blindly(home: Home, change: Change, notes: Any) -> Any:
        ledger = home.catalog.ledger(change.session)
        if change.create is None and ledger is not None:
            change.expect = ledger.head or b""
        return real(home, change, notes)

    files_writer._checked = blindly


def locks_nothing() -> None:
    """Everybody writes at once."""

    @contextmanager
    def open_to_all(
        path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
    ) -> Iterator[None]:
        yield

    disk.locked = open_to_all


def waits_for_nobody() -> None:
    """All sessions have one lock, and who finds it taken gives up."""
    real = disk.locked

    @contextmanager
    def impatient(
        path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
    ) -> Iterator[None]:
        if os.path.basename(path) != LOCK:
            with real(path, timeout, shared=shared, sealed=sealed):
                yield
            return
        with real(os.path.dirname(os.path.dirname(path)) + "/.lock", 0.0, sealed=sealed):
            yield

    disk.locked = impatient


@contextmanager
def locked_by_a_file(
    path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
) -> Iterator[None]:
    """A lock that is there as long as its file is, whatever became of who has made it."""
    mine = f"{path}.{os.getpid() if shared else 'held'}"
    deadline = time.monotonic() + timeout
    while True:
        try:
            os.close(os.open(mine, os.O_CREAT | os.O_EXCL, 0o600))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise Unavailable("it is locked") from None
            time.sleep(0.01)
    try:
        yield
    finally:
        os.unlink(mine)


def takes_shared_blobs() -> None:
    """A blob goes even if a save has come to share it since it was found to be refuse."""

    def blindly(home: Home, blobs: list[tuple[bytes, int]]) -> None:
        for digest, _ in blobs:
            blob_path(home.root, digest).unlink(missing_ok=True)

    files_gc._drop_blobs = blindly


def takes_what_is_being_saved() -> None:
    """What a save has written, and not yet committed, is refuse."""
    FilesReader._settle = FilesReader.blob_files  # type: ignore[method-assign]
    FilesReader._committed = lambda *_: MAX_ITEMS  # type: ignore[method-assign]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    main(*sys.argv[2:])
