"""Plain files: a folder for each session, which people can read, search, sync and version.

The commit is one line at the end of a session's log, synced. What it refers to is on the disk
before: items in files of lines, a file for each checkpoint, big values in `blobs`. A lock for each
session keeps writers apart, and dies with its holder; readers need none.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from holdfast.backends import (
    disk,
    files_backup,
    files_counters,
    files_gc,
    files_journal,
    files_repair,
    files_writer,
)
from holdfast.backends.base import Backend, Change, Reader
from holdfast.backends.files_counters import COUNTERS
from holdfast.backends.files_home import LOCKS, SESSIONS, VERSION, Home
from holdfast.backends.files_names import BLOBS
from holdfast.backends.files_reader import FilesReader
from holdfast.codec import portable
from holdfast.codec.records import SPACES
from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidRequest,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.backends.base import Jot, Sweep, Trim

FORMAT = 1
MARKER = "holdfast.json"
_HINTS = {
    errno.ENOSPC: "nothing was lost; free some space and save again",
    errno.EDQUOT: "nothing was lost; free some of what you may use, and save again",
    errno.EFBIG: "nothing was lost; the size of files is limited here (ulimit -f)",
    errno.ELOOP: "a link lies where a file of the store should be, and is not followed: remove it",
}
_FOLDERS = (SESSIONS, BLOBS, LOCKS)


class FilesBackend(Backend):
    name = "files"

    def __init__(
        self,
        path: Path,
        *,
        create: bool | None = None,
        read_only: bool = False,
        durability: str = "full",
        timeout: float = 30.0,
    ) -> None:
        if not disk.HAS_LOCKS:
            raise InvalidRequest("files: stores need a system with flock", hint="use SQLite")
        self.path, self.read_only = disk.lasting(path), read_only
        self._closed = False
        durable = durability == "full"
        self._home = Home(self.path, durable=durable, timeout=timeout, read_only=read_only)
        with _translated(path):
            if not (path / MARKER).exists():
                if _has_sessions(path):
                    raise Corrupt(f"{path / MARKER} is missing", hint="put a copy of it back")
                if create is False or read_only:
                    raise StoreNotFound(f"there is no store at {path}")
                disk.refuse_network(path.parent)
                _create(path, timeout)
            disk.refuse_network(path)
            _check(path)
            for name in () if read_only else (BLOBS, LOCKS):
                disk.make_folder(path / name)  # copies may lack what is empty

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        self._check_open()
        reader = FilesReader(self._home)
        with _translated(self.path), self._home.reading():
            try:
                yield reader
            finally:
                reader.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def version(self) -> object:
        self._check_open()
        try:
            return (self.path / VERSION).read_bytes()
        except FileNotFoundError:
            return b""

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[Home]:
        self._check_open()
        if self.read_only:
            raise Unavailable(
                f"the store {self.path} was opened read-only", hint="open it without read_only"
            )
        try:
            yield self._home
        except OSError:
            with _translated(self.path):
                raise

    def commit(self, change: Change) -> None:
        with self._writing() as home:
            files_writer.commit(home, change)

    def jot(self, jot: Jot) -> None:
        with self._writing() as home:
            files_journal.jot(home, jot)

    def renew(self, session: int, token: bytes) -> bool:
        with self._writing() as home:
            return files_journal.renew(home, session, token)

    def sweep(self, sweeps: Sequence[Sweep]) -> list[bool]:
        with self._writing() as home:
            return files_gc.sweep(home, sweeps)

    def trim(self, trim: Trim) -> int:
        with self._writing() as home:
            return files_gc.trim(home, trim)

    def compact(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self._writing() as home:
            files_gc.compact(home, progress)

    def reindex(self) -> None:
        with self._writing() as home:
            files_repair.recount(home)

    def accept(self, session: int) -> bool:
        with self._writing() as home:
            return files_repair.accept(home, session)

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._writing() as home, disk.locked(self.path / LOCKS / "counters", home.timeout):
            counters = files_counters.read(self.path)
            first = files_counters.beyond(home.catalog, space, counters[space])
            files_counters.write(self.path, counters | {space: first + count})
            return first

    def backup(self, path: Path) -> None:
        self._check_open()
        with _translated(path):
            files_backup.backup(self._home, path, (COUNTERS,), MARKER)

    def reset_lock(self) -> None:
        self._home.reset_lock()

    def close(self) -> None:
        self._closed = True


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """The system's errors as ours."""
    try:
        yield
    except OSError as e:
        if isinstance(e, HoldfastError):
            raise
        raise Unavailable(
            f"the store {path} cannot be read or written: {e}", hint=_HINTS.get(e.errno or 0)
        ) from e


def _create(path: Path, timeout: float) -> None:
    if not path.parent.is_dir():
        raise Unavailable(f"the folder {path.parent} does not exist", hint="make it first")
    disk.make_folder(path)
    with disk.locked(path / ".lock", timeout):
        if (path / MARKER).exists():
            return  # another process was faster
        strange = {e.name for e in os.scandir(path)} - {*_FOLDERS, COUNTERS, ".lock"}
        strange = {name for name in strange if not name.startswith(disk.TEMPORARY)}
        if strange:
            raise InvalidRequest(
                f"{path} is a folder of something else: it has {min(strange)!r} in it",
                hint="give the path of a new or empty folder",
            )
        for name in _FOLDERS:
            disk.make_folder(path / name)
        for name in ("turn", "readers"):
            os.close(disk.open_to_write(path / LOCKS / name, os.O_CREAT))
        disk.sync(path.parent)
        files_counters.write(path, dict.fromkeys(SPACES, 1))
        marker = {"holdfast": "a store of files", "format": FORMAT, "id": secrets.token_hex(8)}
        disk.replace(path / MARKER, portable.dumps(marker) + b"\n")


def _has_sessions(path: Path) -> bool:
    return (path / SESSIONS).is_dir() and any(os.listdir(path / SESSIONS))


def _check(path: Path) -> None:
    try:
        format = portable.loads((path / MARKER).read_bytes())["format"]
        if type(format) is not int:
            raise TypeError
    except (ValueError, TypeError, LookupError) as e:
        raise Corrupt(f"{path / MARKER} is damaged") from e
    if format > FORMAT:
        raise UnsupportedFormat(f"the store {path} has format {format}, newer than this version's")
    if not (path / SESSIONS).is_dir():
        raise Corrupt(f"the store {path} is damaged: its folder {SESSIONS} is missing")
