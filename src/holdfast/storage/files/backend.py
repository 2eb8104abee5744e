"""Plain files: a folder for each session. Users can read, search, sync and version them.

The commit is one synced line at the end of a session's log. The data that it refers to is on the
disk before: items in files of lines, a file for each checkpoint, big values in `blobs`. A lock for
each session keeps writers apart; the system releases it with its process. Readers need no lock.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidRequest,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.format import portable
from holdfast.format.records import SPACES
from holdfast.storage import fs
from holdfast.storage.contract import Backend, View
from holdfast.storage.files import journal, maintain, store_folder, writer
from holdfast.storage.files.reader import FilesView
from holdfast.storage.files.session_folders import BLOBS
from holdfast.storage.files.store_folder import COUNTERS, LOCKS, SESSIONS, VERSION, StoreFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.storage.contract import Batch

FORMAT = 1
MARKER = "holdfast.json"
_HINTS = {
    errno.ENOSPC: "nothing was lost; free some space and save again",
    errno.EDQUOT: "nothing was lost; free some of what you may use, and save again",
    errno.EFBIG: "nothing was lost; the size of files is limited here (ulimit -f)",
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
        if not fs.HAS_LOCKS:
            raise InvalidRequest("files: stores need a system with flock", hint="use SQLite")
        self.path, self.read_only = fs.absolute(path), read_only
        self._closed = False
        durable = durability == "full"
        self._home = StoreFolder(self.path, durable=durable, timeout=timeout, read_only=read_only)
        with _translated(path):
            fs.refuse_link(path / MARKER)
            self._home.refuse_links()
            if not (path / MARKER).exists():
                if _has_sessions(path):
                    raise Corrupt(f"{path / MARKER} is missing", hint="put a copy of it back")
                if create is False or read_only:
                    raise StoreNotFound(f"there is no store at {path}")
                if not create:
                    fs.refuse_missing(path.parent)
                fs.refuse_network(path.parent)
                _create(path, timeout)
            fs.refuse_network(path)
            _check(path)
            for name in () if read_only else (BLOBS, LOCKS):
                fs.make_folder(path / name)  # copies may lack what is empty

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[View]:
        self._check_open()
        view = FilesView(self._home)
        with _translated(self.path), self._home.reading():
            try:
                yield view
            finally:
                view.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def version(self) -> object:
        self._check_open()
        try:
            return fs.read(self.path / VERSION)
        except FileNotFoundError:
            return b""

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[StoreFolder]:
        self._check_open()
        if self.read_only:
            raise Unavailable(
                f"the store {self.path} was opened read-only", hint="open it without read_only"
            )
        try:
            self._home.refuse_links()
            yield self._home
        except OSError:
            with _translated(self.path):
                raise

    def commit(self, batch: Batch) -> None:
        with self._writing() as home:
            size = batch.size()
            if size:
                home.check_room(size)
            writer.commit(home, batch)

    def commit_all(self, first: Batch, rest: Sequence[Batch]) -> list[bool]:
        with self._writing() as home:
            return writer.commit_all(home, first, rest)

    def renew(self, session: int, token: bytes) -> bool:
        with self._writing() as home:
            return journal.renew(home, session, token)

    def compact(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        erase: bool = False,  # noqa: ARG002 - without it, nothing is left in the files either
    ) -> bool:
        with self._writing() as home:
            return maintain.compact(home, progress)

    def salvage(self, accept: int | None = None) -> bool:
        with self._writing() as home:
            return maintain.recount(home) if accept is None else maintain.accept(home, accept)

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._writing() as home, fs.locked(self.path / LOCKS / "counters", home.timeout):
            counters = store_folder.read(self.path)
            first = store_folder.beyond(home.catalog, space, counters[space])
            store_folder.write(self.path, counters | {space: first + count})
            return first

    def identity(self) -> object:
        return fs.identity(self.path)

    def backup(self, path: Path) -> None:
        self._check_open()
        with _translated(path):
            maintain.backup(self._home, path, (COUNTERS,), MARKER)

    def refuse_links(self) -> None:
        """Raise Corrupt if there is a link anywhere in the store."""
        for link in self._home.links():
            raise link

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
    """A new store in an empty folder; if this fails, the folder is as it was."""
    _refuse_strange(path)  # before there is a lock in it
    with fs.new_folders(path), fs.locked(path / ".lock", timeout):
        if (path / MARKER).exists():
            return  # another process was faster
        made = [path / ".lock"]
        try:
            _refuse_strange(path)
            _fill(path, made)
        except BaseException:
            # A store that others may use already stays, even if it may not be durable.
            for each in () if (path / MARKER).exists() else reversed(made):
                with suppress(OSError):
                    each.rmdir() if each.is_dir() else each.unlink()
            raise


def _refuse_strange(path: Path) -> None:
    names = {e.name for e in os.scandir(path)} if path.exists() else set()
    strange = names - {*_FOLDERS, COUNTERS, ".lock"}
    strange = {name for name in strange if not name.startswith(fs.TEMPORARY)}
    if strange and MARKER not in strange:
        raise InvalidRequest(
            f"{path} is a folder of something else: it has {min(strange)!r} in it",
            hint="give the path of a new or empty folder",
        )


def _fill(path: Path, made: list[Path]) -> None:
    """Write a new store; `made` gets each path before it is made."""
    locks = [path / LOCKS / name for name in ("turn", "readers")]
    ours = [*[path / name for name in _FOLDERS], *locks, path / COUNTERS]
    made += [each for each in ours if not each.exists()]
    for name in _FOLDERS:
        fs.make_folder(path / name)
    for each in locks:
        os.close(fs.open_to_write(each, os.O_CREAT))
    fs.sync(path.parent)
    store_folder.write(path, dict.fromkeys(SPACES, 1))
    marker = {"holdfast": "a store of files", "format": FORMAT, "id": secrets.token_hex(8)}
    fs.replace(path / MARKER, portable.dumps(marker) + b"\n")


def _has_sessions(path: Path) -> bool:
    return (path / SESSIONS).is_dir() and any(os.listdir(path / SESSIONS))


def _check(path: Path) -> None:
    try:
        format = portable.loads(fs.read(path / MARKER))["format"]
        if type(format) is not int:
            raise TypeError
    except (ValueError, TypeError, LookupError) as e:
        raise Corrupt(f"{path / MARKER} is damaged") from e
    if format > FORMAT:
        raise UnsupportedFormat(f"the store {path} has format {format}, newer than this version's")
    if not (path / SESSIONS).is_dir():
        raise Corrupt(f"the store {path} is damaged: its folder {SESSIONS} is missing")
