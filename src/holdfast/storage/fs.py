"""File system tools: atomic files, fsync, links and locks."""

from __future__ import annotations

import errno
import io
import os
import random
import stat
import sys
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import Corrupt, Unavailable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO, Self

HAS_LOCKS = fcntl is not None
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "9p", "fuse.sshfs", "glusterfs"}
_MOUNTS = Path("/proc/self/mountinfo")
_BACK_OFF = (50e-6, 600e-6)
_OPEN_AT_ONCE = 64
_SEALED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
"""The errors that mean that a read-only store cannot have a lock file."""
TEMPORARY = ".new-"
"""The beginning of the names of drafts. Drafts that a crash left behind can be removed."""


def absolute(path: Path) -> Path:
    """Return an absolute path, which stays valid if the process changes its folder."""
    try:
        return path.absolute()
    except OSError as e:
        raise Unavailable(f"the folder that {path} is in does not exist any more") from e


def identity(path: Path) -> object:
    """Return a value that is equal for all paths and links to the same file or folder."""
    try:
        found = path.stat()
    except OSError:  # removed while it is open: it has no other path
        return path
    return found.st_dev, found.st_ino


ROOM = 128 << 10
"""Bytes of a disk that saves leave free, because gc needs some to free more."""
_LOOK_AGAIN = 8 << 20


class Room:
    """Knows whether a disk has room for a save. It checks again every few megabytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._budget = folder, 0

    def has(self, size: int, pending: int = 0) -> bool:
        """Return whether `size` bytes can be written, besides `pending` and the reserve."""
        self._budget -= size
        if self._budget < 0:
            left = free_space(self._folder) - ROOM - pending - size
            self._budget = min(left, _LOOK_AGAIN)
        return self._budget >= 0


def free_space(folder: Path) -> int:
    """Return the free bytes of a disk; a huge number if unknown."""
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):  # on Windows there is no such call
        return 1 << 62
    return found.f_bavail * found.f_frsize


def is_there(e: OSError) -> bool:
    """Return whether an error means more than a missing file."""
    return e.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


def sync(path: Path | str) -> None:
    """fsync a file or directory. Raise if it fails; SQLite ignores this for directories."""
    if os.name == "nt" and os.path.isdir(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def sync_handle(handle: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)  # fsync there stops at the disk's own cache
    else:
        os.fsync(handle)


# -- links ---------------------------------------------------------------------------------------
# Links below a store's folder may lead anywhere, so they are neither followed nor written.


def linked(path: Path | str) -> Corrupt:
    return Corrupt(
        f"{path} is a link, and links inside a store are not followed",
        hint="put the file or folder itself in its place, or remove it",
    )


def refuse_link(path: Path | str) -> None:
    """Raise Corrupt if a file or folder is a link."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # it is missing; opening it raises any other error
    if stat.S_ISLNK(mode):
        raise linked(path)


def links(path: Path | str) -> Iterator[str]:
    """Return the path if it is a link, or all links in a folder."""
    if os.path.islink(path):
        yield os.fspath(path)
        return
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False):
                yield from links(entry.path)


def open_own(path: Path | str, how: int) -> int:
    """Open a file of a store. Raise Corrupt if it is a link."""
    try:
        return os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise linked(path) from e
        raise


def open_to_write(path: Path | str, how: int = 0) -> int:
    return open_own(path, how | os.O_RDWR)


def read(path: Path | str) -> bytes:
    with io.FileIO(path, "rb", opener=open_own) as file:
        return file.readall()


def copy(source: Path | str, target: Path | str) -> None:
    """Copy what is in a file of a store to a new file."""
    import shutil  # only backups need it, and it takes 2 ms

    with io.FileIO(source, "rb", opener=open_own) as file, open(target, "xb") as out:
        shutil.copyfileobj(file, out)


def start_writing(handle: int) -> None:
    """Let the disk start to write data that is synced soon.

    The next sync takes part of it along.
    """
    if sys.platform == "linux":
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def write_all(handle: int, data: bytes, at: int) -> None:
    """Write all of `data` at an offset. One system call may write less."""
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:] if done else data, at + done)


def read_all(handle: int, size: int, at: int) -> bytes:
    """Read up to `size` bytes at an offset. One system call returns at most 2 GiB."""
    data = os.pread(handle, size, at)
    if len(data) == size or not data:
        return data
    parts, done = [data], len(data)
    while done < size and (data := os.pread(handle, size - done, at + done)):
        parts.append(data)
        done += len(data)
    return b"".join(parts)


