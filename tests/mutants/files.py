"""Mutants of the files backend."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.errors import Unavailable
from holdfast.format.item_streams import MAX_ITEMS
from holdfast.storage import fs
from holdfast.storage.contract import DeleteIf
from holdfast.storage.files import writer
from holdfast.storage.files.item_files import Streams
from holdfast.storage.files.log import NewLine, SessionLog
from holdfast.storage.files.reader import FilesView
from holdfast.storage.files.session_folders import LOCK, blob_path
from holdfast.storage.files.store_folder import StoreFolder
from tests.mutants import Mutant, entry, mutant, nothing

# -- what is on the disk, and when ---------------------------------------------------------------


@mutant(".storage.fs:replace")
def renames_before_it_syncs(real: Any) -> Any:
    """A file is synced before it gets its name."""

    def hastily(path: Path | str, data: bytes, *, durable: bool = True) -> None:
        path = Path(path)
        draft = path.parent / f"{fs.TEMPORARY}{os.getpid()}"
        draft.write_bytes(data)
        os.replace(draft, path)
        fs.sync(path.parent)
        fs.sync(path)

    return hastily


_LATE: list[tuple[Streams, Path, int, Any]] = []


def _append_later(real: Any) -> Any:
    def later(self: Streams, path: Path, end: int, lines: Any, batch: fs.Batch) -> None:
        _LATE.append((self, path, end, lines))

    return later


def _log_first(real: Any) -> Any:
    append = Streams.append

    def first(self: StoreFolder, ledger: SessionLog, line: NewLine) -> None:
        real(self, ledger, line)
        while _LATE:
            with fs.Batch(durable=True) as batch:
                append(*_LATE.pop(0), batch)

    return first


logs_before_it_writes = Mutant(
    "logs_before_it_writes",
    "Items are written before the line in the log that refers to them.",
    {  # in this order: the second one calls what the first replaces
        ".storage.files.store_folder:StoreFolder.log": _log_first,
        ".storage.files.item_files:Streams.append": _append_later,
    },
)
syncs_only_the_log = entry(
    "syncs_only_the_log", "What a line in the log refers to is synced before it.",
    ".storage.fs:Batch._sync", nothing,
)  # fmt: skip


@mutant(".storage.files.store_folder:StoreFolder.fsync_log")
def trusts_what_it_finds(real: Any) -> Any:
    """A file that a killed process may have made is synced before it is built on."""

    def trusting(self: StoreFolder, ledger: SessionLog) -> None:
        self._settled[ledger.log] = ledger.inode

    return trusting


@mutant(".storage.files.writer:_sync_log")
def takes_names_for_granted(real: Any) -> Any:
    """That a name is free again is synced before it is used."""

    def needed(home: StoreFolder, session: int) -> None:
        if sys._getframe(1).f_code is not writer._check_name.__code__:
            real(home, session)

    return needed


def _log_without_sync(real: Any) -> Any:
    def unsynced(self: StoreFolder, ledger: SessionLog, line: NewLine) -> None:
        durable, self.durable = self.durable, self.durable and "freed" not in line.entry
        try:
            real(self, ledger, line)
        finally:
            self.durable = durable

    return unsynced


frees_before_it_says_so = Mutant(
    "frees_before_it_says_so",
    "The line that frees files is synced before they are removed.",
    {
        ".storage.files.store_folder:StoreFolder.log": _log_without_sync,
        ".storage.files.maintain:_sync_logs": lambda _: nothing,
    },
)

# -- many writers --------------------------------------------------------------------------------


@mutant(".storage.files.writer:_checked")
def compares_no_heads(real: Any) -> Any:
    """A commit to files is refused if the head is not the expected one."""

    def blindly(home: StoreFolder, writes: Any) -> Any:
        ledger, swap = home.catalog.ledger(writes.session), writes.batch.swap
        if swap is not None and ledger is not None:
            writes.batch.swap = swap._replace(expect=ledger.head or b"")
        return real(home, writes)

    return blindly


@mutant(".storage.fs:locked")
def locks_nothing(real: Any) -> Any:
    """One process at a time writes to a session."""

    @contextmanager
    def open_to_all(
        path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
    ) -> Iterator[None]:
        yield

    return open_to_all


@mutant(".storage.fs:locked")
def waits_for_nobody(real: Any) -> Any:
    """Sessions have a lock each, and a writer waits for it."""

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

    return impatient


@mutant(".storage.fs:locked")
def locks_outlive_their_holder(real: Any) -> Any:
    """A lock ends with the process that holds it."""

    @contextmanager
    def locked_by_a_file(
        path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
    ) -> Iterator[None]:
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

    return locked_by_a_file


# -- gc ------------------------------------------------------------------------------------------


@mutant(".storage.files.maintain:_drop_blobs")
def drops_shared_files(real: Any) -> Any:
    """gc keeps a file that a save has come to share since it was found to be garbage."""

    def blindly(home: StoreFolder, removals: list[DeleteIf]) -> None:
        for removal in removals:
            blob_path(home.root, removal.key[0]).unlink(missing_ok=True)

    return blindly


takes_what_is_being_saved = Mutant(
    "takes_what_is_being_saved",
    "gc keeps what a save has written and not yet committed.",
    {
        ".storage.files.reader:FilesView._snapshot": lambda _: FilesView.blob_files,
        ".storage.files.reader:FilesView._committed": lambda _: lambda *args: MAX_ITEMS,
    },
)

refuses_no_links = Mutant(
    "refuses_no_links",
    "Links in a store of files are not followed.",
    {
        ".storage.fs:refuse_link": lambda _: nothing,
        ".storage.fs:links": lambda _: lambda path: iter(()),
    },
)