def replace(path: Path | str, data: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically: write a draft, fsync, rename, fsync.

    After a crash, the file is complete or as it was before.
    """
    refuse_link(path)
    parent = os.path.dirname(path)
    draft = f"{parent}/{TEMPORARY}{os.urandom(8).hex()}"
    try:
        handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, data, 0)
            if durable:
                sync_handle(handle)
        finally:
            os.close(handle)
        os.replace(draft, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    if durable:
        sync(parent)


def create(path: Path | str, write: Callable[[BinaryIO], None]) -> None:
    """Create a file atomically. Raise FileExistsError if it exists by the end."""
    parent = os.path.dirname(os.path.abspath(path))
    draft = f"{parent}/{TEMPORARY}{os.urandom(8).hex()}"
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            sync_handle(handle)
        os.link(draft, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
    sync(parent)


class Batch:
    """Files that are written one after another, and synced together at the end of a block.

    The first sync takes along much of the work of the others. After a crash any of them may be
    incomplete.
    """

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._written: list[tuple[int, Callable[[], None] | None]] = []
        self._folders: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._sync()
                for folder in self._folders if self._durable else ():
                    sync(folder)
        finally:
            self._close()

    def add(
        self, handle: int, *, folder: str | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Sync and close a file at the end, and its folder if its name is new. Then call `then`."""
        self._written.append((handle, then))
        if folder is not None:
            self._folders[folder] = None
        if len(self._written) >= _OPEN_AT_ONCE:
            self._sync()
            self._close()

    def put(self, path: str, data: bytes) -> None:
        """Write a new file, or replace one that no commit refers to."""
        try:
            handle = self._draft(path, data)
        except FileExistsError:  # from a failed attempt; another process may be reading it
            refuse_link(path)
            draft = f"{os.path.dirname(path)}/{TEMPORARY}{os.urandom(8).hex()}"
            handle = self._draft(draft, data, name=path)
        self.add(handle, folder=os.path.dirname(path))

    def _draft(self, path: str, data: bytes, name: str | None = None) -> int:
        """Return the handle of a new or emptied file."""
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, data, 0)
            if name is not None:
                os.replace(path, name)
        except BaseException:
            os.close(handle)
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise
        return handle

    def _sync(self) -> None:
        for handle, _ in self._written[1:] if self._durable else ():
            start_writing(handle)
        for handle, then in self._written:
            if self._durable:
                sync_handle(handle)
            if then is not None:
                then()

    def _close(self) -> None:
        while self._written:
            os.close(self._written.pop()[0])


def make_folder(path: Path, *, durable: bool = True) -> None:
    """Create a private folder if it is missing. It is durable when this returns."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    if durable:
        sync(path.parent)


@contextmanager
def new_folders(path: Path) -> Iterator[None]:
    """Create a folder and its missing parents. They are durable inside of the block.

    If the block fails, the folders that were created are removed.
    """
    missing: list[Path] = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        missing.insert(0, folder)
    made: list[Path] = []
    try:
        for folder in missing:
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(folder, 0o700)
                made.insert(0, folder)
                sync(folder.parent)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # another process uses it already
                os.rmdir(folder)
        raise


def refuse_missing(folder: Path) -> None:
    """Raise if the folder of a new store is missing.

    Only create=True creates it: it may be a typo.
    """
    if not folder.is_dir():
        raise Unavailable(
            f"the folder {folder} does not exist",
            hint="make it first, or open the store with create=True",
        )


# -- locks ---------------------------------------------------------------------------------------
# flock belongs to an open file: it excludes threads and processes alike, and dies with its holder.

_held: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


@contextmanager
def locked(
    path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
) -> Iterator[None]:
    """Hold a lock. Raise Unavailable, with its holder, after `timeout` seconds.

    Raise FileNotFoundError if the folder is missing or is removed. With `sealed`, the
    lock file is neither created nor written.
    """
    there = sealed or (shared and os.path.exists(path))
    how = os.O_RDONLY if there else os.O_RDWR | os.O_CREAT
    while True:
        # A file object: should we be interrupted before we can close it, it is closed all the same.
        with io.FileIO(path, "rb" if there else "rb+", opener=partial(_open, how)) as file:
            _held.add(file)
            handle = file.fileno()
            _acquire(handle, path, timeout, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            try:
                if os.stat(path).st_ino != os.fstat(handle).st_ino:
                    continue  # our lock file was replaced
                if not (shared or sealed):
                    _sign(handle)
                yield
                return
            finally:
                if not file.closed:  # as it is in a child, whose parent has the lock
                    # Closing it is not enough: a child may have a copy that `_held` did not know.
                    fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def locked_if_possible(path: Path | str, timeout: float, *, shared: bool) -> Iterator[None]:
    """Hold a lock of a store that may be read-only.

    If there is no lock file, nothing can change.
    """
    with ExitStack() as stack:
        for sealed in (False, True):
            try:
                lock = locked(path, timeout, shared=shared, sealed=sealed)
                stack.enter_context(lock)
                break
            except OSError as e:
                if e.errno not in _SEALED:
                    raise
        yield


def _open(how: int, path: str, _: int) -> int:
    return open_own(path, how)


def _sign(handle: int) -> None:
    """Write our process id into the lock file, for error messages."""
    ours = b"%-20d\n" % os.getpid()
    if os.pread(handle, len(ours), 0) != ours:
        os.pwrite(handle, ours, 0)


def _acquire(handle: int, path: Path | str, timeout: float, how: int) -> None:
    deadline: float | None = None
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            deadline = deadline or now + timeout
            if now >= deadline:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip()
                raise Unavailable(
                    f"{os.path.dirname(path)} is locked by process {holder or 'unknown'}",
                    hint="it may be stopped; nothing was written, try again",
                ) from None
            time.sleep(random.uniform(*_BACK_OFF))


def _after_fork_in_child() -> None:
    """Close the locks of the parent in a forked child: they are held as long as a copy is open."""
    for file in list(_held):
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder; empty if unknown."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""  # not Linux
    where = str(folder.resolve())
    best, kind = "", ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def is_sealed(path: Path) -> bool:
    """Return whether a file cannot be written, by its mount or by its and its folder's mode."""
    if hasattr(os, "statvfs") and os.statvfs(path).f_flag & os.ST_RDONLY:
        return True
    return not any(os.stat(each).st_mode & 0o222 for each in (path, path.parent))


def refuse_network(folder: Path) -> None:
    """Refuse network file systems: locks, and SQLite's shared memory, work on one machine only."""
    kind = file_system(folder)
    if kind in _NETWORK:
        raise Unavailable(
            f"{folder} lies on a network file system ({kind}), where locks are not safe",
            hint="use a local disk, or PostgreSQL for many machines",
        )
